-- Run commands from people, timers and events: applied directly if no worker holds the run, else posted to its inbox.

-- name: unqueue_run
-- Before the run's row is locked, in the same order as a claim. If the command changes nothing, queue_run requeues it.
WITH held AS (
  DELETE FROM held_back WHERE tenant_id = $1 AND run_id = $2 RETURNING fresh, lost
), queued AS (
  DELETE FROM ready WHERE tenant_id = $1 AND run_id = $2 RETURNING fresh, lost
)
SELECT fresh, lost FROM queued UNION ALL SELECT fresh, lost FROM held;

-- name: is_queued
-- Valid only while the run's row is locked: every statement that queues a run holds that lock.
SELECT EXISTS (SELECT FROM ready WHERE tenant_id = $1 AND run_id = $2)
    OR EXISTS (SELECT FROM held_back WHERE tenant_id = $1 AND run_id = $2);

-- name: lock_run
SELECT *, coalesce($1, now()) AS now FROM run WHERE tenant_id = $2 AND id = $3 FOR NO KEY UPDATE;

-- name: move_run
-- moves: run * -> *
-- A trigger refuses transitions that are in no table. The journal may have costs ($9) of a lost worker that the row
-- lacks.
UPDATE run
   SET status = $3, reason = $4, result = $5::text::jsonb, error = $6::text::jsonb,
       completed_at = CASE WHEN $4::text IS NOT NULL THEN coalesce($1, now()) END,
       wake_at = $7, awaits_flow = NULL, seq = $8, cost_usd = greatest(cost_usd, $9)
 WHERE id = $2
RETURNING *, CASE WHEN watched_until > coalesce($1, now()) THEN pg_notify('interlock_run', id::text)::text END,
          CASE WHEN completed_at IS NOT NULL THEN announce_end(run)::text END AS announced;

-- name: append_from_outside
INSERT INTO entry (run_id, seq, tenant_id, at, type, step, from_state, event, to_state, attempt, token, actor, data,
                   output)
SELECT $2, e.seq, $3, coalesce($1, now()), e.type, e.step, e.from_state, e.event, e.to_state, e.attempt, 0, e.actor,
       e.data::jsonb, e.output::jsonb
  FROM unnest($4::int[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::int[], $11::text[],
              $12::text[], $13::text[])
    AS e (seq, type, step, from_state, event, to_state, attempt, actor, data, output);

-- name: queue_run
-- Into the lane that the run's row names. If its workflow has a cap, the row carries the workflow's name and is blocked
-- until there is room. COMMIT wakes the lane, or admits as many runs as there is room for.
WITH turn AS MATERIALIZED (
  SELECT side_id, nextval('ready_turn') - CASE WHEN $3 THEN 0 ELSE 1::bigint << 62 END AS turn FROM run WHERE id = $2
), queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost)
  SELECT $1, $2, side_id, turn, $3, $4 FROM turn WHERE $5::text IS NULL
  RETURNING tenant_id, side_id
), held AS (
  INSERT INTO held_back (tenant_id, workflow, run_id, side_id, turn, fresh, lost)
  SELECT $1, $5, $2, side_id, turn, $3, $4 FROM turn WHERE $5::text IS NOT NULL
  RETURNING tenant_id, workflow
)
INSERT INTO queue_change (tenant_id, lane_id, has_work, workflow)
SELECT tenant_id, coalesce(side_id, tenant_id), true, NULL FROM queued
UNION ALL
SELECT tenant_id, NULL, false, workflow FROM held;

-- name: let_in
-- Places in these workflows became free: COMMIT admits as many runs as there is room for.
INSERT INTO queue_change (tenant_id, workflow)
SELECT DISTINCT * FROM unnest($1::uuid[], $2::text[]);

-- name: post_to_inbox
-- moves: run running -cancel-> canceling
-- The holder's next append checks the count on the run's row, even if that append already waits for this lock.
WITH posted AS (
  INSERT INTO inbox (run_id, command, step, actor, data, at) VALUES ($2, $3, $4, $5, $6::text::jsonb, coalesce($1, now()))
)
UPDATE run SET inbox = inbox + 1, status = $7
 WHERE id = $2
RETURNING *, pg_notify('interlock_inbox', lease_worker::text)::text,
          (SELECT heartbeat_at FROM worker WHERE worker.id = lease_worker) AS last_heartbeat_at;

-- name: post_events
-- Events that arrived before their steps began to wait, for runs that the calling worker holds.
WITH words AS (
  SELECT * FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[])
    AS w (run_id, command, step, actor, data)
), posted AS (
  INSERT INTO inbox (run_id, command, step, actor, data, at)
  SELECT run_id, command, step, actor, data::jsonb, coalesce($1, now()) FROM words
)
UPDATE run SET inbox = inbox + sent.words
  FROM (SELECT run_id, count(*)::int AS words FROM words GROUP BY run_id) AS sent
 WHERE run.id = sent.run_id;

-- name: forget_mail
-- For a run that ends before a worker read its inbox.
WITH gone AS (DELETE FROM inbox WHERE run_id = $1)
UPDATE run SET inbox = 0 WHERE id = $1;

-- name: last_seq
-- From the journal itself: the row knows only the sequence number of its last change.
SELECT max(seq) FROM entry WHERE run_id = $1;

-- name: read_inbox
SELECT id, run_id, command, step, actor, data, at FROM inbox WHERE run_id = ANY($1::uuid[]) ORDER BY id;

-- name: runs_with_mail
SELECT id FROM run WHERE lease_worker = $1 AND inbox > 0;
