-- Access: keys and what they may decide.

-- A vote or grant is valid only as far as its key: within the key's workspace, and until the key is revoked. Returns
-- the key of an actor in votes and grants, which is written as name, colon, key id.
CREATE OR REPLACE FUNCTION interlock.key_of(actor text) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN actor ~ ':[0-9a-f-]{36}$' THEN right(actor, 36)::uuid END
$$;

-- True if the key was not revoked since. Votes of a revoked key do not count unless they already decided an approval.
CREATE OR REPLACE FUNCTION interlock.key_holds(actor text) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT EXISTS (SELECT FROM interlock.api_key WHERE id = interlock.key_of(actor) AND revoked_at IS NULL)
$$;
