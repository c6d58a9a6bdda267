-- Tenants, their keys and their workflows.

-- name: create_tenant
WITH made AS (
  INSERT INTO interlock.tenant (id, name, created_at) VALUES ($1, $2, interlock.now())
  ON CONFLICT (name) DO NOTHING
  RETURNING id
), paced AS (
  INSERT INTO interlock.start_rate (tenant_id) SELECT id FROM made
), queued AS (
  INSERT INTO interlock.queue (id, tenant_id, kind, max_concurrency, weight) SELECT id, id, 'tenant', $3, $4 FROM made
)
INSERT INTO interlock.tenant_limits (tenant_id, max_runs_per_min, max_writes_per_run)
SELECT id, $5, $6 FROM made
RETURNING tenant_id;

-- name: tenant_named
SELECT tenant.*, queue.max_concurrency, queue.weight, queue.in_flight, tenant_limits.max_runs_per_min, tenant_limits.max_writes_per_run
  FROM interlock.tenant
  JOIN interlock.queue ON queue.id = tenant.id
  JOIN interlock.tenant_limits ON tenant_limits.tenant_id = tenant.id
  WHERE name = $1;

-- name: list_tenants
SELECT tenant.*, queue.max_concurrency, queue.weight, queue.in_flight, tenant_limits.max_runs_per_min, tenant_limits.max_writes_per_run
  FROM interlock.tenant
  JOIN interlock.queue ON queue.id = tenant.id
  JOIN interlock.tenant_limits ON tenant_limits.tenant_id = tenant.id
 
 WHERE ($1::uuid IS NULL OR tenant.id > $1) ORDER BY tenant.id LIMIT $2;

-- name: update_tenant
-- Each cap comes with a flag that says whether to change it, since NULL removes a cap. Places in a minute that were
-- given under a wider cap stay given. A queue at capacity may have room now, so this notifies the workers.
WITH changed AS (
  SELECT id, name, created_at FROM interlock.tenant WHERE name = $1
), further AS (
  UPDATE interlock.queue SET weight = coalesce($8, weight) FROM changed WHERE tenant_id = changed.id AND kind <> 'tenant'
), paced AS (
  UPDATE interlock.start_rate SET used = least(used, $5::int) FROM changed WHERE $4 AND tenant_id = changed.id
), limited AS (
  UPDATE interlock.tenant_limits
     SET max_runs_per_min = CASE WHEN $4 THEN $5::int ELSE max_runs_per_min END,
         max_writes_per_run = CASE WHEN $6 THEN $7::int ELSE max_writes_per_run END
    FROM changed WHERE tenant_id = changed.id
  RETURNING max_runs_per_min, max_writes_per_run
)
UPDATE interlock.queue
   SET max_concurrency = CASE WHEN $2 THEN $3::int ELSE max_concurrency END,
       weight = coalesce($8, weight)
  FROM changed, limited
 WHERE queue.id = changed.id
RETURNING changed.*, queue.max_concurrency, queue.weight, queue.in_flight, limited.max_runs_per_min,
          limited.max_writes_per_run, pg_notify('interlock.ready', '')::text AS told;

-- name: usage
-- Each tenant's use against its caps. A place in this minute counts as used once a place in a later minute was given.
-- Counting the queue ends at 10,000.
SELECT tenant.id, tenant.name AS tenant, queue.weight, queue.max_concurrency, queue.in_flight, tenant_limits.max_runs_per_min,
       tenant_limits.max_writes_per_run,
       CASE WHEN tenant_limits.max_runs_per_min IS NULL OR start_rate.minute IS NULL OR start_rate.minute < _.minute THEN 0
            WHEN start_rate.minute = _.minute THEN start_rate.used
            ELSE tenant_limits.max_runs_per_min END AS runs_this_minute,
       (SELECT count(*) FROM interlock.run
         WHERE run.tenant_id = tenant.id AND run.status = 'pending' AND run.resume_at > interlock.now()
       ) AS runs_waiting,
       (SELECT count(*) FROM (SELECT FROM interlock.ready_run WHERE ready_run.tenant_id = tenant.id LIMIT 10000) AS counted) AS ready,
       (SELECT jsonb_agg(jsonb_build_object(
                 'workflow', cap.workflow, 'max_concurrency', cap.max_concurrency,
                 'in_flight', (SELECT count(*) FROM interlock.run
                                WHERE has_concurrency_limit AND lease_worker IS NOT NULL AND tenant_id = cap.tenant_id
                                  AND workflow = cap.workflow),
                 'waiting', (SELECT count(*) FROM interlock.ready_run
                              WHERE tenant_id = cap.tenant_id AND workflow = cap.workflow)
                          + (SELECT count(*) FROM interlock.blocked_run
                              WHERE tenant_id = cap.tenant_id AND workflow = cap.workflow)
               ) ORDER BY cap.workflow)
          FROM interlock.workflow_cap AS cap
         WHERE cap.tenant_id = tenant.id AND cap.max_concurrency IS NOT NULL) AS workflows
  FROM interlock.tenant
  JOIN interlock.queue ON queue.id = tenant.id
  JOIN interlock.tenant_limits ON tenant_limits.tenant_id = tenant.id
  JOIN interlock.start_rate ON start_rate.tenant_id = tenant.id
 CROSS JOIN LATERAL (SELECT date_trunc('minute', interlock.now()) AS minute) AS _
 WHERE ($1::uuid IS NULL OR tenant.id = $1) AND ($2::uuid IS NULL OR tenant.id > $2)
 ORDER BY tenant.id LIMIT $3;

