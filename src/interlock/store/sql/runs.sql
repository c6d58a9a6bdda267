-- Runs: starting them and looking at them.

-- name: start_run
-- moves: run -create-> pending, run pending -start-> running, idempotency -> processing, idempotency processing -complete-> completed
-- One, alone, in the ordinary case; see the queue's migration.
SELECT at, answer
  FROM start_run($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
 WHERE at IS NOT NULL;

-- name: start_runs
-- moves: run -create-> pending
-- One or many at once. An id that is already there was started by an earlier try of the same call. A tenant with a
-- rate gives each run the next free place in a minute; those of later minutes wait for theirs, in order. Runs of a
-- workflow with a cap are held back until it has room. $14 names the jobs that they belong to; a job's lane has the id
-- of the job.
WITH asked AS (
  SELECT *
    FROM unnest(
           $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::int[], $7::text[], $8::text[], $9::text[],
           $10::float8[], $11::float8[], $12::text[], $13::boolean[], $14::uuid[]
         ) WITH ORDINALITY AS a (id, tenant_id, workspace_id, workflow, workflow_version, input, trigger, requested_by,
                                 deadline_seconds, watch_seconds, requester, capped, job_id, place)
), rate AS MATERIALIZED (
  -- Kept awake before its row is locked, as in wake_lane.
  SELECT tenant_id, pg_advisory_xact_lock_shared(hashtextextended(tenant_id::text, 42)) AS awake,
         max_runs_per_min AS most, minute, CASE WHEN rate_minute = minute THEN rate_used ELSE 0 END AS used
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
                   created_at, deadline_at, watched_until, requester, capped, wake_at, job_id, side_id)
  SELECT id, tenant_id, workspace_id, workflow, workflow_version, 'pending', input::jsonb, trigger::jsonb, requested_by,
         1, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => deadline_seconds),
         coalesce($1, now()) + make_interval(secs => watch_seconds), requester::jsonb, capped,
         CASE WHEN turn > coalesce($1, now()) THEN turn END, job_id, job_id
    FROM placed
  ON CONFLICT (id) DO NOTHING
  RETURNING id, tenant_id, workflow, workflow_version, trigger, requested_by, created_at, wake_at, capped, side_id
), paced AS (
  UPDATE lane
     SET rate_minute = rate.minute + ((rate.used + taken.runs - 1) / rate.most) * interval '1 minute',
         rate_used = (rate.used + taken.runs - 1) % rate.most + 1
    FROM rate JOIN (SELECT tenant_id, count(*)::int AS runs FROM started GROUP BY tenant_id) AS taken USING (tenant_id)
   WHERE lane.tenant_id = rate.tenant_id
  RETURNING lane.tenant_id
), queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, id, side_id, nextval('ready_turn'), true, false FROM started WHERE wake_at IS NULL AND NOT capped
), held AS (
  INSERT INTO held_back (tenant_id, workflow, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, workflow, id, side_id, nextval('ready_turn'), true, false
    FROM started WHERE wake_at IS NULL AND capped
  RETURNING tenant_id, workflow
), admitted AS MATERIALIZED (
  SELECT let_in(tenant_id, workflow) FROM (SELECT DISTINCT tenant_id, workflow FROM held ORDER BY 1, 2) AS capped
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor, data)
  SELECT id, 1, tenant_id, created_at, 'run_created', 'create', 'pending', 0, requested_by,
         jsonb_build_object('workflow', workflow, 'version', workflow_version, 'trigger', trigger)
    FROM started
)
SELECT coalesce($1, now()) AS now, wake_lane(tenant_id, job_id)::text,
       (SELECT max(wake_at) FROM started WHERE started.tenant_id = lanes.tenant_id) AS turn
  FROM (SELECT DISTINCT tenant_id, job_id FROM asked ORDER BY job_id NULLS FIRST, tenant_id) AS lanes,
       (SELECT count(*) FROM paced) AS _, (SELECT count(*) FROM admitted) AS __;

-- name: insert_run
-- moves: run -create-> pending
-- A run that does not go to the queue as it is: its first step is a gate or a wait, or it continues another run. It
-- takes the next free place in a minute like any other; `wake_at` is set if that is a later one.
WITH rate AS MATERIALIZED (
  -- Kept awake before its row is locked, as in wake_lane.
  SELECT tenant_id, pg_advisory_xact_lock_shared(hashtextextended(tenant_id::text, 42)) AS awake,
         max_runs_per_min AS most, minute, CASE WHEN rate_minute = minute THEN rate_used ELSE 0 END AS used
    FROM lane
   CROSS JOIN LATERAL (SELECT greatest(rate_minute, date_trunc('minute', coalesce($1, now()))) AS minute) AS _
   WHERE max_runs_per_min IS NOT NULL AND tenant_id = $3
     FOR NO KEY UPDATE OF lane
), place AS (
  SELECT tenant_id, minute + (used / most) * interval '1 minute' AS turn, used % most + 1 AS used FROM rate
), inserted AS (
  INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                   created_at, deadline_at, watched_until, resumed_from, resume_count, requester, capped,
                   root_id, wake_at)
  VALUES ($2, $3, $4, $5, $6, 'pending', $7::text::jsonb, $8::text::jsonb, $9, 0,
          coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $10),
          coalesce($1, now()) + make_interval(secs => $11), $12, $13, $14::text::jsonb, $15, $16,
          (SELECT turn FROM place WHERE turn > coalesce($1, now())))
  ON CONFLICT (id) DO NOTHING
  RETURNING *
), paced AS (
  UPDATE lane SET rate_minute = place.turn, rate_used = place.used
    FROM place JOIN inserted USING (tenant_id)
   WHERE lane.tenant_id = place.tenant_id
)
SELECT * FROM inserted;

-- name: root_run
-- In the transaction that started it: what its effects are called by, in place of its own id.
UPDATE run SET root_id = $2 WHERE id = $1;

-- name: get_run
-- A run's heartbeat is that of the worker that holds it.
SELECT run.*, worker.heartbeat_at AS last_heartbeat_at
  FROM run LEFT JOIN worker ON worker.id = run.lease_worker
 WHERE run.tenant_id = $1 AND run.id = $2;

-- name: get_run_to_show
-- With its journal if it has come to rest, or if it is wanted all the same.
SELECT run.*, (SELECT heartbeat_at FROM worker WHERE worker.id = run.lease_worker) AS last_heartbeat_at,
       CASE WHEN $3 OR completed_at IS NOT NULL OR status = 'waiting_approval'
            THEN ARRAY(SELECT entry FROM entry WHERE run_id = run.id ORDER BY seq) END AS entries
  FROM run WHERE tenant_id = $1 AND id = $2;

-- name: list_runs
-- Newest first. The cursor is the id of the last run seen.
SELECT run.*, worker.heartbeat_at AS last_heartbeat_at
  FROM run LEFT JOIN worker ON worker.id = run.lease_worker
 WHERE run.tenant_id = $1
   AND ($2::uuid IS NULL OR run.id < $2)
   AND ($3::text IS NULL OR run.status = $3)
   AND ($4::text IS NULL OR run.workflow = $4)
   AND ($5::uuid IS NULL OR run.session_id = $5)
   AND ($6::uuid IS NULL OR run.job_id = $6)
   AND ($8::text IS NULL OR run.workspace_id = $8)
   AND ($9::uuid IS NULL OR run.parent_run_id = $9)
 ORDER BY run.id DESC
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
