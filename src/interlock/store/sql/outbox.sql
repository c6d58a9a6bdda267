-- The outbox: messages to other systems, their destinations, and the outcome of their delivery.

-- ---------------------------------------------------------------- sending

-- name: claim_messages
-- At most $2 messages of each destination, so that a slow or dead one does not delay the others; $3 are the messages
-- that this process is sending, $4 the channels that it can send to. Messages about one approval reach Slack in order:
-- a later one waits for the earlier one. If the process dies while sending, the message is due again after $5 seconds.
WITH RECURSIVE waiting AS (
  (SELECT target_id FROM interlock.outbox_message WHERE done_at IS NULL ORDER BY target_id LIMIT 1)
  UNION ALL
  SELECT (SELECT following.target_id FROM interlock.outbox_message AS following
           WHERE following.done_at IS NULL AND following.target_id > waiting.target_id
           ORDER BY following.target_id LIMIT 1)
    FROM waiting
   WHERE waiting.target_id IS NOT NULL
), due AS MATERIALIZED (
  SELECT top.id, d.address, d.nonce, d.ciphertext
    FROM waiting
    JOIN interlock.notification_target AS d ON d.id = waiting.target_id AND d.disabled_at IS NULL
     AND d.channel = ANY($4::text[]) AND d.id <> ALL($3::uuid[])
   CROSS JOIN LATERAL (
     SELECT outbox_message.id FROM interlock.outbox_message
      WHERE outbox_message.target_id = d.id
        AND outbox_message.done_at IS NULL
        AND outbox_message.due_at <= interlock.now()
        AND (outbox_message.channel <> 'slack' OR NOT EXISTS (
          SELECT FROM interlock.outbox_message AS earlier
           WHERE earlier.done_at IS NULL AND earlier.channel = 'slack'
             AND earlier.subject_id = outbox_message.subject_id AND earlier.id < outbox_message.id
        ))
      ORDER BY outbox_message.due_at
      LIMIT $2
        FOR NO KEY UPDATE SKIP LOCKED
   ) AS top
   LIMIT $1
)
UPDATE interlock.outbox_message
   SET attempts = attempts + 1, due_at = interlock.now() + make_interval(secs => $5)
  FROM due
 WHERE outbox_message.id = due.id
RETURNING outbox_message.*, due.address, due.nonce, due.ciphertext, interlock.now() AS now, EXISTS (
  SELECT FROM interlock.outbox_message AS later
   WHERE later.done_at IS NULL AND later.channel = 'slack'
     AND later.subject_id = outbox_message.subject_id AND later.id > outbox_message.id
) AS superseded;

-- name: message_delivered
WITH done AS (
  UPDATE interlock.outbox_message SET done_at = interlock.now(), response_status = $2, last_error = NULL
   WHERE id = $1 AND done_at IS NULL
  RETURNING target_id
)
UPDATE interlock.notification_target SET failing_since = NULL, last_error = NULL
  FROM done
 WHERE notification_target.id = done.target_id AND notification_target.failing_since IS NOT NULL;

-- name: message_not_delivered
-- Retries after $2 seconds, or gives up if that is more than $5 seconds after the message was written.
WITH tried AS (
  UPDATE interlock.outbox_message
     SET due_at = interlock.now() + make_interval(secs => $2),
         last_error = $3,
         response_status = $4,
         done_at = CASE WHEN given_up THEN interlock.now() END,
         failed = given_up
    FROM (SELECT id AS tried_id,
                 interlock.now() + make_interval(secs => $2) > created_at + make_interval(secs => $5) AS given_up
            FROM interlock.outbox_message WHERE id = $1) AS _
   WHERE id = tried_id AND done_at IS NULL
  RETURNING target_id
)
UPDATE interlock.notification_target SET failing_since = coalesce(failing_since, interlock.now()), last_error = $3
  FROM tried
 WHERE notification_target.id = tried.target_id
RETURNING notification_target.id, notification_target.channel, notification_target.failing_since, interlock.now() AS now;

-- name: put_off_messages
-- Not attempted: the destination asked us to wait.
UPDATE interlock.outbox_message SET due_at = interlock.now() + make_interval(secs => $2), attempts = attempts - 1
 WHERE id = ANY($1::bigint[]) AND done_at IS NULL;

-- name: give_up_messages
-- Messages that no process will try again: the destination is disabled, or no process has the settings for it.
UPDATE interlock.outbox_message SET done_at = interlock.now(), failed = true, last_error = coalesce(last_error, 'never sent')
 WHERE done_at IS NULL AND created_at < interlock.now() - make_interval(secs => $1);

-- name: forget_messages
DELETE FROM interlock.outbox_message
 WHERE id IN (
   SELECT id FROM interlock.outbox_message WHERE done_at < interlock.now() - make_interval(secs => $1) LIMIT $2 FOR UPDATE SKIP LOCKED
 );

-- ---------------------------------------------------------------- destinations

