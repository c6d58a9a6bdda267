-- Jobs: batches of runs with workers reserved for them.

-- name: insert_job
-- moves: job -create-> submitted
WITH made AS (
  INSERT INTO interlock.job (id, tenant_id, workspace_id, parent_job_id, depth, task_description, workflow, workflow_version, inputs,
                   total, worker_count, status, requested_by, requester, deadline_at, created_at)
  VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10, $11, 'submitted', $12, $13::text::jsonb,
          interlock.now() + make_interval(secs => $14), interlock.now())
  ON CONFLICT (id) DO NOTHING
  RETURNING *
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, event, to_state, actor)
  SELECT id, 1, 'job', created_at, 'job_created', 'create', status, requested_by FROM made
)
SELECT * FROM made;

-- name: get_job
SELECT * FROM interlock.job WHERE tenant_id = $1 AND id = $2 AND ($3::text IS NULL OR workspace_id = $3);

-- name: lock_job
SELECT *, interlock.now() AS now FROM interlock.job WHERE id = $1 FOR NO KEY UPDATE;

-- name: list_jobs
SELECT * FROM interlock.job
 WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id < $2) AND ($3::text IS NULL OR status = $3)
   AND ($4::text IS NULL OR workspace_id = $4) AND ($5::uuid IS NULL OR parent_job_id = $5)
 ORDER BY id DESC LIMIT $6;

-- name: tree_of
-- A job and all its descendants, each after its parent.
WITH RECURSIVE tree AS (
  SELECT id FROM interlock.job WHERE id = $1
  UNION ALL
  SELECT job.id FROM interlock.job JOIN tree ON job.parent_job_id = tree.id
)
SELECT job.* FROM interlock.job WHERE id IN (SELECT id FROM tree) AND ($2::text IS NULL OR workspace_id = $2) ORDER BY depth, id;

-- name: lock_open_tree
-- Parents before children. The caller's next query sees a child submitted while this one waited for its parent.
WITH RECURSIVE tree AS (
  SELECT id FROM interlock.job WHERE id = $1
  UNION ALL
  SELECT job.id FROM interlock.job JOIN tree ON job.parent_job_id = tree.id
)
SELECT id, status, workflow FROM interlock.job WHERE id IN (SELECT id FROM tree) AND completed_at IS NULL ORDER BY depth, id
   FOR NO KEY UPDATE;

-- name: move_jobs
-- moves: job * -> *
-- Moves several jobs at once, each locked by an earlier statement, and writes a line of history for each.
WITH asked AS (
  SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[]) AS a (id, from_state, reason)
), moved AS (
  UPDATE interlock.job
     SET status = $4, reason = asked.reason,
         started_at = CASE WHEN $7 THEN interlock.now() ELSE started_at END,
         completed_at = CASE WHEN $8 THEN interlock.now() END,
         done = coalesce($9, done)
    FROM asked WHERE job.id = asked.id AND job.status = asked.from_state
  RETURNING job.*, asked.from_state
), before AS (
  SELECT subject_id, max(at) FILTER (WHERE event IS NOT NULL) AS at
    FROM interlock.resource_event WHERE subject_id = ANY($1::uuid[]) GROUP BY subject_id
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, from_state, event, to_state, actor, reason, data)
  SELECT moved.id, interlock.next_resource_event(moved.id), 'job', interlock.now(), CASE WHEN $8 THEN 'job_completed' ELSE
         'job_transition' END, moved.from_state, $5, $4, $6, moved.reason,
         jsonb_build_object('done', moved.done, 'total', moved.total)
    FROM moved
)
SELECT moved.*, extract(epoch FROM interlock.now() - before.at)::float8 AS seconds_before,
       pg_notify('interlock.run', moved.id::text)::text
  FROM moved LEFT JOIN before ON before.subject_id = moved.id;

