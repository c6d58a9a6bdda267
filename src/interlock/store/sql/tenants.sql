-- Tenants, their keys and their workflows.

-- name: create_tenant
WITH made AS (
  INSERT INTO tenant (id, name, created_at) VALUES ($2, $3, coalesce($1, now()))
  ON CONFLICT (name) DO NOTHING
  RETURNING id
)
INSERT INTO lane (tenant_id, max_concurrency, weight) SELECT id, $4, $5 FROM made
RETURNING tenant_id;

-- name: tenant_named
SELECT tenant.*, lane.max_concurrency, lane.weight, lane.in_flight
  FROM tenant JOIN lane ON lane.tenant_id = tenant.id WHERE name = $1;

-- name: list_tenants
SELECT tenant.*, lane.max_concurrency, lane.weight, lane.in_flight
  FROM tenant JOIN lane ON lane.tenant_id = tenant.id
 WHERE ($1::uuid IS NULL OR id > $1) ORDER BY id LIMIT $2;

-- name: create_key
INSERT INTO api_key (id, tenant_id, workspace_id, name, role, hash, created_at)
VALUES ($2, $3, $4, $5, $6, $7, coalesce($1, now()))
ON CONFLICT DO NOTHING
RETURNING *;

-- name: any_key
SELECT EXISTS (SELECT FROM api_key);

-- name: key_by_hash
SELECT api_key.*, tenant.name AS tenant FROM api_key JOIN tenant ON tenant.id = tenant_id
 WHERE hash = $1 AND revoked_at IS NULL;

-- name: list_keys
SELECT * FROM api_key
 WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id < $2) AND ($4::text IS NULL OR workspace_id = $4)
 ORDER BY id DESC LIMIT $3;

-- name: revoke_key
UPDATE api_key SET revoked_at = coalesce(revoked_at, $1, now())
 WHERE tenant_id = $2 AND id = $3 AND ($4::text IS NULL OR workspace_id = $4)
RETURNING *, pg_notify('interlock_keys', '')::text AS announced;

-- name: lock_workflow_name
SELECT pg_advisory_xact_lock(hashtextextended($1::uuid::text || $2::text, 7));

-- name: find_workflow_digest
SELECT * FROM workflow WHERE tenant_id = $1 AND name = $2 AND digest = $3;

-- name: add_workflow_version
INSERT INTO workflow (tenant_id, name, version, digest, source, created_at, created_by)
SELECT $2, $3, 1 + coalesce((SELECT max(version) FROM workflow WHERE tenant_id = $2 AND name = $3), 0), $4,
       $5::text::jsonb, coalesce($1, now()), $6
RETURNING *;

-- name: get_workflow
-- The newest version unless one is asked for.
SELECT * FROM workflow
 WHERE tenant_id = $1 AND name = $2 AND ($3::int IS NULL OR version = $3)
 ORDER BY version DESC LIMIT 1;

-- name: list_workflows
SELECT DISTINCT ON (name) * FROM workflow
 WHERE tenant_id = $1 AND ($2::text IS NULL OR name > $2)
 ORDER BY name, version DESC LIMIT $3;
