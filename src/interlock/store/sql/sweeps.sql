-- Sweeps: periodic work that any process does, so that nothing is forgotten. Each takes a batch and skips rows that
-- another sweeper has locked.

-- name: resume_due_runs
-- moves: run waiting_external|waiting_approval -resume-> running
-- params: most int, actor text
-- returns: ResumedRun*
-- Resume runs whose time has come.
WITH due AS MATERIALIZED (
  SELECT id FROM interlock.run
   WHERE resume_at <= interlock.now()
   ORDER BY resume_at, id
   LIMIT @most
     FOR NO KEY UPDATE SKIP LOCKED
)
SELECT resumed_id AS run_id, status_before FROM interlock.resume_runs(ARRAY(SELECT id FROM due), @actor);

-- name: resume_awaiting_runs
-- moves: run waiting_external -resume-> running
-- params: most int, actor text, flows text[], pools text[], tenants uuid[]?
-- returns: ResumedRun*
-- Resume runs that wait for one of these flows, in the pools and of the tenants that the worker serves. Not others: their
-- worker may lack the flow and park them again.
WITH awaiting AS MATERIALIZED (
  SELECT id FROM interlock.run
   WHERE awaits_flow = ANY(@flows) AND (@tenants IS NULL OR tenant_id = ANY(@tenants))
     AND (SELECT pool FROM interlock.queue WHERE queue.id = run.queue_id) = ANY(@pools)
   ORDER BY awaits_flow, id  -- not by id alone: the planner would scan all runs in that order
   LIMIT @most
     FOR NO KEY UPDATE SKIP LOCKED
)
SELECT resumed_id AS run_id, status_before FROM interlock.resume_runs(ARRAY(SELECT id FROM awaiting), @actor);

-- name: next_due
-- returns: float8?
-- Return the seconds until the next run is due.
SELECT extract(epoch FROM min(resume_at) - interlock.now())::float8 FROM interlock.run WHERE resume_at IS NOT NULL;

-- name: lose_workers
-- moves: worker idle|running|paused -terminate-> terminated
-- Every later append of a lost worker is refused. SKIP LOCKED passes a worker with an append or claim in progress, so
-- this statement never waits; the server ends the session of a process that is cut off in a transaction within half a
-- lease. A requested worker that has not started yet has no process, so it cannot be silent. For the others the lease
-- is over by the database's clock, so their processes have stopped by themselves.
WITH silent AS MATERIALIZED (
  SELECT id, status, job_id FROM interlock.worker
   WHERE stopped_at IS NULL AND (pid IS NOT NULL OR supervisor_id IS NOT NULL)
     AND heartbeat_at < interlock.now() - make_interval(secs => lease_seconds)
     FOR UPDATE SKIP LOCKED
), lost AS (
  UPDATE interlock.worker
     SET status = 'terminated', reason = 'heartbeat lost', stopped_at = interlock.now(), stopped_by = $1, job_id = NULL,
         may_act_until = interlock.now()
    FROM silent WHERE worker.id = silent.id
  RETURNING worker.id, worker.name, worker.heartbeat_at, silent.status AS before, silent.job_id
), closed AS (
  DELETE FROM interlock.dispatch_slot USING lost WHERE worker_id = lost.id
), noted AS (
  INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, from_state, event, to_state, actor, reason, data)
  SELECT lost.id, interlock.next_resource_event(lost.id), 'worker', interlock.now(),
         'worker_transition', lost.before, 'terminate', 'terminated', $1, 'heartbeat lost',
         CASE WHEN lost.job_id IS NOT NULL THEN jsonb_build_object('released_from', lost.job_id) END
    FROM lost
)
SELECT id, name, heartbeat_at, before, pg_notify('interlock.worker', id::text)::text,
       (SELECT extract(epoch FROM interlock.now() - max(at))::float8
          FROM interlock.resource_event WHERE subject_id = lost.id AND event IS NOT NULL) AS seconds_before
  FROM lost;