-- name: note_progress
WITH changed AS (
  UPDATE interlock.job SET done = $2 WHERE id = $1 AND status = 'running' AND done < $2 RETURNING id, total
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, actor, data)
  SELECT id, interlock.next_resource_event(id), 'job', interlock.now(),
         'job_progress', 'system:jobs', jsonb_build_object('done', $2, 'total', total, 'succeeded', $3::int)
    FROM changed
)
SELECT pg_notify('interlock.run', id::text)::text FROM changed;

-- name: progress_of
-- The states of the runs of these jobs, without their child runs.
SELECT job_id, status, count(*)::int AS runs FROM interlock.run
 WHERE job_id = ANY($1::uuid[]) AND parent_run_id IS NULL
 GROUP BY job_id, status;

-- name: count_jobs_by_status
SELECT status, count(*) FROM interlock.job WHERE completed_at IS NULL GROUP BY status;

-- name: workers_of
SELECT id, name, job_id FROM interlock.worker WHERE job_id = ANY($1::uuid[]) ORDER BY id;

-- ---------------------------------------------------------------- tending

-- name: jobs_are_open
SELECT EXISTS (SELECT FROM interlock.job WHERE completed_at IS NULL)
    OR EXISTS (SELECT FROM interlock.queue JOIN interlock.job ON job.id = queue.id WHERE queue.kind = 'job');

-- name: running_jobs
-- The needs of each running job: its runs, its children, its workers.
SELECT job.id, job.tenant_id, job.total, job.done AS noted, job.worker_count, runs.done, runs.well, runs.moving,
       children.open AS open_children, children.unwell AS unwell_children,
       (SELECT count(*) FROM interlock.worker WHERE worker.job_id = job.id AND worker.status = 'running')::int AS workers
  FROM interlock.job
 CROSS JOIN LATERAL (
   SELECT count(run.completed_at) FILTER (WHERE run.parent_run_id IS NULL)::int AS done,
          count(*) FILTER (WHERE run.status = 'succeeded' AND run.parent_run_id IS NULL)::int AS well,
          count(*) FILTER (WHERE run.status IN ('pending', 'running', 'canceling'))::int AS moving
     FROM interlock.run WHERE run.job_id = job.id
 ) AS runs
 CROSS JOIN LATERAL (
   SELECT count(*) FILTER (WHERE child.completed_at IS NULL)::int AS open,
          count(*) FILTER (WHERE child.status IN ('failed', 'canceled'))::int AS unwell
     FROM interlock.job AS child WHERE child.parent_job_id = job.id
 ) AS children
 WHERE job.status = 'running' AND ($1::uuid IS NULL OR job.id = $1)
 ORDER BY job.id;

-- name: overdue_jobs
SELECT id, tenant_id FROM interlock.job WHERE completed_at IS NULL AND deadline_at <= interlock.now() ORDER BY id LIMIT 100;

-- name: try_allocate
-- Only one process allocates at a time: two could each reserve half of the workers that both need. Returns false if
-- another process allocates now. No process waits for this lock: each tries again half a second later.
SELECT pg_try_advisory_xact_lock(hashtextextended('interlock.allocate', 0));

-- name: next_pending_job
-- The fairest next job: of the tenant with the fewest reserved workers for its weight; deeper jobs first, since their
-- parents wait for them; then the oldest. A later job that needs less may not overtake it, or it would wait forever;
-- only a job that needs more workers than are running does not block the others.
SELECT job.id, job.tenant_id, job.workflow, job.workflow_version, job.worker_count, pool.free
  FROM interlock.job
  JOIN interlock.queue AS home ON home.id = job.tenant_id
 CROSS JOIN LATERAL (
   SELECT count(*)::int AS workers, count(*) FILTER (WHERE worker.job_id IS NULL)::int AS free
     FROM interlock.worker
    WHERE worker.stopped_at IS NULL AND worker.status = 'running' AND worker.pid IS NOT NULL AND 'default' = ANY(worker.labels)
      AND (worker.tenants IS NULL OR job.tenant_id = ANY(worker.tenants))
 ) AS pool
 CROSS JOIN LATERAL (
   SELECT count(*) AS workers FROM interlock.worker JOIN interlock.job AS other ON other.id = worker.job_id
    WHERE other.tenant_id = job.tenant_id
 ) AS reserved
 WHERE job.status = 'pending' AND pool.workers >= job.worker_count
 ORDER BY reserved.workers / home.weight, job.depth DESC, job.id
 LIMIT 1;

