-- What somebody said with their key reaches as far as the key: within its workspace, and until it is revoked.

-- The key that an actor in votes and grants acted with: their name, a colon, its id.
CREATE FUNCTION key_of(actor text) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN actor ~ ':[0-9a-f-]{36}$' THEN right(actor, 36)::uuid END
$$;

-- That of whoever gave it; null for the whole tenant.
ALTER TABLE standing_grant ADD COLUMN workspace_id text;
UPDATE standing_grant SET workspace_id = api_key.workspace_id FROM api_key WHERE api_key.id = key_of(created_by);
