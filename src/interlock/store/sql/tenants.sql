-- Tenants, their keys and their workflows.

-- name: create_tenant
WITH made AS (
  INSERT INTO tenant (id, name, created_at) VALUES ($2, $3, coalesce($1, now()))
  ON CONFLICT (name) DO NOTHING
  RETURNING id
), paced AS (
  INSERT INTO start_rate (tenant_id) SELECT id FROM made
)
INSERT INTO lane (tenant_id, max_concurrency, weight, max_runs_per_min, max_writes_per_run)
SELECT id, $4, $5, $6, $7 FROM made
RETURNING tenant_id;

-- name: tenant_named
SELECT tenant.*, lane.max_concurrency, lane.weight, lane.in_flight, lane.max_runs_per_min, lane.max_writes_per_run
  FROM tenant JOIN lane ON lane.tenant_id = tenant.id WHERE name = $1;

-- name: list_tenants
SELECT tenant.*, lane.max_concurrency, lane.weight, lane.in_flight, lane.max_runs_per_min, lane.max_writes_per_run
  FROM tenant JOIN lane ON lane.tenant_id = tenant.id
 WHERE ($1::uuid IS NULL OR tenant.id > $1) ORDER BY tenant.id LIMIT $2;

-- name: update_tenant
-- Each cap comes with a flag that says whether to change it, since NULL removes a cap. Places in a minute that were
-- given under a wider cap stay given. A lane that was full may have room now, so this notifies the workers.
WITH sides AS (
  UPDATE lane SET weight = coalesce($8, lane.weight) FROM tenant WHERE side_of = tenant.id AND tenant.name = $1
), paced AS (
  UPDATE start_rate SET used = least(used, $5::int) FROM tenant WHERE $4 AND tenant_id = tenant.id AND tenant.name = $1
)
UPDATE lane
   SET max_concurrency = CASE WHEN $2 THEN $3::int ELSE max_concurrency END,
       max_runs_per_min = CASE WHEN $4 THEN $5::int ELSE max_runs_per_min END,
       max_writes_per_run = CASE WHEN $6 THEN $7::int ELSE max_writes_per_run END,
       weight = coalesce($8, lane.weight)
  FROM tenant
 WHERE tenant.id = lane.tenant_id AND tenant.name = $1
RETURNING tenant.*, lane.max_concurrency, lane.weight, lane.in_flight, lane.max_runs_per_min, lane.max_writes_per_run,
          pg_notify('interlock_ready', '')::text AS told;

-- name: usage
-- Each tenant's use against its caps. A place in this minute counts as used once a place in a later minute was given.
-- Counting the queue ends at 10,000.
SELECT tenant.id, tenant.name AS tenant, lane.weight, lane.max_concurrency, lane.in_flight, lane.max_runs_per_min,
       lane.max_writes_per_run,
       CASE WHEN lane.max_runs_per_min IS NULL OR start_rate.minute IS NULL OR start_rate.minute < _.minute THEN 0
            WHEN start_rate.minute = _.minute THEN start_rate.used
            ELSE lane.max_runs_per_min END AS runs_this_minute,
       (SELECT count(*) FROM run
         WHERE run.tenant_id = tenant.id AND run.status = 'pending' AND run.wake_at > coalesce($1, now())
       ) AS runs_waiting,
       (SELECT count(*) FROM (SELECT FROM ready WHERE ready.tenant_id = tenant.id LIMIT 10000) AS counted) AS ready,
       (SELECT jsonb_agg(jsonb_build_object(
                 'workflow', cap.workflow, 'max_concurrency', cap.max_concurrency,
                 'in_flight', (SELECT count(*) FROM run
                                WHERE capped AND lease_worker IS NOT NULL AND tenant_id = cap.tenant_id
                                  AND workflow = cap.workflow),
                 'waiting', (SELECT count(*) FROM ready
                              WHERE tenant_id = cap.tenant_id AND workflow = cap.workflow)
                          + (SELECT count(*) FROM held_back
                              WHERE tenant_id = cap.tenant_id AND workflow = cap.workflow)
               ) ORDER BY cap.workflow)
          FROM workflow_cap AS cap
         WHERE cap.tenant_id = tenant.id AND cap.max_concurrency IS NOT NULL) AS workflows
  FROM tenant
  JOIN lane ON lane.tenant_id = tenant.id
  JOIN start_rate ON start_rate.tenant_id = tenant.id
 CROSS JOIN LATERAL (SELECT date_trunc('minute', coalesce($1, now())) AS minute) AS _
 WHERE ($2::uuid IS NULL OR tenant.id = $2) AND ($3::uuid IS NULL OR tenant.id > $3)
 ORDER BY tenant.id LIMIT $4;

-- name: create_key
INSERT INTO api_key (id, tenant_id, workspace_id, name, role, hash, groups, created_at)
VALUES ($2, $3, $4, $5, $6, $7, $8, coalesce($1, now()))
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
-- The latest version with this content.
SELECT * FROM workflow WHERE tenant_id = $1 AND name = $2 AND digest = $3 ORDER BY version DESC LIMIT 1;

-- name: owner_of_workflow
-- The workspace of the key that applied the newest version: NULL for a key of the whole tenant, or if code defined it.
SELECT api_key.workspace_id
  FROM workflow LEFT JOIN api_key ON api_key.id = key_of(workflow.created_by)
 WHERE workflow.tenant_id = $1 AND workflow.name = $2
 ORDER BY version DESC LIMIT 1;

-- name: add_workflow_version
INSERT INTO workflow (tenant_id, name, version, digest, source, created_at, created_by)
SELECT $2, $3, 1 + coalesce((SELECT max(version) FROM workflow WHERE tenant_id = $2 AND name = $3), 0), $4,
       $5::text::jsonb, coalesce($1, now()), $6
RETURNING *;

-- name: set_workflow_cap
-- The cap of the newest version. A version without a cap removes an earlier one.
INSERT INTO workflow_cap (tenant_id, workflow, max_concurrency)
SELECT $1, $2, $3
 WHERE $3::int IS NOT NULL OR EXISTS (SELECT FROM workflow_cap WHERE tenant_id = $1 AND workflow = $2)
ON CONFLICT (tenant_id, workflow) DO UPDATE SET max_concurrency = excluded.max_concurrency
RETURNING workflow;

-- name: get_workflow
-- The newest version unless the caller names one.
SELECT * FROM workflow
 WHERE tenant_id = $1 AND name = $2 AND ($3::int IS NULL OR version = $3)
 ORDER BY version DESC LIMIT 1;

-- name: list_workflows
-- A name belongs to either workflows or agents, permanently.
SELECT DISTINCT ON (name) * FROM workflow
 WHERE tenant_id = $1 AND ($2::text IS NULL OR name > $2) AND (source ? 'model') = $4
 ORDER BY name, version DESC LIMIT $3;

-- name: workflow_versions
-- Newest first, from before version $4 if that is given.
SELECT name, version, digest, created_at, created_by FROM workflow
 WHERE tenant_id = $1 AND name = $2 AND ($4::int IS NULL OR version < $4) ORDER BY version DESC LIMIT $3;
