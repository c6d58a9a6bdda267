-- The journal's one door for workers: what many runs did since the last commit, in one statement.

-- name: append
-- moves: step * -> *, run running -hold|park|succeed|fail|compensate-> *, run canceling -stopped|fail-> *
-- Only the holder of a run's current lease may write. Two things see to it: the token must be the run's, and the
-- worker must be alive. Its row is share-locked, so that declaring it lost waits for this statement and every later
-- one is refused: whoever takes its runs over reads a journal that can no longer grow behind their back.
--
-- A run either stays with its worker or gives its lease back (it waits, ended, or its time slice is over). It gives it
-- back only if nothing came into its inbox; its entries stand or fall with that. What is returned is each run whose
-- entries were kept. A run that is missing from the answer was refused.
--
-- Lanes are locked before runs, in order: see the lock order in 0005_queue. PostgreSQL evaluates a CTE when it is
-- first read, so a step that has to come after another one counts its rows.
WITH me AS MATERIALIZED (
  -- The worker, if it is alive. If it is not, every condition below that asks for it is false.
  SELECT id FROM worker WHERE id = $2 AND status IN ('running', 'paused') FOR SHARE
), written AS MATERIALIZED (
  -- The entries of all runs in this batch, each with the token that its writer holds.
  SELECT * FROM unnest(
    $3::uuid[], $4::bigint[], $5::int[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::int[],
    $12::text[], $13::text[], $14::text[]
  ) AS w (run_id, token, seq, type, step, from_state, event, to_state, attempt, actor, data, output)
), leaving AS MATERIALIZED (
  -- The runs that want to give their lease back, and what their row is to say then.
  SELECT * FROM unnest(
    $15::uuid[], $16::uuid[], $17::bigint[], $18::text[], $19::text[], $20::text[], $21::text[], $22::text[],
    $23::timestamptz[], $24::boolean[], $25::int[], $26::numeric[], $27::uuid[], $28::uuid[]
  ) AS l (run_id, tenant_id, token, from_status, to_status, reason, result, error, wake_at, requeue, seq, cost_usd,
          side_id, next_side)
), awake AS MATERIALIZED (
  -- A lane that gets a run back into the queue must not be put to rest meanwhile. As in wake_lane, this lock comes
  -- before the lane's row.
  SELECT pg_advisory_xact_lock_shared(hashtextextended(tenant_id::text, 42)), pg_notify('interlock_ready', '')
    FROM (SELECT DISTINCT tenant_id FROM leaving WHERE requeue) AS requeued
), lanes AS MATERIALIZED (
  -- Every lane whose count changes: the tenant's own, the side lane that a run was claimed from, and the one that it
  -- goes to. A lane that is held up has work that nobody could claim, because it was at its cap.
  SELECT id, active AND full_up AS held_up FROM lane
   WHERE id = ANY(ARRAY(
           SELECT tenant_id FROM leaving UNION SELECT side_id FROM leaving UNION SELECT next_side FROM leaving
         ))
     AND (SELECT count(*) FROM awake) >= 0
   ORDER BY side_id NULLS FIRST, id
     FOR NO KEY UPDATE
), departed AS (
  -- The runs that leave: the lease is still theirs to give back, and no mail came in.
  UPDATE run
     SET status = leaving.to_status,
         reason = leaving.reason,
         result = leaving.result::jsonb,
         error = leaving.error::jsonb,
         completed_at = CASE WHEN leaving.reason IS NOT NULL THEN coalesce($1, now()) END,
         wake_at = leaving.wake_at,
         seq = leaving.seq,
         cost_usd = run.cost_usd + leaving.cost_usd,
         side_id = leaving.next_side,
         lease_worker = NULL
    FROM leaving
   WHERE (SELECT count(*) FROM lanes) > 0
     AND run.id = leaving.run_id
     AND run.id = ANY($15::uuid[])  -- said twice: with the join alone the planner may read all runs
     AND run.lease_token = leaving.token
     AND run.lease_worker = (SELECT id FROM me)
     AND run.status = leaving.from_status
     AND run.inbox = 0
  RETURNING run.id, run.tenant_id, leaving.requeue, run.watched_until > coalesce($1, now()) AS watched,
            run.completed_at, run.workspace_id, CASE WHEN run.capped THEN run.workflow END AS capped, leaving.side_id,
            leaving.next_side
), staying AS (
  -- The runs that only write, and whose lease is still this worker's. Their row does not change. One look-up each, by
  -- primary key: for a join the planner would rather walk over all that is leased.
  SELECT run.id, run.tenant_id, run.inbox > 0 AS nudged, run.watched_until > coalesce($1, now()) AS watched
    FROM (SELECT DISTINCT run_id, token FROM written) AS held
   CROSS JOIN LATERAL (
     SELECT * FROM run
      WHERE run.id = held.run_id AND run.lease_token = held.token AND run.lease_worker = (SELECT id FROM me)
      LIMIT 1
   ) AS run
   WHERE held.run_id NOT IN (SELECT run_id FROM leaving)
), kept AS (
  SELECT id, tenant_id, false AS nudged, watched FROM departed
  UNION ALL
  SELECT id, tenant_id, nudged, watched FROM staying
), appended AS (
  -- The journal grows. The primary key refuses a second writer of the same number.
  INSERT INTO entry (run_id, seq, tenant_id, at, type, step, from_state, event, to_state, attempt, token, actor, data,
                     output)
  SELECT w.run_id, w.seq, kept.tenant_id, coalesce($1, now()), w.type, w.step, w.from_state, w.event, w.to_state,
         w.attempt, w.token, w.actor, w.data::jsonb, w.output::jsonb
    FROM written AS w
    JOIN kept ON kept.id = w.run_id
), seated AS (
  -- The worker has a place free once these runs have left, and opens a seat with it; not if one of them has to stay.
  INSERT INTO seat (worker_id, actor, channel, tenants)
  SELECT id, $29, $30, $31::uuid[] FROM me
   WHERE $30::text IS NOT NULL AND (SELECT count(*) FROM departed) = (SELECT count(*) FROM leaving)
  ON CONFLICT (worker_id) DO NOTHING
), requeued AS (
  -- Runs that others go on with.
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost, workflow)
  SELECT tenant_id, id, next_side, nextval('ready_turn'), false, false, capped FROM departed WHERE requeue
), announced AS (
  -- A message for each webhook that wants to hear that a run ended. Most tenants have none: then this costs one look
  -- into an empty index, and no statement of its own.
  INSERT INTO outbox (tenant_id, destination_id, channel, event, subject_id, created_at, due_at)
  SELECT ended.tenant_id, d.id, d.channel, 'run.completed', ended.id, ended.completed_at, ended.completed_at
    FROM departed AS ended
    JOIN destination AS d ON d.tenant_id = ended.tenant_id AND d.disabled_at IS NULL
   WHERE ended.completed_at IS NOT NULL
     AND 'run.completed' = ANY(d.events)
     AND (d.workspace_id IS NULL OR d.workspace_id = ended.workspace_id)
), freed AS (
  -- The places of those that left are free: one in the tenant's own lane and, of a run from a side lane, one there
  -- too. The lane that a run goes to has work now. If it was at rest it joins at the turn of the others, with no
  -- credit for its rest.
  UPDATE lane
     SET in_flight = in_flight - gone.runs,
         active = active OR gone.requeue,
         vtime = CASE WHEN gone.requeue AND NOT active THEN coalesce(turn_in(pool), vtime) ELSE vtime END
    FROM (
      SELECT id, sum(run)::int AS runs, bool_or(requeue) AS requeue
        FROM (SELECT tenant_id AS id, 1 AS run, requeue AND next_side IS NULL AS requeue FROM departed
              UNION ALL
              SELECT side_id, 1, false FROM departed WHERE side_id IS NOT NULL
              UNION ALL
              SELECT next_side, 0, requeue FROM departed WHERE next_side IS NOT NULL) AS each
       GROUP BY id
    ) AS gone
   WHERE lane.id = gone.id
)
-- Whoever watches a run is told that it moved, and workers with room that a lane which was at its cap has a place.
SELECT id, nudged, CASE WHEN watched THEN pg_notify('interlock_run', id::text)::text END,
       (SELECT pg_notify('interlock_ready', '')::text FROM lanes WHERE held_up LIMIT 1)
  FROM kept;

