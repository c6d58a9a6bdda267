-- Sessions: conversations with an agent, one run at a time.

-- name: create_session
INSERT INTO session (id, tenant_id, workspace_id, agent, auto_approve, created_by, created_at)
VALUES ($2, $3, $4, $5, $6, $7, coalesce($1, now()))
ON CONFLICT (id) DO NOTHING
RETURNING *;

-- name: get_session
SELECT session.*, active.id AS run_id, active.status AS run_status,
       (SELECT count(*) FROM message WHERE message.session_id = session.id AND message.run_id IS NULL) AS waiting,
       (SELECT coalesce(sum(cost_usd), 0) FROM run WHERE run.session_id = session.id) AS cost_usd
  FROM session
  LEFT JOIN run AS active ON active.session_id = session.id AND active.completed_at IS NULL
 WHERE session.tenant_id = $1 AND session.id = $2;

-- name: list_sessions
-- Newest first.
SELECT session.*, active.id AS run_id, active.status AS run_status,
       (SELECT count(*) FROM message WHERE message.session_id = session.id AND message.run_id IS NULL) AS waiting,
       (SELECT coalesce(sum(cost_usd), 0) FROM run WHERE run.session_id = session.id) AS cost_usd
  FROM session
  LEFT JOIN run AS active ON active.session_id = session.id AND active.completed_at IS NULL
 WHERE session.tenant_id = $1
   AND ($2::uuid IS NULL OR session.id < $2)
   AND ($4::text IS NULL OR session.workspace_id = $4)
 ORDER BY session.id DESC LIMIT $3;

-- name: lock_session
-- Every transaction that starts a run of the session waits here for the others.
SELECT *, (SELECT name FROM tenant WHERE tenant.id = session.tenant_id) AS tenant FROM session WHERE tenant_id = $1 AND id = $2 FOR NO KEY UPDATE;

-- name: active_run_of_session
-- Call with the session locked.
SELECT id FROM run WHERE session_id = $1 AND completed_at IS NULL;

-- name: add_message
WITH counted AS (
  UPDATE session SET messages = messages + 1 WHERE id = $2 RETURNING messages
)
INSERT INTO message (session_id, number, id, tenant_id, content, auto_approve, sent_by, sender, idempotency_key,
                     sent_at)
SELECT $2, counted.messages, $3, $4, $5, $6, $7, $8::text::jsonb, $9, coalesce($1, now()) FROM counted
RETURNING *;

-- name: next_message
-- The first waiting message; call with the session locked.
SELECT * FROM message WHERE session_id = $1 AND run_id IS NULL ORDER BY number LIMIT 1;

-- name: join_session
-- In the transaction that starts the run, before the run is visible to others.
WITH counted AS (
  UPDATE session SET runs = runs + 1 WHERE id = $2 RETURNING runs
), answered AS (
  UPDATE message SET run_id = $1 WHERE message.id = $3
)
UPDATE run SET session_id = $2, session_run = counted.runs, auto_approve = $4 FROM counted WHERE run.id = $1
RETURNING run.*, pg_notify('interlock_run', $2::uuid::text)::text AS told;

-- name: sessions_with_waiting
SELECT DISTINCT session.tenant_id, session.id FROM message JOIN session ON session.id = message.session_id
 WHERE message.run_id IS NULL
   AND NOT EXISTS (SELECT FROM run WHERE run.session_id = session.id AND run.completed_at IS NULL)
 LIMIT $1;

-- name: said_in_session
-- The messages of the session and the outcome of their runs.
SELECT message.*, run.status, run.reason, run.result, run.error, run.completed_at
  FROM message LEFT JOIN run ON run.id = message.run_id
 WHERE message.session_id = $1 AND message.number > $2
 ORDER BY message.number LIMIT $3;

-- name: runs_before
-- The last $3 runs of the session before this one, without those that were resumed.
SELECT * FROM (
  SELECT id, tenant_id, workflow, workflow_version, input, trigger, requested_by, session_run FROM run
   WHERE session_id = $1 AND session_run < $2
     AND NOT EXISTS (SELECT FROM run AS again WHERE again.session_id = $1 AND again.resumed_from = run.id)
   ORDER BY session_run DESC LIMIT $3
) AS last ORDER BY session_run;

-- name: session_entries_after
-- The events of a session: its runs in order, each with its entries in order.
SELECT entry.run_id, entry.seq, entry.at, entry.type, entry.step, entry.from_state, entry.event, entry.to_state,
       entry.attempt, entry.token, entry.actor, entry.data, entry.output, run.session_run, run.input
  FROM run
 CROSS JOIN LATERAL (
   SELECT * FROM entry
    WHERE entry.run_id = run.id AND entry.seq > CASE WHEN run.session_run = $2 THEN $3 ELSE 0 END
    ORDER BY entry.seq LIMIT $4
 ) AS entry
 WHERE run.session_id = $1 AND run.session_run >= $2
 ORDER BY run.session_run, entry.seq LIMIT $4;

-- name: watch_session
-- Like watch_run, for the session's active run; returns that run's id, to listen for. Hundreds of clients may follow
-- it: if the run is already watched for long enough, its row stays unlocked for its worker.
WITH active AS (
  SELECT id, watched_until FROM run WHERE session_id = $2 AND completed_at IS NULL
), watched AS (
  UPDATE run SET watched_until = coalesce($1, now()) + make_interval(secs => $3)
    FROM active
   WHERE run.id = active.id AND run.completed_at IS NULL
     AND coalesce(active.watched_until, '-infinity') < coalesce($1, now()) + make_interval(secs => $3 / 2)
)
SELECT id FROM active;

-- name: session_is_busy
-- True if a run is active or a message waits for one. With the session locked, the answer stays true.
SELECT EXISTS (SELECT FROM run WHERE session_id = $1 AND completed_at IS NULL)
    OR EXISTS (SELECT FROM message WHERE session_id = $1 AND run_id IS NULL);

-- name: forget_said
DELETE FROM message
 WHERE (session_id, number) IN (SELECT session_id, number FROM message WHERE run_id < $1 LIMIT $2)
RETURNING id;

-- name: forget_sessions
-- Skips a session whose row is locked, because a user is sending it a message.
DELETE FROM session
 WHERE id IN (
   SELECT id FROM session
    WHERE id < $1
      AND NOT EXISTS (SELECT FROM message WHERE message.session_id = session.id)
      AND NOT EXISTS (SELECT FROM run WHERE run.session_id = session.id AND run.id >= $1)
    LIMIT $2 FOR UPDATE SKIP LOCKED
 )
RETURNING id;
