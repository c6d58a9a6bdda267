-- Triggers: deliveries and commands that start runs.

-- name: put_trigger
-- The same content by the same key changes nothing, not even the update time.
INSERT INTO interlock.trigger (tenant_id, name, kind, command, key_id, workspace_id, workflow, source, digest, created_at,
                     updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9, interlock.now(), interlock.now())
ON CONFLICT (tenant_id, name) DO UPDATE
   SET kind = excluded.kind, command = excluded.command, key_id = excluded.key_id,
       workspace_id = excluded.workspace_id, workflow = excluded.workflow, source = excluded.source,
       digest = excluded.digest,
       updated_at = CASE WHEN (trigger.digest, trigger.key_id) = (excluded.digest, excluded.key_id)
                         THEN trigger.updated_at ELSE excluded.updated_at END
RETURNING *;

-- name: trigger_named
SELECT trigger.*, api_key.name AS key_name FROM interlock.trigger JOIN interlock.api_key ON api_key.id = key_id
 WHERE trigger.tenant_id = $1 AND trigger.name = $2 AND ($3::text IS NULL OR trigger.workspace_id = $3);

-- name: list_triggers
SELECT trigger.*, api_key.name AS key_name FROM interlock.trigger JOIN interlock.api_key ON api_key.id = key_id
 WHERE trigger.tenant_id = $1 AND ($2::text IS NULL OR trigger.name > $2)
   AND ($4::text IS NULL OR trigger.workspace_id = $4)
 ORDER BY trigger.name LIMIT $3;

-- name: delete_trigger
DELETE FROM interlock.trigger USING interlock.api_key
 WHERE api_key.id = key_id AND trigger.tenant_id = $1 AND trigger.name = $2
   AND ($3::text IS NULL OR trigger.workspace_id = $3)
RETURNING trigger.*, api_key.name AS key_name;

-- name: trigger_of_command
SELECT source, workspace_id FROM interlock.trigger
 WHERE tenant_id = $1 AND command = $2 AND ($3::text IS NULL OR workspace_id IS NULL OR workspace_id = $3);

-- name: trigger_for_delivery
-- With the key that the trigger acts with, revoked or not.
SELECT trigger.source, api_key.*, tenant.name AS tenant
  FROM interlock.tenant
  JOIN interlock.trigger ON trigger.tenant_id = tenant.id AND trigger.name = $2 AND trigger.kind = $3
  JOIN interlock.api_key ON api_key.id = trigger.key_id
 WHERE tenant.name = $1;
