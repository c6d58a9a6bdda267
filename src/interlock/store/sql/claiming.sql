-- Claiming: which runs a worker gets next. The functions are in functions/05_claiming.sql.

-- name: claimable_queues
-- params: pool text, tenants uuid[]?, most int
-- returns: ClaimableQueue*
-- Return the queues of a pool that have work and room, in fair order. `places` is NULL without a cap. No row is locked:
-- the claim that follows checks again.
SELECT queue.id, queue.tenant_id, queue.weight, queue.virtual_time, queue.max_concurrency - queue.in_flight AS places,
       home.max_concurrency - home.in_flight AS places_of_tenant
  FROM interlock.queue JOIN interlock.queue AS home ON home.id = queue.tenant_id
 WHERE queue.pool = @pool AND queue.has_work AND NOT queue.at_capacity AND NOT home.at_capacity
   AND (@tenants IS NULL OR queue.tenant_id = ANY(@tenants))
 ORDER BY queue.virtual_time
 LIMIT @most;

-- name: claim_runs
-- moves: run pending -start-> running
-- params: worker_id uuid, actor text, pool text, shares interlock.queue_share[]
-- returns: ClaimedRun*
-- Lease the next runs of each queue to the worker, at most its share. Queues that another transaction has locked give
-- nothing.
SELECT * FROM interlock.claim_runs(@worker_id, @actor, @pool, @shares);

-- name: work_is_waiting
-- params: pools text[], tenants uuid[]?
-- returns: boolean
-- Return whether a worker that serves these pools and tenants could claim a run.
SELECT EXISTS (
  SELECT FROM interlock.queue JOIN interlock.queue AS home ON home.id = queue.tenant_id
   WHERE queue.pool = ANY(@pools) AND queue.has_work AND NOT queue.at_capacity AND NOT home.at_capacity
     AND (@tenants IS NULL OR queue.tenant_id = ANY(@tenants))
);

-- name: leases_of
-- params: worker_id uuid
-- returns: ClaimedRun*
-- Return the runs that this worker holds according to the database, for use after the answer to a claim was lost. No row
-- once the worker was declared lost, even before its runs are reclaimed: it may not write, so it may not run them.
SELECT * FROM interlock.leased_run
 WHERE lease_worker = @worker_id
   AND EXISTS (SELECT FROM interlock.worker WHERE worker.id = @worker_id AND stopped_at IS NULL);

-- name: hand_back
-- params: worker_id uuid, run_id uuid, token bigint
-- returns: nothing
-- Requeue a run that its holder cannot continue, with the commands that wait for it, behind all other ready runs.
WITH freed AS (
  UPDATE interlock.run SET lease_worker = NULL
   WHERE id = @run_id AND lease_worker = @worker_id AND lease_token = @token
  RETURNING tenant_id, id, queue_id, CASE WHEN has_concurrency_limit THEN workflow END AS workflow
)
SELECT interlock.requeue_runs(ARRAY[
         ROW(tenant_id, id, queue_id, queue_id, workflow, 1, false, false)::interlock.queue_move
       ])::text FROM freed;

-- name: claims_in_vain
-- params: run_id uuid, token bigint
-- returns: bigint
-- Return how often a run was claimed since the last write under a lease.
SELECT @token - coalesce(max(token), 0) FROM interlock.journal_entry WHERE run_id = @run_id;

-- name: add_label_queue
-- params: queue_id uuid, tenant_id uuid, label text
-- returns: nothing
-- Add a tenant's queue for a label that its steps require; the queue's id is derived from the two.
INSERT INTO interlock.queue (id, tenant_id, kind, pool, weight)
SELECT @queue_id, tenant_id, 'label', @label, weight FROM interlock.queue WHERE id = @tenant_id
ON CONFLICT DO NOTHING;

-- name: open_dispatch_slot
-- params: worker_id uuid, actor text, channel text, tenants uuid[]?
-- returns: nothing
-- If a crash loses this row, the next run just goes through the queue.
WITH lazy AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO interlock.dispatch_slot (worker_id, actor, channel, tenants)
SELECT @worker_id, @actor, @channel, @tenants FROM lazy
ON CONFLICT (worker_id) DO NOTHING;

-- name: close_dispatch_slot
-- params: worker_id uuid
-- returns: WorkerId?
DELETE FROM interlock.dispatch_slot WHERE worker_id = @worker_id RETURNING worker_id;
