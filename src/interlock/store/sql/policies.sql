-- Policies: versions that never change, and which one is in force.

-- name: publish_policy
WITH made AS (
  INSERT INTO policy (tenant_id, version, digest, text, created_at, created_by)
  SELECT $2, 1 + coalesce((SELECT max(version) FROM policy WHERE tenant_id = $2), 0), $3, $4, coalesce($1, now()), $5
  RETURNING tenant_id, version, digest, created_at
), in_force AS (
  UPDATE lane SET policy_version = made.version FROM made WHERE lane.tenant_id = made.tenant_id
)
SELECT version, digest, created_at, pg_notify('interlock_policy', tenant_id::text)::text FROM made;

-- name: policy_in_force
SELECT lane.policy_version AS version, policy.digest, policy.text, policy.created_at, policy.created_by
  FROM lane LEFT JOIN policy ON policy.tenant_id = lane.tenant_id AND policy.version = lane.policy_version
 WHERE lane.tenant_id = $1;

-- name: recorded_decisions
-- For a backtest: what was decided, with the request it was decided on. A key of a workspace learns of that one only.
SELECT run_id, seq, at, step, data -> 'decision' AS decision FROM entry
 WHERE tenant_id = $1 AND jsonb_typeof(data -> 'decision') = 'object' AND run_id >= $2
   AND ($4::text IS NULL OR EXISTS (SELECT FROM run WHERE run.id = entry.run_id AND run.workspace_id = $4))
 ORDER BY run_id DESC, seq DESC LIMIT $3;
