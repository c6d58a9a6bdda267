-- Runs: starting them and looking at them.

-- name: start_runs
-- moves: run -create-> pending
-- One or many at once. An id that is already there was started by an earlier try of the same call.
WITH asked AS (
  SELECT * FROM unnest(
    $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::int[], $7::text[], $8::text[], $9::text[], $10::float8[],
    $11::float8[]
  ) AS a (id, tenant_id, workspace_id, workflow, workflow_version, input, trigger, requested_by, deadline_seconds,
          watch_seconds)
), started AS (
  INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                   created_at, deadline_at, watched_until)
  SELECT id, tenant_id, workspace_id, workflow, workflow_version, 'pending', input::jsonb, trigger::jsonb, requested_by,
         1, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => deadline_seconds),
         coalesce($1, now()) + make_interval(secs => watch_seconds)
    FROM asked
  ON CONFLICT (id) DO NOTHING
  RETURNING id, tenant_id, workflow, workflow_version, trigger, requested_by, created_at
), queued AS (
  INSERT INTO ready (tenant_id, run_id, turn, fresh, lost)
  SELECT tenant_id, id, nextval('ready_turn'), true, false FROM started
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor, data)
  SELECT id, 1, tenant_id, created_at, 'run_created', 'create', 'pending', 0, requested_by,
         jsonb_build_object('workflow', workflow, 'version', workflow_version, 'trigger', trigger)
    FROM started
)
SELECT coalesce($1, now()) AS now, wake_lane(tenant_id)::text
  FROM (SELECT DISTINCT tenant_id FROM asked) AS lanes;

-- name: insert_run
-- moves: run -create-> pending
-- A run that does not go to the queue as it is: its first step is a gate or a wait, or it continues another run.
INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                 created_at, deadline_at, watched_until, resumed_from, resume_count)
VALUES ($2, $3, $4, $5, $6, 'pending', $7::text::jsonb, $8::text::jsonb, $9, 0,
        coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $10),
        coalesce($1, now()) + make_interval(secs => $11), $12, $13)
ON CONFLICT (id) DO NOTHING
RETURNING *;

-- name: get_run
SELECT * FROM run WHERE tenant_id = $1 AND id = $2;

-- name: list_runs
-- Newest first. The cursor is the id of the last run seen.
SELECT * FROM run
 WHERE tenant_id = $1
   AND ($2::uuid IS NULL OR id < $2)
   AND ($3::text IS NULL OR status = $3)
   AND ($4::text IS NULL OR workflow = $4)
   AND ($5::uuid IS NULL OR session_id = $5)
   AND ($6::uuid IS NULL OR job_id = $6)
   AND ($8::text IS NULL OR workspace_id = $8)
 ORDER BY id DESC
 LIMIT $7;

-- name: count_runs_by_status
SELECT status, count(*) FROM run WHERE completed_at IS NULL GROUP BY status;

-- name: watch_run
-- Somebody follows the run: appends announce themselves until then. An ended run needs no watching.
UPDATE run SET watched_until = coalesce($1, now()) + make_interval(secs => $3)
 WHERE id = $2 AND completed_at IS NULL;

-- name: journal_of
SELECT run_id, seq, at, type, step, from_state, event, to_state, attempt, token, actor, data, output
  FROM entry WHERE run_id = ANY($1::uuid[]) ORDER BY run_id, seq;

-- name: entries_after
SELECT run_id, seq, at, type, step, from_state, event, to_state, attempt, token, actor, data, output
  FROM entry WHERE run_id = $1 AND seq > $2 ORDER BY seq LIMIT $3;
