-- Starting runs and reading them.

-- name: start_run
-- moves: run -create-> pending, run pending -start-> running, idempotency -> processing, idempotency processing -complete-> completed
-- The common case of a single run; see the queue's migration.
SELECT at, answer
  FROM start_run($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
 WHERE at IS NOT NULL;

-- name: start_runs
-- moves: run -create-> pending
-- Starts one or many runs at once. An id that exists already was started by an earlier attempt of the same call. A
-- tenant with a rate limit gives each run the next free place in a minute; runs of later minutes wait for theirs, in
-- order. Runs of a workflow with a cap are blocked until it has room. $14 names the jobs that they belong to; a job's
-- lane has the id of the job.
WITH asked AS (
  SELECT *
    FROM unnest(
           $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::int[], $7::text[], $8::text[], $9::text[],
           $10::float8[], $11::float8[], $12::text[], $13::boolean[], $14::uuid[]
         ) WITH ORDINALITY AS a (id, tenant_id, workspace_id, workflow, workflow_version, input, trigger, requested_by,
                                 deadline_seconds, watch_seconds, requester, capped, job_id, place)
), rate AS MATERIALIZED (
  SELECT lane.tenant_id, max_runs_per_min AS most, _.minute,
         CASE WHEN start_rate.minute = _.minute THEN start_rate.used ELSE 0 END AS used
    FROM lane
    JOIN start_rate ON start_rate.tenant_id = lane.tenant_id
   CROSS JOIN LATERAL (SELECT greatest(start_rate.minute, date_trunc('minute', coalesce($1, now()))) AS minute) AS _
   WHERE max_runs_per_min IS NOT NULL AND lane.tenant_id IN (SELECT tenant_id FROM asked)
   ORDER BY lane.tenant_id
     FOR NO KEY UPDATE OF start_rate
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
  UPDATE start_rate
     SET minute = rate.minute + ((rate.used + taken.runs - 1) / rate.most) * interval '1 minute',
         used = (rate.used + taken.runs - 1) % rate.most + 1
    FROM rate JOIN (SELECT tenant_id, count(*)::int AS runs FROM started GROUP BY tenant_id) AS taken USING (tenant_id)
   WHERE start_rate.tenant_id = rate.tenant_id
), queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, id, side_id, nextval('ready_turn'), true, false FROM started WHERE wake_at IS NULL AND NOT capped
), held AS (
  INSERT INTO held_back (tenant_id, workflow, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, workflow, id, side_id, nextval('ready_turn'), true, false
    FROM started WHERE wake_at IS NULL AND capped
  RETURNING tenant_id, workflow
), told AS (
  -- COMMIT wakes their lanes, and admits as many runs as there is room for.
  INSERT INTO queue_change (tenant_id, lane_id, has_work, workflow)
  SELECT DISTINCT tenant_id, coalesce(job_id, tenant_id), true, NULL FROM asked
  UNION ALL
  SELECT DISTINCT tenant_id, NULL::uuid, false, workflow FROM held
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor, data)
  SELECT id, 1, tenant_id, created_at, 'run_created', 'create', 'pending', 0, requested_by,
         jsonb_build_object('workflow', workflow, 'version', workflow_version, 'trigger', trigger)
    FROM started
)
SELECT coalesce($1, now()) AS now, (SELECT max(wake_at) FROM started) AS turn;

-- name: insert_run
-- moves: run -create-> pending
-- A run that does not go straight to the queue: its first step is a gate or a wait, or it continues another run. It
-- takes the next free place in a minute like any other run; `wake_at` is set if that is in a later minute.
WITH rate AS MATERIALIZED (
  SELECT lane.tenant_id, max_runs_per_min AS most, _.minute,
         CASE WHEN start_rate.minute = _.minute THEN start_rate.used ELSE 0 END AS used
    FROM lane
    JOIN start_rate ON start_rate.tenant_id = lane.tenant_id
   CROSS JOIN LATERAL (SELECT greatest(start_rate.minute, date_trunc('minute', coalesce($1, now()))) AS minute) AS _
   WHERE max_runs_per_min IS NOT NULL AND lane.tenant_id = $3
     FOR NO KEY UPDATE OF start_rate
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
  UPDATE start_rate SET minute = place.turn, used = place.used
    FROM place JOIN inserted USING (tenant_id)
   WHERE start_rate.tenant_id = place.tenant_id
)
SELECT * FROM inserted;

-- name: root_run
-- In the transaction that started the run. The keys of the run's effects use root_id instead of the run's id.
UPDATE run SET root_id = $2 WHERE id = $1;

-- name: get_run
-- A run's heartbeat is that of the worker that holds it; its update time is that of its last entry.
SELECT run.*, worker.heartbeat_at AS last_heartbeat_at,
       (SELECT at FROM entry WHERE run_id = run.id ORDER BY seq DESC LIMIT 1) AS updated_at
  FROM run LEFT JOIN worker ON worker.id = run.lease_worker
 WHERE run.tenant_id = $1 AND run.id = $2;

-- name: get_run_to_show
-- With its journal if the run has ended, if $4 is set and it waits for an approval, or if $3 is set.
SELECT run.*, (SELECT heartbeat_at FROM worker WHERE worker.id = run.lease_worker) AS last_heartbeat_at,
       CASE WHEN $3 OR completed_at IS NOT NULL OR ($4 AND status = 'waiting_approval')
            THEN ARRAY(SELECT entry FROM entry WHERE run_id = run.id ORDER BY seq) END AS entries
  FROM run WHERE tenant_id = $1 AND id = $2;

-- name: list_runs
-- Newest first. The cursor is the id of the last run seen.
SELECT run.*, worker.heartbeat_at AS last_heartbeat_at,
       (SELECT at FROM entry WHERE run_id = run.id ORDER BY seq DESC LIMIT 1) AS updated_at
  FROM run LEFT JOIN worker ON worker.id = run.lease_worker
 WHERE run.tenant_id = $1
   AND ($2::uuid IS NULL OR run.id < $2)
   AND ($3::text IS NULL OR run.status = $3)
   AND ($4::text IS NULL OR run.workflow = $4)
   AND ($5::uuid IS NULL OR run.session_id = $5)
   AND ($6::uuid IS NULL OR run.job_id = $6)
   AND ($8::text IS NULL OR run.workspace_id = $8)
   AND ($9::uuid IS NULL OR run.parent_run_id = $9)
   AND ($10::text IS NULL OR run.trigger #>> '{metadata,repository}' = $10)
 ORDER BY run.id DESC
 LIMIT $7;

-- name: count_runs_by_status
SELECT status, count(*) FROM run WHERE completed_at IS NULL GROUP BY status;

-- name: watch_run
-- A client follows the run: appends notify until then. An ended run needs no watching.
UPDATE run SET watched_until = coalesce($1, now()) + make_interval(secs => $3)
 WHERE id = $2 AND completed_at IS NULL;

-- name: journal_of
SELECT run_id, seq, at, type, step, from_state, event, to_state, attempt, token, actor, data, output
  FROM entry WHERE run_id = ANY($1::uuid[]) ORDER BY run_id, seq;

-- name: entries_after
SELECT run_id, seq, at, type, step, from_state, event, to_state, attempt, token, actor, data, output
  FROM entry WHERE run_id = $1 AND seq > $2 ORDER BY seq LIMIT $3;