-- name: keep_awake
-- First in a transaction whose append frees places in a workflow with a cap, or starts runs: their lanes must not be
-- put to rest meanwhile. As in wake_lane, this lock comes before the lanes' rows.
SELECT pg_advisory_xact_lock_shared(hashtextextended(t::text, 42)) FROM unnest($1::uuid[]) AS t;

-- name: lock_lanes
-- Before an append that starts runs: the lanes that these go into, together with those of the runs that leave, so that
-- all of them are locked in one order.
SELECT tenant_id FROM lane WHERE tenant_id = ANY($1::uuid[]) ORDER BY tenant_id FOR NO KEY UPDATE;

-- name: drain_inbox
-- In the transaction of the append that carries what the words in the inbox led to; only for runs that are still this
-- worker's.
WITH gone AS (
  DELETE FROM inbox USING run
   WHERE inbox.id = ANY($1::bigint[]) AND run.id = inbox.run_id AND run.lease_worker = $2
  RETURNING inbox.run_id
)
UPDATE run SET inbox = inbox - taken.words
  FROM (SELECT run_id, count(*)::int AS words FROM gone GROUP BY run_id) AS taken
 WHERE run.id = taken.run_id;

-- name: stop_runs
-- moves: run running|canceling -compensate-> canceling
-- In the transaction of the append whose entry says that the run undoes what it did. The lease stays: its holder goes
-- on with the undoing.
UPDATE run SET status = 'canceling' WHERE id = ANY($1::uuid[]) AND lease_worker = $2;

-- name: written_before
-- After a connection broke during an append: was it committed all the same? The entry that says that the lease was lost
-- does not count. It has the holder's token too, perhaps even the number that we wrote, but somebody else wrote it.
SELECT run_id, seq FROM entry
 WHERE (run_id, seq, token) IN (SELECT * FROM unnest($1::uuid[], $2::int[], $3::bigint[]))
   AND type <> 'orphan_detected';

-- name: still_held
-- After a connection broke: which of these runs does the worker still hold? The lease is all there is to ask about if
-- the write had no entries.
SELECT id FROM run WHERE lease_worker = $1 AND (id, lease_token) IN (SELECT * FROM unnest($2::uuid[], $3::bigint[]));