-- name: add_destination
INSERT INTO interlock.notification_target (id, tenant_id, workspace_id, channel, address, events, nonce, ciphertext, created_at,
                         created_by)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, interlock.now(), $9)
ON CONFLICT (id) DO UPDATE SET id = excluded.id
RETURNING *;

-- name: list_destinations
SELECT * FROM interlock.notification_target
 WHERE tenant_id = $1 AND channel = $2 AND removed_at IS NULL
   AND ($3::text IS NULL OR workspace_id = $3)
   AND ($4::uuid IS NULL OR id < $4)
 ORDER BY id DESC LIMIT $5;

-- name: get_destination
SELECT * FROM interlock.notification_target
 WHERE tenant_id = $1 AND id = $2 AND removed_at IS NULL AND ($3::text IS NULL OR workspace_id = $3);

-- name: lock_slack_channel
SELECT pg_advisory_xact_lock(hashtextextended($1::uuid::text || 'slack', 7));

-- name: slack_destination
SELECT * FROM interlock.notification_target WHERE tenant_id = $1 AND channel = 'slack' AND disabled_at IS NULL;

-- name: disable_destination
-- Messages that wait for it are never sent.
WITH dropped AS (
  UPDATE interlock.outbox_message SET done_at = interlock.now(), failed = true, last_error = coalesce(last_error, $2)
   WHERE target_id = $1 AND done_at IS NULL
)
UPDATE interlock.notification_target
   SET disabled_at = coalesce(disabled_at, interlock.now()), last_error = coalesce(last_error, $2),
       removed_at = CASE WHEN $3 THEN interlock.now() END
 WHERE id = $1
RETURNING *;

-- name: enable_destination
UPDATE interlock.notification_target SET disabled_at = NULL, failing_since = NULL, last_error = NULL
 WHERE id = $1 AND removed_at IS NULL
RETURNING *;

-- name: add_test_message
-- Only to an enabled destination; no other event is sent to it.
WITH told AS (
  INSERT INTO interlock.outbox_message (tenant_id, target_id, channel, event, subject_id, payload, created_at, due_at)
  SELECT tenant_id, id, channel, 'webhook.test', id, jsonb_build_object('webhook_id', id), interlock.now(),
         interlock.now()
    FROM interlock.notification_target WHERE id = $1 AND disabled_at IS NULL
  RETURNING id, message_id, event, subject_id, created_at, due_at, attempts, response_status, last_error, done_at, failed
)
SELECT told.*, pg_notify('interlock.outbox', '')::text AS announced FROM told;

-- name: list_messages
SELECT id, message_id, event, subject_id, created_at, due_at, attempts, response_status, last_error, done_at, failed
  FROM interlock.outbox_message
 WHERE target_id = $1 AND ($2::bigint IS NULL OR id < $2)
 ORDER BY id DESC LIMIT $3;

-- ---------------------------------------------------------------- reminders and escalation

-- name: approvals_to_mention
SELECT tenant_id, id FROM interlock.approval
 WHERE status = 'requested' AND remind_at IS NOT NULL AND remind_at <= interlock.now()
UNION
SELECT tenant_id, id FROM interlock.approval
 WHERE status = 'requested' AND escalate_at IS NOT NULL AND escalated_at IS NULL AND escalate_at <= interlock.now()
 LIMIT $1;

-- name: remind_approval
-- Once: a reminder that was sent has no due time any more.
UPDATE interlock.approval SET remind_at = NULL WHERE id = $1
RETURNING *, interlock.announce('approval.reminded', approval, interlock.now())::text AS announced;

-- name: escalate_approval
UPDATE interlock.approval SET escalated_at = interlock.now() WHERE id = $1
RETURNING *, interlock.announce('approval.escalated', approval, interlock.now())::text AS announced;

-- ---------------------------------------------------------------- Slack

-- name: approval_by_id
-- For a signed button that names the approval, but not its tenant.
SELECT * FROM interlock.approval WHERE id = $1;

-- name: card_of
SELECT approval.*, run.workflow, run.workspace_id, interlock.now() AS now
  FROM interlock.approval JOIN interlock.run ON run.id = approval.run_id
 WHERE approval.id = $1;

-- name: cards_of
SELECT channel, ts FROM interlock.slack_card WHERE approval_id = $1 ORDER BY ts;

-- name: add_card
INSERT INTO interlock.slack_card (approval_id, tenant_id, channel, ts) VALUES ($1, $2, $3, $4)
ON CONFLICT DO NOTHING;

-- name: refresh_cards
-- Requests another update of the cards: a user saw one that does not show the current state.
WITH told AS (
  INSERT INTO interlock.outbox_message (tenant_id, target_id, channel, event, subject_id, created_at, due_at)
  SELECT tenant_id, id, channel, 'approval.shown', $2, interlock.now(), interlock.now()
    FROM interlock.notification_target
   WHERE tenant_id = $1 AND channel = 'slack' AND disabled_at IS NULL
  RETURNING id
)
SELECT pg_notify('interlock.outbox', '')::text FROM told;
