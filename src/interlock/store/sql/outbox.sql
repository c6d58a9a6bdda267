-- The outbox: messages to other systems, their destinations, and the outcome of their delivery.

-- ---------------------------------------------------------------- sending

-- name: claim_messages
-- At most $3 messages of each destination, so that a slow or dead one does not delay the others; $4 are the messages
-- that this process is sending, $5 the channels that it can send to. Messages about one approval reach Slack in order:
-- a later one waits for the earlier one. If the process dies while sending, the message is due again after $6 seconds.
WITH RECURSIVE waiting AS (
  (SELECT destination_id FROM outbox WHERE done_at IS NULL ORDER BY destination_id LIMIT 1)
  UNION ALL
  SELECT (SELECT following.destination_id FROM outbox AS following
           WHERE following.done_at IS NULL AND following.destination_id > waiting.destination_id
           ORDER BY following.destination_id LIMIT 1)
    FROM waiting
   WHERE waiting.destination_id IS NOT NULL
), due AS MATERIALIZED (
  SELECT top.id, d.address, d.nonce, d.ciphertext
    FROM waiting
    JOIN destination AS d ON d.id = waiting.destination_id AND d.disabled_at IS NULL
     AND d.channel = ANY($5::text[]) AND d.id <> ALL($4::uuid[])
   CROSS JOIN LATERAL (
     SELECT outbox.id FROM outbox
      WHERE outbox.destination_id = d.id
        AND outbox.done_at IS NULL
        AND outbox.due_at <= coalesce($1, now())
        AND (outbox.channel <> 'slack' OR NOT EXISTS (
          SELECT FROM outbox AS earlier
           WHERE earlier.done_at IS NULL AND earlier.channel = 'slack'
             AND earlier.subject_id = outbox.subject_id AND earlier.id < outbox.id
        ))
      ORDER BY outbox.due_at
      LIMIT $3
        FOR NO KEY UPDATE SKIP LOCKED
   ) AS top
   LIMIT $2
)
UPDATE outbox
   SET attempts = attempts + 1, due_at = coalesce($1, now()) + make_interval(secs => $6)
  FROM due
 WHERE outbox.id = due.id
RETURNING outbox.*, due.address, due.nonce, due.ciphertext, coalesce($1, now()) AS now, EXISTS (
  SELECT FROM outbox AS later
   WHERE later.done_at IS NULL AND later.channel = 'slack'
     AND later.subject_id = outbox.subject_id AND later.id > outbox.id
) AS superseded;

-- name: message_delivered
WITH done AS (
  UPDATE outbox SET done_at = coalesce($1, now()), response_status = $3, last_error = NULL
   WHERE id = $2 AND done_at IS NULL
  RETURNING destination_id
)
UPDATE destination SET failing_since = NULL, last_error = NULL
  FROM done
 WHERE destination.id = done.destination_id AND destination.failing_since IS NOT NULL;

-- name: message_not_delivered
-- Retries after $3 seconds, or gives up if that is more than $6 seconds after the message was written.
WITH tried AS (
  UPDATE outbox
     SET due_at = coalesce($1, now()) + make_interval(secs => $3),
         last_error = $4,
         response_status = $5,
         done_at = CASE WHEN given_up THEN coalesce($1, now()) END,
         failed = given_up
    FROM (SELECT id AS tried_id,
                 coalesce($1, now()) + make_interval(secs => $3) > created_at + make_interval(secs => $6) AS given_up
            FROM outbox WHERE id = $2) AS _
   WHERE id = tried_id AND done_at IS NULL
  RETURNING destination_id
)
UPDATE destination SET failing_since = coalesce(failing_since, $1, now()), last_error = $4
  FROM tried
 WHERE destination.id = tried.destination_id
RETURNING destination.id, destination.channel, destination.failing_since, coalesce($1, now()) AS now;

-- name: put_off_messages
-- Not attempted: the destination asked us to wait.
UPDATE outbox SET due_at = coalesce($1, now()) + make_interval(secs => $3), attempts = attempts - 1
 WHERE id = ANY($2::bigint[]) AND done_at IS NULL;

-- name: give_up_messages
-- Messages that no process will try again: the destination is disabled, or no process has the settings for it.
UPDATE outbox SET done_at = coalesce($1, now()), failed = true, last_error = coalesce(last_error, 'never sent')
 WHERE done_at IS NULL AND created_at < coalesce($1, now()) - make_interval(secs => $2);

-- name: forget_messages
DELETE FROM outbox
 WHERE id IN (
   SELECT id FROM outbox WHERE done_at < coalesce($1, now()) - make_interval(secs => $2) LIMIT $3 FOR UPDATE SKIP LOCKED
 );

-- ---------------------------------------------------------------- destinations

-- name: add_destination
INSERT INTO destination (id, tenant_id, workspace_id, channel, address, events, nonce, ciphertext, created_at,
                         created_by)
