-- What somebody said with their key reaches as far as the key: within its workspace, and until it is revoked.

-- The key that an actor in votes and grants acted with: their name, a colon, its id.
CREATE FUNCTION key_of(actor text) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN actor ~ ':[0-9a-f-]{36}$' THEN right(actor, 36)::uuid END
$$;

-- Whether it was not revoked since: else what they said counts no more, unless it has decided something.
CREATE FUNCTION key_holds(actor text) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT EXISTS (SELECT FROM api_key WHERE id = key_of(actor) AND revoked_at IS NULL)
$$;

-- That of whoever gave it; null for the whole tenant.
ALTER TABLE standing_grant ADD COLUMN workspace_id text;
UPDATE standing_grant SET workspace_id = api_key.workspace_id FROM api_key WHERE api_key.id = key_of(created_by);
