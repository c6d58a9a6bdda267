-- Sweeps: periodic work that any process does, so that nothing is forgotten. Each takes a batch and skips rows that
-- another sweeper has locked.

-- name: wake_runs
-- moves: run waiting_external|waiting_approval -resume-> running
-- Runs whose time has come; or, for a worker that names its flows ($4), runs that wait for one of these flows in its
-- pools ($5) and tenants ($6). It must not wake others: their worker may lack the flow and park them again.
WITH due AS MATERIALIZED (
  SELECT id, status, wake_at FROM run
   WHERE wake_at <= coalesce($1, now()) AND $4::text[] IS NULL
   ORDER BY wake_at, id
   LIMIT $2
     FOR NO KEY UPDATE SKIP LOCKED
), awaiting AS MATERIALIZED (
  SELECT id, status FROM run
   WHERE awaits_flow = ANY($4) AND $4 IS NOT NULL AND ($6::uuid[] IS NULL OR tenant_id = ANY($6))
     AND (SELECT pool FROM lane WHERE lane.id = coalesce(run.side_id, run.tenant_id)) = ANY($5::text[])
   ORDER BY awaits_flow, id  -- not by id alone: the planner would scan all runs in that order
   LIMIT $2
     FOR NO KEY UPDATE SKIP LOCKED
), due_or_awaiting AS (
  SELECT id, status, wake_at FROM due UNION ALL SELECT id, status, NULL FROM awaiting
), woken AS (
  UPDATE run
     SET wake_at = NULL,
         awaits_flow = NULL,
         status = CASE WHEN due.status IN ('waiting_approval', 'waiting_external') THEN 'running' ELSE due.status END,
         seq = run.seq + (due.status IN ('waiting_approval', 'waiting_external'))::int
    FROM due_or_awaiting AS due WHERE run.id = due.id
  RETURNING run.id, run.tenant_id, run.side_id, run.seq, run.watched_until, due.status AS before, due.wake_at,
            CASE WHEN run.capped THEN run.workflow END AS capped
), journaled AS (
  -- With the timer entry that every transition after a wait has.
  INSERT INTO entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor, data)
  SELECT id, seq, tenant_id, coalesce($1, now()), 'run_transition', before, 'resume', 'running', 0, $3,
         CASE WHEN wake_at IS NOT NULL THEN jsonb_build_object('cause', jsonb_build_object(
           'by', $3::text, 'external_event', jsonb_build_object('event_type', 'timer', 'expected_at', wake_at)
         )) END
    FROM woken WHERE before IN ('waiting_approval', 'waiting_external')
), in_order AS MATERIALIZED (
  SELECT tenant_id, id, side_id, capped, nextval('ready_turn') - (1::bigint << 62) AS turn, before = 'pending' AS fresh
    FROM (SELECT * FROM woken ORDER BY wake_at, id) AS by_time
), queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, id, side_id, turn, fresh, false FROM in_order WHERE capped IS NULL
), held AS (
  INSERT INTO held_back (tenant_id, workflow, run_id, side_id, turn, fresh, lost)
  SELECT tenant_id, capped, id, side_id, turn, fresh, false FROM in_order WHERE capped IS NOT NULL
  RETURNING run_id
), woke AS MATERIALIZED (
  -- Tenants' own lanes before side lanes: the lock order.
  SELECT CASE WHEN capped IS NULL THEN wake_lane(tenant_id, side_id)::text ELSE let_in(tenant_id, capped)::text END
    FROM (SELECT DISTINCT tenant_id, capped, CASE WHEN capped IS NULL THEN side_id END AS side_id
            FROM in_order, (SELECT count(*) FROM held) AS _
           ORDER BY side_id NULLS FIRST, tenant_id, capped) AS lanes
)
SELECT id, before, CASE WHEN watched_until > coalesce($1, now()) THEN pg_notify('interlock_run', id::text)::text END
  FROM woken, (SELECT count(*) FROM woke) AS _;

-- name: next_due
SELECT extract(epoch FROM min(wake_at) - coalesce($1, now()))::float8 FROM run WHERE wake_at IS NOT NULL;

-- name: lose_workers
-- moves: worker idle|running|paused -terminate-> terminated
-- Every later append of a lost worker is refused. SKIP LOCKED passes a worker with an append or claim in progress, so
-- this statement never waits; the server ends the session of a process that is cut off in a transaction within half a
-- lease. A requested worker that has not started yet has no process, so it cannot be silent. For the others the lease
-- is over by the database's clock, so their processes have stopped by themselves.
WITH silent AS MATERIALIZED (
  SELECT id, status, job_id FROM worker
   WHERE stopped_at IS NULL AND (pid IS NOT NULL OR supervisor_id IS NOT NULL)
     AND heartbeat_at < coalesce($1, now()) - make_interval(secs => lease_seconds)
     FOR UPDATE SKIP LOCKED
), lost AS (
  UPDATE worker
     SET status = 'terminated', reason = 'heartbeat lost', stopped_at = coalesce($1, now()), stopped_by = $2, job_id = NULL,
         may_act_until = coalesce($1, now())
    FROM silent WHERE worker.id = silent.id
  RETURNING worker.id, worker.name, worker.heartbeat_at, silent.status AS before, silent.job_id
), unseated AS (
  DELETE FROM seat USING lost WHERE worker_id = lost.id
), noted AS (
  INSERT INTO history (subject_id, seq, machine, at, type, from_state, event, to_state, actor, reason, data)
  SELECT lost.id, next_in_history(lost.id), 'worker', coalesce($1, now()),
         'worker_transition', lost.before, 'terminate', 'terminated', $2, 'heartbeat lost',
         CASE WHEN lost.job_id IS NOT NULL THEN jsonb_build_object('released_from', lost.job_id) END
    FROM lost
)
SELECT id, name, heartbeat_at, before, pg_notify('interlock_worker', id::text)::text,
       (SELECT extract(epoch FROM coalesce($1, now()) - max(at))::float8
          FROM history WHERE subject_id = lost.id AND event IS NOT NULL) AS seconds_before
  FROM lost;