VALUES ($2, $3, $4, $5, $6, $7, $8, $9, coalesce($1, now()), $10)
ON CONFLICT (id) DO UPDATE SET id = excluded.id
RETURNING *;

-- name: list_destinations
SELECT * FROM destination
 WHERE tenant_id = $1 AND channel = $2 AND removed_at IS NULL
   AND ($3::text IS NULL OR workspace_id = $3)
   AND ($4::uuid IS NULL OR id < $4)
 ORDER BY id DESC LIMIT $5;

-- name: get_destination
SELECT * FROM destination
 WHERE tenant_id = $1 AND id = $2 AND removed_at IS NULL AND ($3::text IS NULL OR workspace_id = $3);

-- name: lock_slack_channel
SELECT pg_advisory_xact_lock(hashtextextended($1::uuid::text || 'slack', 7));

-- name: slack_destination
SELECT * FROM destination WHERE tenant_id = $1 AND channel = 'slack' AND disabled_at IS NULL;

-- name: disable_destination
-- Messages that wait for it are never sent.
WITH dropped AS (
  UPDATE outbox SET done_at = coalesce($1, now()), failed = true, last_error = coalesce(last_error, $3)
   WHERE destination_id = $2 AND done_at IS NULL
)
UPDATE destination
   SET disabled_at = coalesce(disabled_at, $1, now()), last_error = coalesce(last_error, $3),
       removed_at = CASE WHEN $4 THEN coalesce($1, now()) END
 WHERE id = $2
RETURNING *;

-- name: enable_destination
UPDATE destination SET disabled_at = NULL, failing_since = NULL, last_error = NULL
 WHERE id = $1 AND removed_at IS NULL
RETURNING *;

-- name: add_test_message
-- Only to an enabled destination; no other event is sent to it.
WITH told AS (
  INSERT INTO outbox (tenant_id, destination_id, channel, event, subject_id, payload, created_at, due_at)
  SELECT tenant_id, id, channel, 'webhook.test', id, jsonb_build_object('webhook_id', id), coalesce($1, now()),
         coalesce($1, now())
    FROM destination WHERE id = $2 AND disabled_at IS NULL
  RETURNING id, message_id, event, subject_id, created_at, due_at, attempts, response_status, last_error, done_at, failed
)
SELECT told.*, pg_notify('interlock_outbox', '')::text AS announced FROM told;

-- name: list_messages
SELECT id, message_id, event, subject_id, created_at, due_at, attempts, response_status, last_error, done_at, failed
  FROM outbox
 WHERE destination_id = $1 AND ($2::bigint IS NULL OR id < $2)
 ORDER BY id DESC LIMIT $3;

-- ---------------------------------------------------------------- reminders and escalation

-- name: approvals_to_mention
SELECT tenant_id, id FROM approval
 WHERE status = 'requested' AND remind_at IS NOT NULL AND remind_at <= coalesce($1, now())
UNION
SELECT tenant_id, id FROM approval
 WHERE status = 'requested' AND escalate_at IS NOT NULL AND escalated_at IS NULL AND escalate_at <= coalesce($1, now())
 LIMIT $2;

-- name: remind_approval
-- Once: a reminder that was sent has no due time any more.
UPDATE approval SET remind_at = NULL WHERE id = $2
RETURNING *, announce('approval.reminded', approval, coalesce($1, now()))::text AS announced;

-- name: escalate_approval
UPDATE approval SET escalated_at = coalesce($1, now()) WHERE id = $2
RETURNING *, announce('approval.escalated', approval, coalesce($1, now()))::text AS announced;

-- ---------------------------------------------------------------- Slack

-- name: approval_by_id
-- For a signed button that names the approval, but not its tenant.
SELECT * FROM approval WHERE id = $1;

-- name: card_of
SELECT approval.*, run.workflow, run.workspace_id, coalesce($1, now()) AS now
  FROM approval JOIN run ON run.id = approval.run_id
 WHERE approval.id = $2;

-- name: cards_of
SELECT channel, ts FROM slack_card WHERE approval_id = $1 ORDER BY ts;

-- name: add_card
INSERT INTO slack_card (approval_id, tenant_id, channel, ts) VALUES ($1, $2, $3, $4)
ON CONFLICT DO NOTHING;

-- name: refresh_cards
-- Requests another update of the cards: a user saw one that does not show the current state.
WITH told AS (
  INSERT INTO outbox (tenant_id, destination_id, channel, event, subject_id, created_at, due_at)
  SELECT tenant_id, id, channel, 'approval.shown', $3, coalesce($1, now()), coalesce($1, now())
    FROM destination
   WHERE tenant_id = $2 AND channel = 'slack' AND disabled_at IS NULL
  RETURNING id
)
SELECT pg_notify('interlock_outbox', '')::text FROM told;
