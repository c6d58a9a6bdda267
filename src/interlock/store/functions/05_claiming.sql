-- Claiming: a worker leases the next runs of some queues.

-- A run with what its holder needs to know. The claim, the dispatch of a single run and the look-up of leases after a
-- lost answer all return this row.
DROP VIEW IF EXISTS interlock.leased_run CASCADE;
CREATE VIEW interlock.leased_run AS
SELECT run.id, run.tenant_id, run.workspace_id, run.workflow, run.workflow_version,
       run.has_concurrency_limit, run.status, run.input::text AS input, run.trigger::text AS trigger, run.seq,
       run.lease_token, run.lease_worker, run.queue_id, run.pending_commands, run.requested_by,
       run.requester::text AS requester, run.parent_run_id, run.session_id, run.session_run, run.auto_approve, run.job_id,
       run.root_id, run.cost_usd, run.created_at, run.started_at, run.deadline_at, tenant_limits.max_writes_per_run,
       tenant_limits.policy_version, interlock.now() AS now, false AS is_new, false AS reclaimed, false AS is_dispatched
  FROM interlock.run JOIN interlock.tenant_limits ON tenant_limits.tenant_id = run.tenant_id;

-- Locks the queues of the shares, and their tenants' own queues, and returns how many runs each may give now. The row
-- lock makes caps hold however many workers claim at once. SKIP LOCKED lets claims pass each other: a queue that
-- another transaction has locked gives nothing to this claim.
CREATE OR REPLACE FUNCTION interlock.lock_shares(shares interlock.queue_share[], of_pool text)
RETURNS interlock.queue_share[] LANGUAGE plpgsql AS $$
DECLARE
  open interlock.queue_share[];
BEGIN
  WITH locked AS MATERIALIZED (
    SELECT id, tenant_id, pool, has_work, max_concurrency - in_flight AS places FROM interlock.queue
     WHERE id = ANY(ARRAY(
             SELECT queue_id FROM unnest(shares)
             UNION
             SELECT tenant_id FROM interlock.queue AS further WHERE further.id IN (SELECT queue_id FROM unnest(shares))
           ))
     ORDER BY kind <> 'tenant', id
       FOR NO KEY UPDATE SKIP LOCKED
  ), given AS (
    -- The queues of one tenant share its places: each gets only what those before it leave.
    SELECT share.queue_id,
           least(share.runs, queue.places,
                 home.places - sum(share.runs) OVER (PARTITION BY queue.tenant_id ORDER BY queue.id) + share.runs)::int
             AS runs
      FROM unnest(shares) AS share
      JOIN locked AS queue ON queue.id = share.queue_id AND queue.pool = of_pool AND queue.has_work
      JOIN locked AS home ON home.id = queue.tenant_id
  )
  SELECT array_agg(ROW(queue_id, runs)::interlock.queue_share) INTO open FROM given WHERE runs > 0;
  RETURN open;
END $$;

-- Deletes the first ready runs of each queue and returns them.
CREATE OR REPLACE FUNCTION interlock.take_ready_runs(shares interlock.queue_share[]) RETURNS interlock.ready_run[]
LANGUAGE plpgsql AS $$
DECLARE
  picked interlock.ready_run[];
BEGIN
  WITH first AS MATERIALIZED (
    SELECT top.tenant_id, top.run_id
      FROM unnest(shares) AS share
     CROSS JOIN LATERAL (
       SELECT tenant_id, run_id FROM interlock.ready_run
        WHERE ready_run.queue_id = share.queue_id
        ORDER BY priority, position
        LIMIT share.runs
          FOR UPDATE SKIP LOCKED
     ) AS top
  ), taken AS (
    DELETE FROM interlock.ready_run USING first
     WHERE ready_run.tenant_id = first.tenant_id AND ready_run.run_id = first.run_id
       AND ready_run.run_id = ANY(ARRAY(SELECT run_id FROM first))
    RETURNING ready_run
  )
  SELECT array_agg(ready_run) INTO picked FROM taken;
  RETURN picked;