-- name: clear_seats
-- Deletes seats of workers that ended while one of their appends opened the seat.
DELETE FROM seat WHERE NOT EXISTS (SELECT FROM worker WHERE worker.id = seat.worker_id AND stopped_at IS NULL);

-- name: lose_supervisors
UPDATE supervisor SET stopped_at = coalesce($1, now()), reason = coalesce(reason, 'heartbeat lost')
 WHERE stopped_at IS NULL AND heartbeat_at < coalesce($1, now()) - make_interval(secs => lease_seconds);

-- name: stopped_with_leases
-- Ended workers whose tools can no longer act. Before that, no step is started again and no person is asked about it.
SELECT id FROM worker
 WHERE stopped_at IS NOT NULL AND may_act_until <= coalesce($1, now()) AND id IN (SELECT lease_worker FROM run WHERE lease_worker IS NOT NULL);

-- name: reclaim_runs
-- A separate statement after lose_workers, so that its snapshot has every entry that the lost workers wrote.
WITH lost AS MATERIALIZED (
  SELECT id, tenant_id, side_id, lease_worker FROM run WHERE lease_worker = ANY($2::uuid[]) LIMIT $3
), lanes AS MATERIALIZED (
  SELECT id, pg_advisory_xact_lock_shared(hashtextextended(home_id::text, 42)) FROM lane
   WHERE id = ANY(ARRAY(SELECT tenant_id FROM lost UNION SELECT side_id FROM lost))
   ORDER BY side_id NULLS FIRST, id
     FOR NO KEY UPDATE
), freed AS (
  UPDATE run
     SET lease_worker = NULL,
         resume_count = resume_count + 1,
         seq = (SELECT max(entry.seq) FROM entry WHERE entry.run_id = run.id) + 1
    FROM lost
   WHERE (SELECT count(*) FROM lanes) > 0 AND run.id = lost.id AND run.lease_worker = lost.lease_worker
  RETURNING run.id, run.tenant_id, run.side_id, run.seq, run.lease_token, lost.lease_worker, run.watched_until,
            run.resume_count, CASE WHEN run.capped THEN run.workflow END AS capped
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, token, actor, data)
  SELECT freed.id, freed.seq, freed.tenant_id, coalesce($1, now()), 'orphan_detected', freed.lease_token,
         'system:sweep', jsonb_build_object('worker', worker.name, 'last_heartbeat', worker.heartbeat_at)
    FROM freed JOIN worker ON worker.id = freed.lease_worker
), queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost, workflow)
  SELECT tenant_id, id, side_id, nextval('ready_turn') - (1::bigint << 62), false, true, capped FROM freed
), returned AS (
  UPDATE lane
     SET in_flight = in_flight - gone.runs, active = true,
         vtime = CASE WHEN active THEN vtime ELSE coalesce(turn_in(pool), vtime) END
    FROM (
      SELECT id, count(*)::int AS runs
        FROM (SELECT tenant_id AS id FROM freed UNION ALL SELECT side_id FROM freed WHERE side_id IS NOT NULL) AS each
       GROUP BY id
    ) AS gone
   WHERE lane.id = gone.id
)
SELECT freed.id, freed.tenant_id, freed.lease_worker, freed.resume_count, worker.name AS worker, worker.heartbeat_at,
       pg_notify('interlock_ready', '')::text,
       CASE WHEN watched_until > coalesce($1, now()) THEN pg_notify('interlock_run', freed.id::text)::text END
  FROM freed JOIN worker ON worker.id = freed.lease_worker;

-- name: overdue_runs
SELECT tenant_id, id FROM run
 WHERE deadline_at <= coalesce($1, now()) AND completed_at IS NULL AND status <> 'canceling' AND inbox = 0
 ORDER BY deadline_at LIMIT $2;

-- name: expired_approvals
SELECT tenant_id, id FROM approval
 WHERE status = 'requested' AND expires_at <= coalesce($1, now())
 ORDER BY expires_at LIMIT $2;

-- name: lanes_in_use
SELECT id FROM lane WHERE in_flight > 0 OR active;

-- name: recount_lane
SELECT before, after FROM recount_lane($1) WHERE after IS NOT NULL;

-- name: workflows_with_room
-- Workflows with blocked runs and free places: a command that had locked such a run ended without a commit.
SELECT cap.tenant_id, cap.workflow FROM workflow_cap AS cap
 WHERE EXISTS (SELECT FROM held_back AS held WHERE held.tenant_id = cap.tenant_id AND held.workflow = cap.workflow)
   AND coalesce(cap.max_concurrency, 2147483647)
       > (SELECT count(*) FROM run WHERE capped AND lease_worker IS NOT NULL AND run.tenant_id = cap.tenant_id
                                    AND run.workflow = cap.workflow)
       + (SELECT count(*) FROM ready WHERE ready.tenant_id = cap.tenant_id AND ready.workflow = cap.workflow);

-- name: forget_expired_keys
DELETE FROM idempotency
 WHERE (tenant_id, key) IN (
   SELECT tenant_id, key FROM idempotency
    WHERE coalesce(forget_at, expires_at) <= coalesce($1, now())
    LIMIT $2 FOR UPDATE SKIP LOCKED
 )
RETURNING key;
