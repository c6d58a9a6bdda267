-- Runs that start runs, and what they tell each other.

-- name: adopt_runs
-- In the transaction that started them.
UPDATE run SET parent_run_id = child.parent_id, parent_step = child.step
  FROM unnest($1::uuid[], $2::uuid[], $3::text[]) AS child (id, parent_id, step)
 WHERE run.id = child.id;

-- name: tell_parents
-- With the entry that ends a child.
INSERT INTO errand (tenant_id, from_run, to_run, command, step, at)
SELECT tenant_id, id, parent_run_id, 'child_ended', parent_step, coalesce($1, now())
  FROM run WHERE id = ANY($2::uuid[]) AND parent_step IS NOT NULL;

-- name: stop_children
-- With the entry that ends their parent.
INSERT INTO errand (tenant_id, from_run, to_run, command, at)
SELECT tenant_id, parent_run_id, id, 'cancel', coalesce($1, now())
  FROM run WHERE parent_run_id = ANY($2::uuid[]) AND completed_at IS NULL;

-- name: waiting_errands
SELECT id FROM errand ORDER BY id LIMIT $1;

-- name: take_errand
-- By one of those who saw it. If the command that follows fails, it is there again.
DELETE FROM errand WHERE id = (SELECT id FROM errand WHERE id = $1 FOR UPDATE SKIP LOCKED) RETURNING *;

-- name: await_flow
-- In the transaction that parks the run.
UPDATE run SET awaits_flow = awaited.flow
  FROM unnest($1::uuid[], $2::text[]) AS awaited (id, flow)
 WHERE run.id = awaited.id;

-- name: wake_awaiting
-- moves: run waiting_external -resume-> running
-- A worker says which flows it has. Those who wait for one of them go to the queue, for whoever comes first.
WITH awaiting AS MATERIALIZED (
  SELECT id FROM run WHERE awaits_flow = ANY($2::text[]) ORDER BY id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED
), woken AS (
  UPDATE run SET awaits_flow = NULL, wake_at = NULL, status = 'running', seq = run.seq + 1
    FROM awaiting WHERE run.id = awaiting.id
  RETURNING run.id, run.tenant_id, run.side_id, run.seq, run.watched_until,
            CASE WHEN run.capped THEN run.workflow END AS capped
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor)
  SELECT id, seq, tenant_id, coalesce($1, now()), 'run_transition', 'waiting_external', 'resume', 'running', 0, $4
    FROM woken
), in_order AS MATERIALIZED (
  SELECT tenant_id, id, side_id, capped, nextval('ready_turn') - (1::bigint << 62) AS turn
    FROM (SELECT * FROM woken ORDER BY id) AS by_age
), queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, id, side_id, turn, false, false FROM in_order WHERE capped IS NULL
), held AS (
  INSERT INTO held_back (tenant_id, workflow, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, capped, id, side_id, turn, false, false FROM in_order WHERE capped IS NOT NULL
  RETURNING run_id
), woke AS MATERIALIZED (
  -- Tenants' own lanes before side lanes: the lock order.
  SELECT CASE WHEN capped IS NULL THEN wake_lane(tenant_id, side_id)::text ELSE let_in(tenant_id, capped)::text END
    FROM (SELECT DISTINCT tenant_id, capped, CASE WHEN capped IS NULL THEN side_id END AS side_id
            FROM in_order, (SELECT count(*) FROM held) AS _
           ORDER BY side_id NULLS FIRST, tenant_id, capped) AS lanes
)
SELECT id, CASE WHEN watched_until > coalesce($1, now()) THEN pg_notify('interlock_run', id::text)::text END
  FROM woken, (SELECT count(*) FROM woke) AS _;
