-- Workers: registration, orders and heartbeats.

-- name: register_worker
-- moves: worker -create-> idle
-- A worker that registers itself has a process; a requested worker gets one from a supervisor.
WITH made AS (
  INSERT INTO worker (id, name, host, pid, status, capacity, lease_seconds, labels, tenants, workspace_id, supervisor_id,
                      metadata, heartbeat_at, started_at)
  VALUES ($2, $3, $4, $5, 'idle', $6, $7, $8, $9, $10, $11, $13::text::jsonb, coalesce($1, now()), coalesce($1, now()))
  ON CONFLICT (id) DO NOTHING
  RETURNING *
), noted AS (
  INSERT INTO history (subject_id, seq, machine, at, type, event, to_state, actor)
  SELECT id, 1, 'worker', started_at, 'worker_created', 'create', status, $12 FROM made
)
SELECT *, 0 AS holds FROM made;

-- name: adopt_worker
-- The process of a worker that a supervisor started reports its pid and host.
UPDATE worker SET pid = $3, host = $4, heartbeat_at = coalesce($1, now())
 WHERE id = $2 AND stopped_at IS NULL AND (pid IS NULL OR pid = $3)
RETURNING *;

-- name: assign_worker
UPDATE worker SET supervisor_id = $2, host = $3 WHERE id = $1;

-- name: move_worker
-- moves: worker * -> *
-- Writes a line of history. A worker that does not run leaves its job ($9: which job it was); the job gets another
-- worker. Each start renews the lease. A worker that gets another order loses its seat and opens it again if it
-- continues. Its process may act until its lease ends, unless it never had a process.
WITH unseated AS (
  DELETE FROM seat WHERE worker_id = $2
), moved AS (
  UPDATE worker
     SET status = $3, reason = $4,
         stopped_at = CASE WHEN $5 THEN coalesce($1, now()) END,
         stopped_by = CASE WHEN $5 THEN $8 END,
         may_act_until = CASE WHEN $5 THEN CASE WHEN pid IS NULL THEN coalesce($1, now())
                         ELSE greatest(coalesce($1, now()), heartbeat_at + make_interval(secs => lease_seconds)) END END,
         job_id = CASE WHEN $3 = 'running' THEN job_id END,
         heartbeat_at = CASE WHEN $6 = 'idle' THEN coalesce($1, now()) ELSE heartbeat_at END
   WHERE id = $2
  RETURNING *
), before AS (
  SELECT max(at) FILTER (WHERE event IS NOT NULL) AS at FROM history WHERE subject_id = $2
), noted AS (
  INSERT INTO history (subject_id, seq, machine, at, type, from_state, event, to_state, actor, reason, data)
  SELECT $2, next_in_history($2), 'worker', coalesce($1, now()), 'worker_transition', $6, $7, $3, $8, $4,
         CASE WHEN $9::uuid IS NOT NULL THEN jsonb_build_object('released_from', $9) END
    FROM moved
)
SELECT moved.*, (SELECT count(*) FROM run WHERE lease_worker = $2) AS holds,
       extract(epoch FROM coalesce($1, now()) - before.at)::float8 AS seconds_before,
       pg_notify('interlock_worker', moved.id::text)::text
  FROM moved, before;

-- name: lock_worker
-- FOR UPDATE: waits for an append or claim of the worker, which locks its row FOR KEY SHARE.
SELECT *, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS holds FROM worker WHERE id = $1 FOR UPDATE;

-- name: beat
-- One row per worker, however many runs it holds. Returns the worker's orders. A lost worker's beat changes nothing.
UPDATE worker SET heartbeat_at = coalesce($1, now())
 WHERE id = $2 AND stopped_at IS NULL
RETURNING status, job_id;

-- name: note_cannot_act
UPDATE worker SET may_act_until = coalesce($1, now())
 WHERE id = $2 AND stopped_at IS NOT NULL AND may_act_until > coalesce($1, now())
RETURNING id;

-- name: orders_of
-- The same without a heartbeat, as a periodic backup of the notifications; also returns the worker's number of leases.
SELECT status, job_id, stopped_by, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS leases,
       EXISTS (SELECT FROM seat WHERE worker_id = worker.id) AS seated
  FROM worker WHERE id = $1;

-- name: open_seat
-- If a crash loses this row, the next run just goes through the queue.
WITH lazy AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO seat (worker_id, actor, channel, tenants) SELECT $1, $2, $3, $4 FROM lazy
ON CONFLICT (worker_id) DO NOTHING;

-- name: close_seat
DELETE FROM seat WHERE worker_id = $1 RETURNING worker_id;

-- name: get_worker
-- Its update time is that of its last heartbeat or its last transition.
SELECT worker.*, supervisor.log_dir,
       greatest(worker.heartbeat_at, (SELECT max(at) FROM history WHERE subject_id = worker.id)) AS updated_at, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS holds,
       (SELECT tenant_id FROM job WHERE job.id = worker.job_id) AS job_tenant
  FROM worker LEFT JOIN supervisor ON supervisor.id = worker.supervisor_id
 WHERE worker.id = $1;

-- name: list_workers
SELECT worker.*,
       greatest(worker.heartbeat_at, (SELECT max(at) FROM history WHERE subject_id = worker.id)) AS updated_at, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS holds,
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
-- One round of a supervisor: its heartbeat, and that of its workers whose processes are starting ($3). Returns the
-- workers to look after: all that are alive, and those that ended while their process ($4) still ran.
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
