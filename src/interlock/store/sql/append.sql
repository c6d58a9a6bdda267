-- The only way for workers to write to the journal: the entries of many runs since the last commit, in one statement.

-- name: append
-- moves: step * -> *, run running -hold|park|succeed|fail|compensate-> *, run canceling -stopped|fail-> *
-- Only the holder of a run's current lease may write. Two conditions enforce it: the token must be the run's current
-- one, and the worker must be alive. The statement locks the worker's row FOR KEY SHARE, so the worker cannot be
-- declared lost during this statement, and every later append of a lost worker is refused. The next holder of its runs
-- therefore reads a journal that can no longer grow.
--
-- A run either stays with its worker or gives its lease back (it waits, ended, or used up its time slice). It gives the
-- lease back only if its inbox is empty; otherwise its entries are not kept either. The statement returns each run
-- whose entries were kept. A run that is missing from the answer was refused.
--
-- If this statement is alone in its transaction ($32 false), it locks the worker, then the lanes, then the runs: see
-- the lock order in 0005_queue. If other statements follow, COMMIT updates the lanes. PostgreSQL evaluates a CTE when
-- it is first read, so a step that must follow another one counts the rows of that one.
WITH me AS MATERIALIZED (
  -- The worker, if it is alive. Otherwise every condition below that reads this CTE is false. KEY SHARE conflicts with
  -- the statements that end the worker (FOR UPDATE), but not with its heartbeat or a reservation.
  SELECT id FROM worker WHERE id = $2 AND status IN ('running', 'paused') FOR KEY SHARE
), written AS MATERIALIZED (
  -- The entries of all runs in this batch, each with the token that its writer holds.
  SELECT * FROM unnest(
    $3::uuid[], $4::bigint[], $5::int[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::int[],
    $12::text[], $13::text[], $14::text[]
  ) AS w (run_id, token, seq, type, step, from_state, event, to_state, attempt, actor, data, output)
), leaving AS MATERIALIZED (
  -- The runs that give their lease back, and the new values of their rows.
  SELECT * FROM unnest(
    $15::uuid[], $16::uuid[], $17::bigint[], $18::text[], $19::text[], $20::text[], $21::text[], $22::text[],
    $23::timestamptz[], $24::boolean[], $25::int[], $26::numeric[], $27::uuid[], $28::uuid[]
  ) AS l (run_id, tenant_id, token, from_status, to_status, reason, result, error, wake_at, requeue, seq, cost_usd,
          side_id, next_side)
), awake AS MATERIALIZED (
  -- No lane may be put to rest while a run returns to it. As in wake_lane, this lock is taken before the lane's row.
  SELECT pg_advisory_xact_lock_shared(hashtextextended(tenant_id::text, 42)), pg_notify('interlock_ready', '')
    FROM (SELECT DISTINCT tenant_id FROM leaving WHERE requeue) AS requeued
), lanes AS MATERIALIZED (
  -- Every lane whose count changes: the tenant's own lane, the side lane that a run was claimed from, and the lane that
  -- it returns to. A held-up lane has ready runs that no worker could claim, because the lane was at its cap.
  SELECT id, active AND full_up AS held_up FROM lane
   WHERE id = ANY(ARRAY(
           SELECT tenant_id FROM leaving UNION SELECT side_id FROM leaving UNION SELECT next_side FROM leaving
         ))
     AND NOT $32 AND (SELECT count(*) FROM me) + (SELECT count(*) FROM awake) >= 0
   ORDER BY side_id NULLS FIRST, id
     FOR NO KEY UPDATE
), departed AS (
  -- The runs that give their lease back: this worker still holds the lease, and the inbox is empty.
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
   WHERE CASE WHEN $32 THEN (SELECT count(*) FROM awake) >= 0 ELSE (SELECT count(*) FROM lanes) > 0 END
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
  -- The runs that only write, and whose lease this worker still holds. Their rows do not change. One look-up by primary
  -- key for each: with a join the planner prefers to scan all leased runs.
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
  -- Once these runs have left, the worker has a free place and opens a seat with it, unless one of them must stay.
  INSERT INTO seat (worker_id, actor, channel, tenants)
  SELECT id, $29, $30, $31::uuid[] FROM me
   WHERE $30::text IS NOT NULL AND (SELECT count(*) FROM departed) = (SELECT count(*) FROM leaving)
  ON CONFLICT (worker_id) DO NOTHING
), requeued AS (
  -- Requeued runs, for other workers.
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost, workflow)
  SELECT tenant_id, id, next_side, nextval('ready_turn'), false, false, capped FROM departed WHERE requeue
), announced AS (
  -- A message for each webhook that subscribes to ended runs. Most tenants have none: then this costs one look-up in an
  -- empty index, and no separate statement.
  INSERT INTO outbox (tenant_id, destination_id, channel, event, subject_id, created_at, due_at)
  SELECT ended.tenant_id, d.id, d.channel, 'run.completed', ended.id, ended.completed_at, ended.completed_at
    FROM departed AS ended
    JOIN destination AS d ON d.tenant_id = ended.tenant_id AND d.disabled_at IS NULL
   WHERE ended.completed_at IS NOT NULL
     AND 'run.completed' = ANY(d.events)
     AND (d.workspace_id IS NULL OR d.workspace_id = ended.workspace_id)
), gone AS (
  -- The places of the runs that left are free: one in the tenant's own lane and, for a run from a side lane, one in
  -- that lane too. A lane that a run returns to has work now.
  SELECT id, tenant_id, sum(run)::int AS runs, bool_or(requeue) AS requeue
    FROM (SELECT tenant_id AS id, tenant_id, 1 AS run, requeue AND next_side IS NULL AS requeue FROM departed
          UNION ALL
          SELECT side_id, tenant_id, 1, false FROM departed WHERE side_id IS NOT NULL
          UNION ALL
          SELECT next_side, tenant_id, 0, requeue FROM departed WHERE next_side IS NOT NULL) AS each
   GROUP BY id, tenant_id
), freed AS (
  -- A lane that was at rest joins at the current virtual time of the others and gets no credit for its rest.
  UPDATE lane
     SET in_flight = in_flight - gone.runs,
         active = active OR gone.requeue,
         vtime = CASE WHEN gone.requeue AND NOT active THEN coalesce(turn_in(pool), vtime) ELSE vtime END
    FROM gone
   WHERE lane.id = gone.id AND NOT $32
), freed_later AS (
  INSERT INTO queue_change (tenant_id, lane_id, freed, has_work)
  SELECT tenant_id, id, runs, requeue FROM gone WHERE $32
)
-- Notify watchers that a run moved, and workers with room that a lane which was at its cap has a free place.
SELECT id, nudged, CASE WHEN watched THEN pg_notify('interlock_run', id::text)::text END,
       (SELECT pg_notify('interlock_ready', '')::text FROM lanes WHERE held_up LIMIT 1)
  FROM kept;

-- name: drain_inbox
-- In the transaction of the append that carries the results of the commands in the inbox; only for runs that this
-- worker still holds.
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
-- In the transaction of the append whose entry starts the compensation. The lease stays: its holder runs the steps.
UPDATE run SET status = 'canceling' WHERE id = ANY($1::uuid[]) AND lease_worker = $2;

-- name: written_before
-- After a connection broke during an append: was the append committed? The entry that records the lost lease does not
-- count. It carries the holder's token and perhaps the sequence number that we wrote, but another process wrote it.
SELECT run_id, seq FROM entry
 WHERE (run_id, seq, token) IN (SELECT * FROM unnest($1::uuid[], $2::int[], $3::bigint[]))
   AND type <> 'orphan_detected';

-- name: still_held
-- After a connection broke: which of these runs does the worker still hold? If the write had no entries, the lease is
-- the only evidence.
SELECT id FROM run WHERE lease_worker = $1 AND (id, lease_token) IN (SELECT * FROM unnest($2::uuid[], $3::bigint[]));
