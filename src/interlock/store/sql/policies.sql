-- Policies: versions that never change, and which one is in force.

-- name: lock_policy
-- Versions of a tenant's policy are published one after the other.
SELECT pg_advisory_xact_lock(hashtextextended($1::uuid::text, 43));

-- name: publish_policy
-- It is in force from its COMMIT on.
WITH made AS (
  INSERT INTO interlock.policy (tenant_id, version, digest, text, created_at, created_by)
  SELECT $1, 1 + coalesce((SELECT max(version) FROM interlock.policy WHERE tenant_id = $1), 0), $2, $3, interlock.now(), $4
  RETURNING tenant_id, version, digest, created_at, created_by
), enforced AS (
  UPDATE interlock.tenant_limits SET policy_version = made.version FROM made WHERE tenant_limits.tenant_id = made.tenant_id
)
SELECT version, digest, created_at, created_by, pg_notify('interlock.policy', tenant_id::text)::text FROM made;

-- name: policy_in_force
SELECT tenant_limits.policy_version AS version, policy.digest, policy.text, policy.created_at, policy.created_by
  FROM interlock.tenant_limits LEFT JOIN interlock.policy ON policy.tenant_id = tenant_limits.tenant_id AND policy.version = tenant_limits.policy_version
 WHERE tenant_limits.tenant_id = $1;

-- name: recorded_decisions
-- For a backtest: past decisions, each with its request. A workspace key reads those of its workspace only.
SELECT run_id, seq, at, step, data -> 'decision' AS decision FROM interlock.journal_entry
 WHERE tenant_id = $1 AND jsonb_typeof(data -> 'decision') = 'object' AND run_id >= $2
   AND ($4::text IS NULL OR EXISTS (SELECT FROM interlock.run WHERE run.id = journal_entry.run_id AND run.workspace_id = $4))
 ORDER BY run_id DESC, seq DESC LIMIT $3;

-- name: policy_versions
-- Newest first, from before version $3 if that is given; only those with the digest $4, if that is given.
SELECT version, digest, created_at, created_by, length(text) AS characters FROM interlock.policy
 WHERE tenant_id = $1 AND ($3::int IS NULL OR version < $3) AND ($4::text IS NULL OR digest = $4)
 ORDER BY version DESC LIMIT $2;

-- name: policy_version
SELECT version, digest, text, created_at, created_by FROM interlock.policy WHERE tenant_id = $1 AND version = $2;