-- name: create_key
INSERT INTO interlock.api_key (id, tenant_id, workspace_id, name, role, hash, groups, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, interlock.now())
ON CONFLICT DO NOTHING
RETURNING *;

-- name: any_key
SELECT EXISTS (SELECT FROM interlock.api_key);

-- name: key_by_hash
SELECT api_key.*, tenant.name AS tenant FROM interlock.api_key JOIN interlock.tenant ON tenant.id = tenant_id
 WHERE hash = $1 AND revoked_at IS NULL;

-- name: list_keys
SELECT * FROM interlock.api_key
 WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id < $2) AND ($4::text IS NULL OR workspace_id = $4)
 ORDER BY id DESC LIMIT $3;

-- name: revoke_key
UPDATE interlock.api_key SET revoked_at = coalesce(revoked_at, interlock.now())
 WHERE tenant_id = $1 AND id = $2 AND ($3::text IS NULL OR workspace_id = $3)
RETURNING *, pg_notify('interlock.keys', '')::text AS announced;

-- name: lock_workflow_name
SELECT pg_advisory_xact_lock(hashtextextended($1::uuid::text || $2::text, 7));

-- name: find_workflow_digest
-- The latest version with this content.
SELECT * FROM interlock.workflow WHERE tenant_id = $1 AND name = $2 AND digest = $3 ORDER BY version DESC LIMIT 1;

-- name: owner_of_workflow
-- The workspace of the key that applied the newest version: NULL for a key of the whole tenant, or if code defined it.
SELECT api_key.workspace_id
  FROM interlock.workflow LEFT JOIN interlock.api_key ON api_key.id = interlock.key_of(workflow.created_by)
 WHERE workflow.tenant_id = $1 AND workflow.name = $2
 ORDER BY version DESC LIMIT 1;

-- name: add_workflow_version
INSERT INTO interlock.workflow (tenant_id, name, version, digest, source, created_at, created_by)
SELECT $1, $2, 1 + coalesce((SELECT max(version) FROM interlock.workflow WHERE tenant_id = $1 AND name = $2), 0), $3,
       $4::text::jsonb, interlock.now(), $5
RETURNING *;

-- name: set_workflow_cap
-- The cap of the newest version. A version without a cap removes an earlier one.
INSERT INTO interlock.workflow_cap (tenant_id, workflow, max_concurrency)
SELECT $1, $2, $3
 WHERE $3::int IS NOT NULL OR EXISTS (SELECT FROM interlock.workflow_cap WHERE tenant_id = $1 AND workflow = $2)
ON CONFLICT (tenant_id, workflow) DO UPDATE SET max_concurrency = excluded.max_concurrency
RETURNING workflow;

-- name: get_workflow
-- The newest version unless the caller names one.
SELECT * FROM interlock.workflow
 WHERE tenant_id = $1 AND name = $2 AND ($3::int IS NULL OR version = $3)
 ORDER BY version DESC LIMIT 1;

-- name: list_workflows
-- A name belongs to either workflows or agents, permanently.
SELECT DISTINCT ON (name) * FROM interlock.workflow
 WHERE tenant_id = $1 AND ($2::text IS NULL OR name > $2) AND (source ? 'model') = $4
 ORDER BY name, version DESC LIMIT $3;

-- name: workflow_versions
-- Newest first, from before version $4 if that is given.
SELECT name, version, digest, created_at, created_by FROM interlock.workflow
 WHERE tenant_id = $1 AND name = $2 AND ($4::int IS NULL OR version < $4) ORDER BY version DESC LIMIT $3;