-- name: add_job_queue
INSERT INTO interlock.queue (id, tenant_id, kind, pool, weight)
SELECT $1, tenant_id, 'job', $1::uuid::text, weight FROM interlock.queue WHERE id = $2
ON CONFLICT DO NOTHING;

-- name: reserve_workers
-- Idle workers first. SKIP LOCKED never waits; the caller holds the allocation lock. Each worker is notified and gets a
-- history row, which would reveal a worker with two jobs.
WITH free AS MATERIALIZED (
  SELECT id FROM interlock.worker
   WHERE stopped_at IS NULL AND status = 'running' AND pid IS NOT NULL AND job_id IS NULL AND 'default' = ANY(labels)
     AND (tenants IS NULL OR $3 = ANY(tenants))
     AND heartbeat_at > interlock.now() - make_interval(secs => lease_seconds)
   ORDER BY (SELECT count(*) FROM interlock.run WHERE lease_worker = worker.id), id
   LIMIT $2
     FOR NO KEY UPDATE SKIP LOCKED
), reserved AS (
  UPDATE interlock.worker SET job_id = $1 FROM free WHERE worker.id = free.id AND worker.job_id IS NULL RETURNING worker.id
), closed AS (
  DELETE FROM interlock.dispatch_slot USING reserved WHERE worker_id = reserved.id
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, actor, data)
  SELECT id, interlock.next_resource_event(id), 'worker', interlock.now(),
         'worker_reserved', 'system:jobs', jsonb_build_object('job_id', $1)
    FROM reserved
), told AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, actor, data)
  SELECT $1, interlock.next_resource_event($1), 'job', interlock.now(),
         'job_workers', 'system:jobs', jsonb_build_object('workers', jsonb_agg(id))
    FROM reserved HAVING count(*) > 0
)
SELECT id, pg_notify('interlock.worker', id::text)::text, pg_notify('interlock.run', $1::text)::text FROM reserved;

-- name: release_workers
WITH released AS (
  UPDATE interlock.worker SET job_id = NULL FROM interlock.worker AS before
   WHERE worker.job_id = ANY($1::uuid[]) AND before.id = worker.id
  RETURNING worker.id, before.job_id
), closed AS (
  DELETE FROM interlock.dispatch_slot USING released WHERE worker_id = released.id
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, actor, data)
  SELECT id, interlock.next_resource_event(id), 'worker', interlock.now(),
         'worker_released', 'system:jobs', jsonb_build_object('job_id', job_id)
    FROM released
)
SELECT id, pg_notify('interlock.worker', id::text)::text FROM released;

-- name: open_job_queues
-- For jobs that ended: any worker may take the runs left in their queues (runs that are being canceled).
UPDATE interlock.queue
   SET pool = 'default', virtual_time = coalesce(interlock.current_virtual_time('default'), virtual_time)
 WHERE id = ANY($1::uuid[])
RETURNING id, pg_notify('interlock.ready', '')::text;

-- name: runs_of_ended_jobs
SELECT run.tenant_id, run.id, job.reason FROM interlock.queue
  JOIN interlock.job ON job.id = queue.id AND job.completed_at IS NOT NULL
  JOIN interlock.run ON run.job_id = job.id AND run.status = ANY('{pending,running,waiting_approval,waiting_external}') AND run.pending_commands = 0
 WHERE queue.kind = 'job'
 LIMIT $1;

-- name: drop_job_queues
-- Once no run can enter the queue any more.
DELETE FROM interlock.queue USING interlock.job
 WHERE queue.kind = 'job' AND job.id = queue.id AND job.completed_at IS NOT NULL AND queue.in_flight = 0
   AND NOT EXISTS (SELECT FROM interlock.run WHERE run.job_id = job.id
                    AND run.status = ANY('{pending,running,waiting_approval,waiting_external,canceling}'))
RETURNING queue.id;
