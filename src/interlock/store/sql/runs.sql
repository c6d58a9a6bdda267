-- Runs: starting them and looking at them.

-- name: start_runs
-- moves: run -create-> pending
-- One or many at once. An id that is already there was started by an earlier try of the same call. A tenant with a
-- rate gives each run the next free place in a minute; those of later minutes wait for theirs, in order.
WITH asked AS (
  SELECT * FROM unnest(
    $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::int[], $7::text[], $8::text[], $9::text[], $10::float8[],
    $11::float8[], $12::text[]
  ) WITH ORDINALITY AS a (id, tenant_id, workspace_id, workflow, workflow_version, input, trigger, requested_by,
                          deadline_seconds, watch_seconds, requester, place)
), rate AS MATERIALIZED (
  SELECT tenant_id, max_runs_per_min AS most, minute, CASE WHEN rate_minute = minute THEN rate_used ELSE 0 END AS used
    FROM lane
   CROSS JOIN LATERAL (SELECT greatest(rate_minute, date_trunc('minute', coalesce($1, now()))) AS minute) AS _
   WHERE max_runs_per_min IS NOT NULL AND tenant_id IN (SELECT tenant_id FROM asked)
     FOR NO KEY UPDATE OF lane
), placed AS (
  SELECT asked.*, rate.minute + ((rate.used + row_number() OVER (PARTITION BY tenant_id ORDER BY place) - 1)
                                 / rate.most) * interval '1 minute' AS turn
    FROM asked LEFT JOIN rate USING (tenant_id)
), started AS (
  INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                   created_at, deadline_at, watched_until, requester, wake_at)
  SELECT id, tenant_id, workspace_id, workflow, workflow_version, 'pending', input::jsonb, trigger::jsonb, requested_by,
         1, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => deadline_seconds),
         coalesce($1, now()) + make_interval(secs => watch_seconds), requester::jsonb,
         CASE WHEN turn > coalesce($1, now()) THEN turn END
    FROM placed
  ON CONFLICT (id) DO NOTHING
  RETURNING id, tenant_id, workflow, workflow_version, trigger, requested_by, created_at, wake_at
), paced AS (
  UPDATE lane
     SET rate_minute = rate.minute + ((rate.used + taken.runs - 1) / rate.most) * interval '1 minute',
         rate_used = (rate.used + taken.runs - 1) % rate.most + 1
    FROM rate JOIN (SELECT tenant_id, count(*)::int AS runs FROM started GROUP BY tenant_id) AS taken USING (tenant_id)
   WHERE lane.tenant_id = rate.tenant_id
  RETURNING lane.tenant_id
), queued AS (
  INSERT INTO ready (tenant_id, run_id, turn, fresh, lost)
  SELECT tenant_id, id, nextval('ready_turn'), true, false FROM started WHERE wake_at IS NULL
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor, data)
  SELECT id, 1, tenant_id, created_at, 'run_created', 'create', 'pending', 0, requested_by,
         jsonb_build_object('workflow', workflow, 'version', workflow_version, 'trigger', trigger)
    FROM started
)
SELECT coalesce($1, now()) AS now, wake_lane(tenant_id)::text,
       (SELECT max(wake_at) FROM started WHERE started.tenant_id = lanes.tenant_id) AS turn
  FROM (SELECT DISTINCT tenant_id FROM asked) AS lanes, (SELECT count(*) FROM paced) AS _;

-- name: insert_run
-- moves: run -create-> pending
-- A run that does not go to the queue as it is: its first step is a gate or a wait, or it continues another run.
INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                 created_at, deadline_at, watched_until, resumed_from, resume_count, requester)
VALUES ($2, $3, $4, $5, $6, 'pending', $7::text::jsonb, $8::text::jsonb, $9, 0,
        coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $10),
        coalesce($1, now()) + make_interval(secs => $11), $12, $13, $14::text::jsonb)
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
   AND ($9::uuid IS NULL OR parent_run_id = $9)
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
