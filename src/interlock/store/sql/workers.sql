-- Workers: who is there, what they were told, and that they still are.

-- name: register_worker
-- moves: worker -create-> idle
-- One that registers itself has a process; one that is asked for gets it from a supervisor.
WITH made AS (
  INSERT INTO worker (id, name, host, pid, status, capacity, lease_seconds, labels, tenants, workspace_id, supervisor_id,
                      heartbeat_at, started_at)
  VALUES ($2, $3, $4, $5, 'idle', $6, $7, $8, $9, $10, $11, coalesce($1, now()), coalesce($1, now()))
  ON CONFLICT (id) DO NOTHING
  RETURNING *
), noted AS (
  INSERT INTO history (subject_id, seq, machine, at, type, event, to_state, actor)
  SELECT id, 1, 'worker', started_at, 'worker_created', 'create', status, $12 FROM made
)
SELECT *, 0 AS holds FROM made;

-- name: adopt_worker
-- The process of a worker that a supervisor started says that it is there.
UPDATE worker SET pid = $3, host = $4, heartbeat_at = coalesce($1, now())
 WHERE id = $2 AND stopped_at IS NULL AND (pid IS NULL OR pid = $3)
RETURNING *;

-- name: assign_worker
UPDATE worker SET supervisor_id = $2, host = $3 WHERE id = $1;

-- name: move_worker
-- moves: worker * -> *
-- With its line of history. One that does not run is no job's any more ($9: whose it was): the job gets another. A lease
-- begins anew with each start. No run is put on the seat of one that is told something else; if it goes on, it opens it
-- again.
WITH unseated AS (
  DELETE FROM seat WHERE worker_id = $2
), moved AS (
  UPDATE worker
     SET status = $3, reason = $4,
         stopped_at = CASE WHEN $5 THEN coalesce($1, now()) END,
         stopped_by = CASE WHEN $5 THEN $8 END,
         job_id = CASE WHEN $3 = 'running' THEN job_id END,
         heartbeat_at = CASE WHEN $6 = 'idle' THEN coalesce($1, now()) ELSE heartbeat_at END
   WHERE id = $2
  RETURNING *
), before AS (
  SELECT max(seq) AS seq, max(at) FILTER (WHERE event IS NOT NULL) AS at FROM history WHERE subject_id = $2
), noted AS (
  INSERT INTO history (subject_id, seq, machine, at, type, from_state, event, to_state, actor, reason, data)
  SELECT $2, coalesce(before.seq, 0) + 1, 'worker', coalesce($1, now()), 'worker_transition', $6, $7, $3, $8, $4,
         CASE WHEN $9::uuid IS NOT NULL THEN jsonb_build_object('released_from', $9) END
    FROM before
)
SELECT moved.*, (SELECT count(*) FROM run WHERE lease_worker = $2) AS holds,
       extract(epoch FROM coalesce($1, now()) - before.at)::float8 AS seconds_before,
       pg_notify('interlock_worker', moved.id::text)::text
  FROM moved, before;

-- name: lock_worker
SELECT *, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS holds FROM worker WHERE id = $1 FOR NO KEY UPDATE;

-- name: beat
-- One row per worker, however many runs it holds. The answer is its orders. A lost worker's beat changes nothing.
UPDATE worker SET heartbeat_at = coalesce($1, now())
 WHERE id = $2 AND stopped_at IS NULL
RETURNING status, job_id;

-- name: orders_of
-- The same, without a heartbeat: from time to time, beneath the notifications; and what the worker holds.
SELECT status, job_id, stopped_by, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS leases,
       EXISTS (SELECT FROM seat WHERE worker_id = worker.id) AS seated
  FROM worker WHERE id = $1;

-- name: open_seat
-- Losing this in a crash only means that the next run goes through the queue.
WITH lazy AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO seat (worker_id, actor, channel, tenants) SELECT $1, $2, $3, $4 FROM lazy
ON CONFLICT (worker_id) DO NOTHING;

