-- Workers: registration, orders and heartbeats.

-- name: register_worker
-- moves: worker -create-> idle
-- A worker that registers itself has a process; a requested worker gets one from a supervisor.
WITH made AS (
  INSERT INTO interlock.worker (id, name, host, pid, status, capacity, lease_seconds, labels, tenants, workspace_id, supervisor_id,
                      metadata, heartbeat_at, started_at)
  VALUES ($1, $2, $3, $4, 'idle', $5, $6, $7, $8, $9, $10, $12::text::jsonb, interlock.now(), interlock.now())
  ON CONFLICT (id) DO NOTHING
  RETURNING *
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, event, to_state, actor)
  SELECT id, 1, 'worker', started_at, 'worker_created', 'create', status, $11 FROM made
)
SELECT *, 0 AS holds FROM made;

-- name: adopt_worker
-- The process of a worker that a supervisor started reports its pid and host.
UPDATE interlock.worker SET pid = $2, host = $3, heartbeat_at = interlock.now()
 WHERE id = $1 AND stopped_at IS NULL AND (pid IS NULL OR pid = $2)
RETURNING *;

-- name: assign_worker
UPDATE interlock.worker SET supervisor_id = $2, host = $3 WHERE id = $1;

-- name: move_worker
-- moves: worker * -> *
-- Writes a line of history. A worker that does not run leaves its job ($8: which job it was); the job gets another
-- worker. Each start renews the lease. A worker that gets another order loses its dispatch slot and opens it again if it
-- continues. Its process may act until its lease ends, unless it never had a process.
WITH closed AS (
  DELETE FROM interlock.dispatch_slot WHERE worker_id = $1
), moved AS (
  UPDATE interlock.worker
     SET status = $2::text, reason = $3,
         stopped_at = CASE WHEN $4 THEN interlock.now() END,
         stopped_by = CASE WHEN $4 THEN $7 END,
         may_act_until = CASE WHEN $4 THEN CASE WHEN pid IS NULL THEN interlock.now()
                         ELSE greatest(interlock.now(), heartbeat_at + make_interval(secs => lease_seconds)) END END,
         job_id = CASE WHEN $2::text = 'running' THEN job_id END,
         heartbeat_at = CASE WHEN $5 = 'idle' THEN interlock.now() ELSE heartbeat_at END
   WHERE id = $1
  RETURNING *
), before AS (
  SELECT max(at) FILTER (WHERE event IS NOT NULL) AS at FROM interlock.resource_event WHERE subject_id = $1
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, from_state, event, to_state, actor, reason, data)
  SELECT $1, interlock.next_resource_event($1), 'worker', interlock.now(), 'worker_transition', $5, $6, $2::text, $7, $3,
         CASE WHEN $8::uuid IS NOT NULL THEN jsonb_build_object('released_from', $8) END
    FROM moved
)
SELECT moved.*, (SELECT count(*) FROM interlock.run WHERE lease_worker = $1) AS holds,
       extract(epoch FROM interlock.now() - before.at)::float8 AS seconds_before,
       pg_notify('interlock.worker', moved.id::text)::text
  FROM moved, before;

-- name: lock_worker
-- FOR UPDATE: waits for an append or claim of the worker, which locks its row FOR KEY SHARE.
SELECT *, (SELECT count(*) FROM interlock.run WHERE lease_worker = worker.id) AS holds FROM interlock.worker WHERE id = $1 FOR UPDATE;

-- name: beat
-- One row per worker, however many runs it holds. Returns the worker's orders. A lost worker's beat changes nothing.
UPDATE interlock.worker SET heartbeat_at = interlock.now()
 WHERE id = $1 AND stopped_at IS NULL
RETURNING status, job_id;

-- name: note_cannot_act
UPDATE interlock.worker SET may_act_until = interlock.now()
 WHERE id = $1 AND stopped_at IS NOT NULL AND may_act_until > interlock.now()
RETURNING id;

-- name: orders_of
-- The same without a heartbeat, as a periodic backup of the notifications; also returns the worker's number of leases.
SELECT status, job_id, stopped_by, (SELECT count(*) FROM interlock.run WHERE lease_worker = worker.id) AS leases,
       EXISTS (SELECT FROM interlock.dispatch_slot WHERE worker_id = worker.id) AS has_dispatch_slot
  FROM interlock.worker WHERE id = $1;

