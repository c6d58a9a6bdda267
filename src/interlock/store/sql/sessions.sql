-- Sessions: conversations with an agent, one run at a time.

-- name: create_session
INSERT INTO interlock.session (id, tenant_id, workspace_id, agent, auto_approve, created_by, created_at)
VALUES ($1, $2, $3, $4, $5, $6, interlock.now())
ON CONFLICT (id) DO NOTHING
RETURNING *;

-- name: get_session
SELECT session.*, active.id AS run_id, active.status AS run_status,
       (SELECT count(*) FROM interlock.message WHERE message.session_id = session.id AND message.run_id IS NULL) AS waiting,
       (SELECT coalesce(sum(cost_usd), 0) FROM interlock.run WHERE run.session_id = session.id) AS cost_usd
  FROM interlock.session
  LEFT JOIN interlock.run AS active ON active.session_id = session.id AND active.completed_at IS NULL
 WHERE session.tenant_id = $1 AND session.id = $2;

-- name: list_sessions
-- Newest first.
SELECT session.*, active.id AS run_id, active.status AS run_status,
       (SELECT count(*) FROM interlock.message WHERE message.session_id = session.id AND message.run_id IS NULL) AS waiting,
       (SELECT coalesce(sum(cost_usd), 0) FROM interlock.run WHERE run.session_id = session.id) AS cost_usd
  FROM interlock.session
  LEFT JOIN interlock.run AS active ON active.session_id = session.id AND active.completed_at IS NULL
 WHERE session.tenant_id = $1
   AND ($2::uuid IS NULL OR session.id < $2)
   AND ($4::text IS NULL OR session.workspace_id = $4)
 ORDER BY session.id DESC LIMIT $3;

-- name: lock_session
-- Every transaction that starts a run of the session waits here for the others.
SELECT *, (SELECT name FROM interlock.tenant WHERE tenant.id = session.tenant_id) AS tenant FROM interlock.session WHERE tenant_id = $1 AND id = $2 FOR NO KEY UPDATE;

-- name: active_run_of_session
-- Call with the session locked.
SELECT id FROM interlock.run WHERE session_id = $1 AND completed_at IS NULL;

-- name: add_message
WITH counted AS (
  UPDATE interlock.session SET messages = messages + 1 WHERE id = $1 RETURNING messages
)
INSERT INTO interlock.message (session_id, number, id, tenant_id, content, auto_approve, sent_by, sender, idempotency_key,
                     sent_at)
SELECT $1, counted.messages, $2, $3, $4, $5, $6, $7::text::jsonb, $8, interlock.now() FROM counted
RETURNING *;

-- name: next_message
-- The first waiting message; call with the session locked.
SELECT * FROM interlock.message WHERE session_id = $1 AND run_id IS NULL ORDER BY number LIMIT 1;

-- name: count_session_run
-- params: session_id uuid
-- returns: int
-- Return the number of the session's next run; call with the session locked.
UPDATE interlock.session SET runs = runs + 1 WHERE id = @session_id RETURNING runs;

-- name: answer_message
-- params: message_id uuid?, run_id uuid, session_id uuid
-- returns: nothing
-- In the transaction that starts the run.
WITH answered AS (UPDATE interlock.message SET run_id = @run_id WHERE message.id = @message_id)
SELECT pg_notify('interlock.run', @session_id::text)::text;

-- name: sessions_with_waiting
SELECT DISTINCT session.tenant_id, session.id FROM interlock.message JOIN interlock.session ON session.id = message.session_id
 WHERE message.run_id IS NULL
   AND NOT EXISTS (SELECT FROM interlock.run WHERE run.session_id = session.id AND run.completed_at IS NULL)
 LIMIT $1;

-- name: said_in_session
-- The messages of the session and the outcome of their runs.
SELECT message.*, run.status, run.reason, run.result, run.error, run.completed_at
  FROM interlock.message LEFT JOIN interlock.run ON run.id = message.run_id
 WHERE message.session_id = $1 AND message.number > $2
 ORDER BY message.number LIMIT $3;

-- name: runs_before
-- params: session_id uuid, session_run int, most int
-- returns: EarlierRun*
-- The last runs of the session before this one, without those that were resumed.
SELECT * FROM (
  SELECT id, tenant_id, workflow, workflow_version, input, trigger, requested_by, created_at, session_run
    FROM interlock.run
   WHERE session_id = @session_id AND session_run < @session_run
     AND NOT EXISTS (SELECT FROM interlock.run AS again WHERE again.session_id = @session_id AND again.resumed_from = run.id)
   ORDER BY session_run DESC LIMIT @most
) AS last ORDER BY session_run;

-- name: session_entries_after
-- params: session_id uuid, session_run int, seq int, most int
-- returns: SessionEntry*
-- The events of a session: its runs in order, each with its entries in order.
SELECT entry.run_id, entry.seq, entry.at, entry.type, entry.step, entry.from_state, entry.event, entry.to_state,
       entry.attempt, entry.token, entry.actor, entry.data, entry.output, run.session_run, run.input
  FROM interlock.run
 CROSS JOIN LATERAL (
   SELECT * FROM interlock.journal_entry
    WHERE journal_entry.run_id = run.id AND journal_entry.seq > CASE WHEN run.session_run = @session_run THEN @seq ELSE 0 END
    ORDER BY journal_entry.seq LIMIT @most
 ) AS entry
 WHERE run.session_id = @session_id AND run.session_run >= @session_run
 ORDER BY run.session_run, entry.seq LIMIT @most;

-- name: watch_session
-- Like watch_run, for the session's active run; returns that run's id, to listen for. Hundreds of clients may follow
-- it: if the run is already watched for long enough, its row stays unlocked for its worker.
WITH active AS (
  SELECT id, watched_until FROM interlock.run WHERE session_id = $1 AND completed_at IS NULL
), watched AS (
  UPDATE interlock.run SET watched_until = interlock.now() + make_interval(secs => $2)
    FROM active
   WHERE run.id = active.id AND run.completed_at IS NULL
     AND coalesce(active.watched_until, '-infinity') < interlock.now() + make_interval(secs => $2 / 2)
)
SELECT id FROM active;

-- name: session_is_busy
-- True if a run is active or a message waits for one. With the session locked, the answer stays true.
SELECT EXISTS (SELECT FROM interlock.run WHERE session_id = $1 AND completed_at IS NULL)
    OR EXISTS (SELECT FROM interlock.message WHERE session_id = $1 AND run_id IS NULL);

-- name: forget_said
DELETE FROM interlock.message
 WHERE (session_id, number) IN (SELECT session_id, number FROM interlock.message WHERE run_id < $1 LIMIT $2)
RETURNING id;

-- name: forget_sessions
-- Skips a session whose row is locked, because a user is sending it a message.
DELETE FROM interlock.session
 WHERE id IN (
   SELECT id FROM interlock.session
    WHERE id < $1
      AND NOT EXISTS (SELECT FROM interlock.message WHERE message.session_id = session.id)
      AND NOT EXISTS (SELECT FROM interlock.run WHERE run.session_id = session.id AND run.id >= $1)
    LIMIT $2 FOR UPDATE SKIP LOCKED
 )
RETURNING id;