-- name: close_seat
DELETE FROM seat WHERE worker_id = $1 RETURNING worker_id;

-- name: get_worker
SELECT worker.*, supervisor.log_dir, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS holds,
       (SELECT tenant_id FROM job WHERE job.id = worker.job_id) AS job_tenant
  FROM worker LEFT JOIN supervisor ON supervisor.id = worker.supervisor_id
 WHERE worker.id = $1;

-- name: list_workers
SELECT worker.*, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS holds,
       (SELECT tenant_id FROM job WHERE job.id = worker.job_id) AS job_tenant, NULL::text AS log_dir
  FROM worker
 WHERE $2 OR stopped_at IS NULL OR stopped_at > coalesce($1, now()) - interval '1 hour'
 ORDER BY id DESC LIMIT 500;

-- name: holds_runs
SELECT EXISTS (SELECT FROM run WHERE lease_worker = $1);

-- name: count_workers_by_status
SELECT status, count(*) FROM worker WHERE stopped_at IS NULL GROUP BY status;

-- name: history_of
SELECT subject_id, seq, at, type, from_state, event, to_state, actor, reason, data
  FROM history WHERE subject_id = $1 AND seq > $2 ORDER BY seq LIMIT $3;

-- name: transitions_of
SELECT at, from_state, event, to_state, actor, reason FROM history
 WHERE subject_id = $1 AND event IS NOT NULL ORDER BY seq LIMIT 1000;

-- name: tenants_named
SELECT id, name FROM tenant WHERE name = ANY($1::text[]);

-- ---------------------------------------------------------------- supervisors

-- name: register_supervisor
INSERT INTO supervisor (id, host, pid, wished, lease_seconds, log_dir, heartbeat_at, started_at)
VALUES ($2, $3, $4, $5, $6, $7, coalesce($1, now()), coalesce($1, now()))
ON CONFLICT (id) DO NOTHING;

-- name: supervise
-- One round of a supervisor: that it is there, and those of its workers whose process is about to be ($3); then what
-- it has to look after: all that are alive, and those that ended while their process ($4) had not.
WITH beat AS (
  UPDATE supervisor SET heartbeat_at = coalesce($1, now()), stopped_at = NULL, reason = $5 WHERE id = $2
), starting AS (
  UPDATE worker SET heartbeat_at = coalesce($1, now())
   WHERE id = ANY($3::uuid[]) AND supervisor_id = $2 AND stopped_at IS NULL AND pid IS NULL
)
SELECT id, name, status, reason, pid, capacity, labels, tenants, workspace_id, stopped_by FROM worker
 WHERE supervisor_id = $2 AND stopped_at IS NULL
UNION ALL
SELECT id, name, status, reason, pid, capacity, labels, tenants, workspace_id, stopped_by FROM worker
 WHERE id = ANY($4::uuid[]) AND stopped_at IS NOT NULL;

-- name: stop_supervisor
UPDATE supervisor SET stopped_at = coalesce($1, now()), reason = $3 WHERE id = $2 AND stopped_at IS NULL;

-- name: choose_supervisor
-- The one with the fewest workers.
SELECT id, host FROM supervisor
 WHERE stopped_at IS NULL AND heartbeat_at > coalesce($1, now()) - make_interval(secs => lease_seconds)
   AND ($2::text IS NULL OR host = $2)
 ORDER BY (SELECT count(*) FROM worker WHERE supervisor_id = supervisor.id AND stopped_at IS NULL), id
 LIMIT 1;

-- name: list_supervisors
SELECT supervisor.*,
       (SELECT count(*) FROM worker WHERE supervisor_id = supervisor.id AND stopped_at IS NULL) AS workers
  FROM supervisor
 WHERE stopped_at IS NULL OR stopped_at > coalesce($1, now()) - interval '1 hour'
 ORDER BY id DESC LIMIT 500;
