-- Commands from outside: what people, timers and events do to a run that no worker holds, and how they leave word
-- for one that a worker holds.

-- name: unqueue_run
-- Before the run's row is locked, as a claim does it. Put back with queue_run if nothing comes of the command.
DELETE FROM ready WHERE tenant_id = $1 AND run_id = $2 RETURNING fresh, lost;

-- name: is_queued
-- Asked once the run's row is locked: whoever queues a run has that lock, so the answer stays true.
SELECT EXISTS (SELECT FROM ready WHERE tenant_id = $1 AND run_id = $2);

-- name: lock_run
SELECT *, coalesce($1, now()) AS now FROM run WHERE tenant_id = $2 AND id = $3 FOR NO KEY UPDATE;

-- name: move_run
-- moves: run * -> *
-- The trigger refuses what is in no table.
UPDATE run
   SET status = $3, reason = $4, result = $5::text::jsonb, error = $6::text::jsonb,
       completed_at = CASE WHEN $4::text IS NOT NULL THEN coalesce($1, now()) END,
       wake_at = $7, seq = $8
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
WITH queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost)
  SELECT $1, $2, side_id, nextval('ready_turn') - CASE WHEN $3 THEN 0 ELSE 1::bigint << 62 END, $3, $4
    FROM run WHERE id = $2
  RETURNING lane_id
)
SELECT wake_lane(lane_id) FROM queued;

-- name: post_to_inbox
-- moves: run running -cancel-> canceling
-- The count on the run's row is what the holder's next append sees, also one that is already waiting for this lock.
WITH posted AS (
  INSERT INTO inbox (run_id, command, step, actor, data, at) VALUES ($2, $3, $4, $5, $6::text::jsonb, coalesce($1, now()))
)
UPDATE run SET inbox = inbox + 1, status = $7
 WHERE id = $2
RETURNING *, pg_notify('interlock_inbox', lease_worker::text)::text;

-- name: read_inbox
SELECT id, run_id, command, step, actor, data, at FROM inbox WHERE run_id = ANY($1::uuid[]) ORDER BY id;

-- name: runs_with_mail
SELECT id FROM run WHERE lease_worker = $1 AND inbox > 0;