-- name: get_worker
-- Its update time is that of its last heartbeat or its last transition.
SELECT worker.*, supervisor.log_dir,
       greatest(worker.heartbeat_at, (SELECT max(at) FROM interlock.resource_event WHERE subject_id = worker.id)) AS updated_at, (SELECT count(*) FROM interlock.run WHERE lease_worker = worker.id) AS holds,
       (SELECT tenant_id FROM interlock.job WHERE job.id = worker.job_id) AS job_tenant
  FROM interlock.worker LEFT JOIN interlock.supervisor ON supervisor.id = worker.supervisor_id
 WHERE worker.id = $1;

-- name: list_workers
SELECT worker.*,
       greatest(worker.heartbeat_at, (SELECT max(at) FROM interlock.resource_event WHERE subject_id = worker.id)) AS updated_at, (SELECT count(*) FROM interlock.run WHERE lease_worker = worker.id) AS holds,
       (SELECT tenant_id FROM interlock.job WHERE job.id = worker.job_id) AS job_tenant, NULL::text AS log_dir
  FROM interlock.worker
 WHERE $1 OR stopped_at IS NULL OR stopped_at > interlock.now() - interval '1 hour'
 ORDER BY id DESC LIMIT 500;

-- name: holds_runs
SELECT EXISTS (SELECT FROM interlock.run WHERE lease_worker = $1);

-- name: count_workers_by_status
SELECT status, count(*) FROM interlock.worker WHERE stopped_at IS NULL GROUP BY status;

-- name: history_of
SELECT subject_id, seq, at, type, from_state, event, to_state, actor, reason, data
  FROM interlock.resource_event WHERE subject_id = $1 AND seq > $2 ORDER BY seq LIMIT $3;

-- name: transitions_of
SELECT at, from_state, event, to_state, actor, reason FROM interlock.resource_event
 WHERE subject_id = $1 AND event IS NOT NULL ORDER BY seq LIMIT 1000;

-- name: tenants_named
SELECT id, name FROM interlock.tenant WHERE name = ANY($1::text[]);

-- ---------------------------------------------------------------- supervisors

-- name: register_supervisor
INSERT INTO interlock.supervisor (id, host, pid, desired_workers, lease_seconds, log_dir, heartbeat_at, started_at)
VALUES ($1, $2, $3, $4, $5, $6, interlock.now(), interlock.now())
ON CONFLICT (id) DO NOTHING;

-- name: supervise
-- One round of a supervisor: its heartbeat, and that of its workers whose processes are starting ($2). Returns the
-- workers to look after: all that are alive, and those that ended while their process ($3) still ran.
WITH beat AS (
  UPDATE interlock.supervisor SET heartbeat_at = interlock.now(), stopped_at = NULL, reason = $4 WHERE id = $1
), starting AS (
  UPDATE interlock.worker SET heartbeat_at = interlock.now()
   WHERE id = ANY($2::uuid[]) AND supervisor_id = $1 AND stopped_at IS NULL AND pid IS NULL
)
SELECT id, name, status, reason, pid, capacity, labels, tenants, workspace_id, stopped_by FROM interlock.worker
 WHERE supervisor_id = $1 AND stopped_at IS NULL
UNION ALL
SELECT id, name, status, reason, pid, capacity, labels, tenants, workspace_id, stopped_by FROM interlock.worker
 WHERE id = ANY($3::uuid[]) AND stopped_at IS NOT NULL;

-- name: stop_supervisor
UPDATE interlock.supervisor SET stopped_at = interlock.now(), reason = $2 WHERE id = $1 AND stopped_at IS NULL;

-- name: choose_supervisor
-- The one with the fewest workers.
SELECT id, host FROM interlock.supervisor
 WHERE stopped_at IS NULL AND heartbeat_at > interlock.now() - make_interval(secs => lease_seconds)
   AND ($1::text IS NULL OR host = $1)
 ORDER BY (SELECT count(*) FROM interlock.worker WHERE supervisor_id = supervisor.id AND stopped_at IS NULL), id
 LIMIT 1;

-- name: list_supervisors
SELECT supervisor.*,
       (SELECT count(*) FROM interlock.worker WHERE supervisor_id = supervisor.id AND stopped_at IS NULL) AS workers
  FROM interlock.supervisor
 WHERE stopped_at IS NULL OR stopped_at > interlock.now() - interval '1 hour'
 ORDER BY id DESC LIMIT 500;