END $$;

-- Gives the holder a lease of each run, with a new fencing token, and charges the queues.
CREATE OR REPLACE FUNCTION interlock.lease_runs(holder uuid, holder_actor text, picked interlock.ready_run[])
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  WITH leased AS (
    UPDATE interlock.run
       SET status = CASE WHEN ready.is_new THEN 'running' ELSE run.status END,
           started_at = coalesce(run.started_at, interlock.now()),
           seq = run.seq + ready.is_new::int,
           lease_token = run.lease_token + 1,
           lease_worker = holder,
           resume_at = NULL
      FROM unnest(picked) AS ready
     WHERE run.id = ready.run_id AND run.lease_worker IS NULL
       -- Stated twice, because with the join alone the planner may scan all runs. Not IS NULL, which makes it scan all
       -- open runs.
       AND run.id = ANY(ARRAY(SELECT run_id FROM unnest(picked)))
       AND coalesce(run.completed_at, 'infinity') >= 'infinity'
    RETURNING run.id, run.tenant_id, run.seq, run.lease_token, ready.queue_id, ready.is_new
  ), started AS (
    INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor)
    SELECT id, seq, tenant_id, interlock.now(), 'run_transition', 'pending', 'start', 'running', lease_token,
           holder_actor
      FROM leased WHERE is_new
  )
  UPDATE interlock.queue
     SET in_flight = in_flight + got.runs, virtual_time = virtual_time + got.turns / weight
    FROM (
      SELECT id, count(*)::int AS runs, sum(turn) AS turns
        FROM (SELECT queue_id AS id, 1 AS turn FROM leased
              UNION ALL
              SELECT tenant_id, 0 FROM leased WHERE tenant_id <> queue_id) AS counted
       GROUP BY id
    ) AS got
   WHERE queue.id = got.id;
END $$;

-- Takes the first ready runs of each queue. A worker that is reserved for a job claims only from that job's pool. A
-- queue that gave fewer runs than it might is deactivated, unless it was filled at this moment.
CREATE OR REPLACE FUNCTION interlock.claim_runs(
  holder uuid, holder_actor text, of_pool text, shares interlock.queue_share[]
) RETURNS SETOF interlock.leased_run LANGUAGE plpgsql AS $$
DECLARE
  open interlock.queue_share[];
  picked interlock.ready_run[];
  leased record;
  claimed interlock.leased_run;
BEGIN
  PERFORM FROM interlock.worker
    WHERE id = holder AND status = 'running'
      AND CASE WHEN job_id IS NULL THEN of_pool = ANY(labels) ELSE of_pool = job_id::text END
      FOR KEY SHARE;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  open := interlock.lock_shares(shares, of_pool);
  picked := interlock.take_ready_runs(open);
  PERFORM interlock.lease_runs(holder, holder_actor, picked);
  IF picked IS NULL THEN
    -- If a crash loses what follows, the next claim finds the queues empty again.
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
  PERFORM interlock.deactivate_queue(queue.id, queue.tenant_id)
     FROM unnest(open) AS share JOIN interlock.queue ON queue.id = share.queue_id
    WHERE share.runs > (SELECT count(*) FROM unnest(picked) AS taken WHERE taken.queue_id = share.queue_id)
    ORDER BY queue.kind <> 'tenant', queue.id;
  FOR leased IN
    SELECT run.leased_run AS run, taken.is_new, taken.reclaimed
      FROM unnest(picked) AS taken
     CROSS JOIN LATERAL (
       -- Not `=`, with which the planner may read all runs that the worker holds, once for each run.
       SELECT leased_run FROM interlock.leased_run
        WHERE id = taken.run_id AND lease_worker IS NOT DISTINCT FROM holder LIMIT 1
     ) AS run
  LOOP
    claimed := leased.run;
    claimed.is_new := leased.is_new;
    claimed.reclaimed := leased.reclaimed;
    RETURN NEXT claimed;
  END LOOP;
END $$;
