-- The queue: which queues have work, how many places are free, and which blocked runs may go on. See 0005_queue.

-- The advisory lock that keeps a tenant's queues active: shared by transactions that fill one of them.
CREATE OR REPLACE FUNCTION interlock.queue_lock(tenant uuid) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT hashtextextended('interlock.queue ' || tenant, 0)
$$;

-- The current virtual time of a pool. A queue without work gets neither credit nor debt: it joins there.
CREATE OR REPLACE FUNCTION interlock.current_virtual_time(of_pool text) RETURNS float8 LANGUAGE sql STABLE AS $$
  SELECT virtual_time FROM interlock.queue
   WHERE pool = of_pool AND has_work AND NOT at_capacity ORDER BY virtual_time LIMIT 1
$$;

-- Called after a run was put into `ready_run`. The shared lock is taken before the queue is read (each statement of this
-- function has its own snapshot): either this function sees that deactivate_queue has deactivated the queue, and
-- activates it again, or deactivate_queue finds the lock taken and leaves the queue active. A tenant has one such lock
-- for all its queues, because a caller does not know beforehand which of them it fills. Workers are notified only when
-- the queue becomes active; a worker sleeps only while no queue is active, so that is enough.
CREATE OR REPLACE FUNCTION interlock.activate_queue(filled uuid, tenant uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(interlock.queue_lock(tenant));
  UPDATE interlock.queue
     SET has_work = true, virtual_time = coalesce(interlock.current_virtual_time(pool), virtual_time)
   WHERE id = filled AND NOT has_work;
  IF FOUND THEN
    PERFORM pg_notify('interlock.ready', '');
  END IF;
END $$;

-- Called by a claim that holds the queue's row and found fewer runs than it could have taken. Never waits: if a
-- transaction fills a queue of the tenant at this moment, the queue stays active, and the next claim looks again.
CREATE OR REPLACE FUNCTION interlock.deactivate_queue(dry uuid, tenant uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF pg_try_advisory_xact_lock(interlock.queue_lock(tenant)) THEN
    UPDATE interlock.queue SET has_work = false
     WHERE id = dry AND has_work AND NOT EXISTS (SELECT FROM interlock.ready_run WHERE queue_id = dry);
  END IF;
END $$;

-- Called in the transaction that blocks a run or frees a place, at its COMMIT. The lock that keeps queues active comes
-- before the queue's row, as in activate_queue. Returns how many runs were admitted.
CREATE OR REPLACE FUNCTION interlock.admit_blocked(tenant uuid, limited text) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  places bigint;
  filled uuid[];
BEGIN
  PERFORM pg_advisory_xact_lock_shared(interlock.queue_lock(tenant));
  PERFORM FROM interlock.queue WHERE id = tenant FOR NO KEY UPDATE;
  SELECT max_concurrency
         - (SELECT count(*) FROM interlock.run
             WHERE has_concurrency_limit AND lease_worker IS NOT NULL AND tenant_id = tenant AND workflow = limited)
         - (SELECT count(*) FROM interlock.ready_run WHERE tenant_id = tenant AND workflow = limited)
    INTO places
    FROM interlock.workflow_cap WHERE tenant_id = tenant AND workflow = limited;
  IF places <= 0 THEN
    RETURN 0;
  END IF;
  -- Without a cap `places` is NULL, and all are admitted. Skips a row that a command has locked: the command waits for
  -- this queue when it commits. If it ends without a commit, the sweep admits the run.
  WITH next AS MATERIALIZED (
    SELECT run_id FROM interlock.blocked_run WHERE tenant_id = tenant AND workflow = limited
     ORDER BY priority, position LIMIT places
       FOR UPDATE SKIP LOCKED
  ), admitted AS (
    DELETE FROM interlock.blocked_run USING next
     WHERE blocked_run.tenant_id = tenant AND blocked_run.run_id = next.run_id
    RETURNING blocked_run.*
  ), queued AS (
    INSERT INTO interlock.ready_run (tenant_id, run_id, queue_id, priority, position, is_new, reclaimed, workflow)
    SELECT tenant_id, run_id, queue_id, priority, position, is_new, reclaimed, workflow FROM admitted
    RETURNING queue_id
  )
  SELECT array_agg(queue_id) INTO filled FROM queued;
  PERFORM interlock.activate_queue(queue_id, tenant)
     FROM (SELECT DISTINCT unnest(filled) AS queue_id) AS queues
    ORDER BY queue_id <> tenant, queue_id;
  RETURN coalesce(cardinality(filled), 0);
END $$;

-- Puts runs into the queue and takes others out, in the transaction that changes the runs. A run of a workflow with a cap
-- is blocked first, unless it gives back a lease: then it keeps its place. COMMIT applies the changes of the queues.
CREATE OR REPLACE FUNCTION interlock.requeue_runs(moves interlock.queue_move[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO interlock.ready_run (tenant_id, run_id, queue_id, priority, is_new, reclaimed, workflow)
  SELECT tenant_id, run_id, queue_id, priority, is_new, reclaimed, workflow FROM unnest(moves)
   WHERE queue_id IS NOT NULL AND (workflow IS NULL OR left_queue_id IS NOT NULL);
  INSERT INTO interlock.blocked_run (tenant_id, workflow, run_id, queue_id, priority, is_new, reclaimed)
  SELECT tenant_id, workflow, run_id, queue_id, priority, is_new, reclaimed FROM unnest(moves)
   WHERE queue_id IS NOT NULL AND workflow IS NOT NULL AND left_queue_id IS NULL;
  -- A run that gives back its lease frees a place in its tenant's queue, and in the queue that it was claimed from.
  INSERT INTO interlock.queue_change (tenant_id, queue_id, freed, has_work)
  SELECT tenant_id, queue_id, sum(freed), bool_or(has_work)
    FROM (SELECT tenant_id, tenant_id AS queue_id, 1 AS freed, false AS has_work FROM unnest(moves)
           WHERE left_queue_id IS NOT NULL
          UNION ALL
          SELECT tenant_id, left_queue_id, 1, false FROM unnest(moves) WHERE left_queue_id <> tenant_id
          UNION ALL
          SELECT tenant_id, queue_id, 0, true FROM unnest(moves)
           WHERE queue_id IS NOT NULL AND (workflow IS NULL OR left_queue_id IS NOT NULL)) AS change
   GROUP BY tenant_id, queue_id;
  INSERT INTO interlock.queue_change (tenant_id, workflow)
  SELECT DISTINCT tenant_id, workflow FROM unnest(moves)
   WHERE workflow IS NOT NULL AND (queue_id IS NULL OR left_queue_id IS NULL);
END $$;

-- The first row's trigger applies all rows of the transaction in lock order of the queues; the triggers of the other
-- rows find nothing left.
CREATE OR REPLACE FUNCTION interlock.apply_queue_changes() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  mine interlock.queue_change[];
BEGIN
  WITH taken AS (DELETE FROM interlock.queue_change WHERE xact = pg_current_xact_id() RETURNING queue_change)
  SELECT array_agg(queue_change) INTO mine FROM taken;
  IF mine IS NULL THEN
    RETURN NULL;
  END IF;
  PERFORM pg_advisory_xact_lock_shared(interlock.queue_lock(tenant_id))
     FROM (SELECT DISTINCT tenant_id FROM unnest(mine) WHERE has_work OR workflow IS NOT NULL) AS filled;
  -- A queue that is already active and frees no place does not change, so it need not be locked.
  PERFORM FROM interlock.queue
    WHERE id = ANY(ARRAY(SELECT coalesce(queue_id, tenant_id) FROM unnest(mine) WHERE freed > 0 OR workflow IS NOT NULL))
       OR (id = ANY(ARRAY(SELECT queue_id FROM unnest(mine) WHERE has_work)) AND NOT has_work)
    ORDER BY kind <> 'tenant', id
      FOR NO KEY UPDATE;
  PERFORM pg_notify('interlock.ready', '') FROM interlock.queue
    WHERE id = ANY(ARRAY(SELECT queue_id FROM unnest(mine) WHERE freed > 0)) AND has_work AND at_capacity;
  UPDATE interlock.queue SET in_flight = in_flight - places.freed
    FROM (SELECT queue_id, sum(freed)::int AS freed FROM unnest(mine) WHERE freed > 0 GROUP BY queue_id) AS places
   WHERE queue.id = places.queue_id;
  PERFORM interlock.activate_queue(queue_id, tenant_id)
     FROM (SELECT DISTINCT tenant_id, queue_id FROM unnest(mine) WHERE has_work) AS filled
    ORDER BY queue_id <> tenant_id, queue_id;
  PERFORM interlock.admit_blocked(tenant_id, workflow)
     FROM (SELECT DISTINCT tenant_id, workflow FROM unnest(mine) WHERE workflow IS NOT NULL) AS limited
    ORDER BY tenant_id, workflow;
  RETURN NULL;
END $$;

-- A single statement, so that the lock lasts only as long as the count. Returns the old and the new count, or nothing
-- if they are equal. With the queue locked, no transaction is between taking a lease and counting it.
CREATE OR REPLACE FUNCTION interlock.recount_queue(counted uuid, OUT before int, OUT after int) LANGUAGE plpgsql AS $$
BEGIN
  SELECT in_flight INTO before FROM interlock.queue WHERE id = counted FOR NO KEY UPDATE;
  SELECT count(*) INTO after FROM interlock.run WHERE lease_worker IS NOT NULL AND counted IN (tenant_id, queue_id);
  UPDATE interlock.queue SET in_flight = after WHERE id = counted AND in_flight <> after;
  IF NOT FOUND THEN
    before := NULL;
    after := NULL;
  END IF;
END $$;