-- name: clear_dispatch_slots
-- returns: nothing
-- Delete slots of workers that ended while one of their writes opened the slot.
DELETE FROM interlock.dispatch_slot
 WHERE NOT EXISTS (SELECT FROM interlock.worker WHERE worker.id = dispatch_slot.worker_id AND stopped_at IS NULL);

-- name: lose_supervisors
UPDATE interlock.supervisor SET stopped_at = interlock.now(), reason = coalesce(reason, 'heartbeat lost')
 WHERE stopped_at IS NULL AND heartbeat_at < interlock.now() - make_interval(secs => lease_seconds);

-- name: stopped_with_leases
-- Ended workers whose tools can no longer act. Before that, no step is started again and no person is asked about it.
SELECT id FROM interlock.worker
 WHERE stopped_at IS NOT NULL AND may_act_until <= interlock.now() AND id IN (SELECT lease_worker FROM interlock.run WHERE lease_worker IS NOT NULL);

-- name: reclaim_runs
-- params: worker_ids uuid[], most int
-- returns: ReclaimedRun*
-- A separate statement after lose_workers, so that its snapshot has every entry that the lost workers wrote.
SELECT reclaimed_id AS run_id, lost_worker AS worker_id, times_resumed AS resume_count, worker.name AS worker,
       worker.heartbeat_at
  FROM interlock.reclaim_runs(@worker_ids, @most) JOIN interlock.worker ON worker.id = lost_worker;

-- name: overdue_runs
SELECT tenant_id, id FROM interlock.run
 WHERE deadline_at <= interlock.now() AND completed_at IS NULL AND status <> 'canceling' AND pending_commands = 0
 ORDER BY deadline_at LIMIT $1;

-- name: expired_approvals
SELECT tenant_id, id FROM interlock.approval
 WHERE status = 'requested' AND expires_at <= interlock.now()
 ORDER BY expires_at LIMIT $1;

-- name: queues_in_use
-- returns: QueueId*
SELECT id FROM interlock.queue WHERE in_flight > 0 OR has_work;

-- name: recount_queue
-- params: queue_id uuid
-- returns: Recount?
SELECT before, after FROM interlock.recount_queue(@queue_id) WHERE after IS NOT NULL;

-- name: workflows_with_room
-- returns: WorkflowWithRoom*
-- Workflows with blocked runs and free places: a command that had locked such a run ended without a commit.
SELECT cap.tenant_id, cap.workflow FROM interlock.workflow_cap AS cap
 WHERE EXISTS (
         SELECT FROM interlock.blocked_run WHERE blocked_run.tenant_id = cap.tenant_id AND blocked_run.workflow = cap.workflow
       )
   AND coalesce(cap.max_concurrency > (
         SELECT count(*) FROM interlock.run
          WHERE has_concurrency_limit AND lease_worker IS NOT NULL AND run.tenant_id = cap.tenant_id
            AND run.workflow = cap.workflow
       ) + (
         SELECT count(*) FROM interlock.ready_run
          WHERE ready_run.tenant_id = cap.tenant_id AND ready_run.workflow = cap.workflow
       ), true);

-- name: admit_blocked
-- params: tenant_ids uuid[], workflows text[]
-- returns: nothing
-- Places in these workflows became free: COMMIT admits as many runs as there is room for.
INSERT INTO interlock.queue_change (tenant_id, workflow)
SELECT DISTINCT * FROM unnest(@tenant_ids, @workflows);

-- name: forget_expired_keys
DELETE FROM interlock.idempotency_record
 WHERE (tenant_id, key) IN (
   SELECT tenant_id, key FROM interlock.idempotency_record
    WHERE coalesce(forget_at, expires_at) <= interlock.now()
    LIMIT $1 FOR UPDATE SKIP LOCKED
 )
RETURNING key;
