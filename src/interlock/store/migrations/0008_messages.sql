-- Messages: notifications to other systems, written in the same transaction as the change and sent afterwards.
--
-- A statement that opens, changes or decides an approval, or that ends a run, also writes the messages about it: both
-- commit or neither does. `destination` holds the subscribers; for a tenant without one, nothing is written.

-- ---------------------------------------------------------------- destinations

-- A webhook's address is its URL, Slack's is a channel. Removed ones stay, so that their deliveries can be inspected.
-- The signing secret of a webhook is encrypted like those of tools, with a key that is not in the database.
CREATE TABLE interlock.notification_target (
  id             uuid PRIMARY KEY,
  tenant_id      uuid NOT NULL REFERENCES interlock.tenant,
  workspace_id   text,
  channel        text NOT NULL CHECK (channel IN ('slack', 'webhook')),
  address        text NOT NULL,
  events         text[] NOT NULL CHECK (cardinality(events) > 0),
  nonce          bytea CHECK (length(nonce) = 12),
  ciphertext     bytea,
  created_at     timestamptz NOT NULL,
  created_by     text NOT NULL,
  failing_since  timestamptz,
  last_error     text,
  disabled_at    timestamptz,
  removed_at     timestamptz,
  CONSTRAINT notification_target_sealed CHECK ((nonce IS NULL) = (ciphertext IS NULL)),
  CONSTRAINT notification_target_secret CHECK ((ciphertext IS NOT NULL) = (channel = 'webhook')),
  CONSTRAINT notification_target_removed CHECK (removed_at IS NULL OR disabled_at IS NOT NULL)
);
CREATE INDEX notification_target_in_use ON interlock.notification_target (tenant_id) WHERE disabled_at IS NULL;
CREATE UNIQUE INDEX notification_target_slack ON interlock.notification_target (tenant_id) WHERE channel = 'slack' AND disabled_at IS NULL;

-- ---------------------------------------------------------------- messages

-- `message_id` is the same in all attempts. `payload` is the state at that moment; if it is NULL, the subject's own row
-- has it (an ended run does not change any more; a Slack card shows the current state when it is sent). While a message
-- is being sent, `due_at` is when it is tried again if the sender dies. No foreign keys: appends write here.
CREATE TABLE interlock.outbox_message (
  id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  message_id       uuid NOT NULL DEFAULT gen_random_uuid(),
  tenant_id        uuid NOT NULL,
  target_id   uuid NOT NULL,
  channel          text NOT NULL,
  event            text NOT NULL,
  subject_id       uuid NOT NULL,
  payload          jsonb,
  created_at       timestamptz NOT NULL,
  due_at           timestamptz NOT NULL,
  attempts         int NOT NULL DEFAULT 0,
  response_status  int,
  last_error       text,
  done_at          timestamptz,
  failed           boolean NOT NULL DEFAULT false,
  CHECK (NOT failed OR done_at IS NOT NULL)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX outbox_message_due ON interlock.outbox_message (target_id, due_at) WHERE done_at IS NULL;
CREATE INDEX outbox_message_waiting_for_slack ON interlock.outbox_message (subject_id, id) WHERE done_at IS NULL AND channel = 'slack';
CREATE INDEX outbox_message_of_target ON interlock.outbox_message (target_id, id);
CREATE INDEX outbox_message_done ON interlock.outbox_message (done_at) WHERE done_at IS NOT NULL;

-- ---------------------------------------------------------------- Slack

-- The key that a Slack user acts with. Only a link code creates a row: the holder of the key requested the code, and
-- the Slack user sent it back, so one person holds both.
CREATE TABLE interlock.slack_user (
  tenant_id   uuid NOT NULL REFERENCES interlock.tenant,
  team_id     text NOT NULL,
  user_id     text NOT NULL,
  key_id      uuid NOT NULL REFERENCES interlock.api_key,
  created_at  timestamptz NOT NULL,
  PRIMARY KEY (team_id, user_id, tenant_id)
);

-- A code is used once and for ten minutes. Only its hash is stored.
CREATE TABLE interlock.slack_link_code (
  code_hash   bytea PRIMARY KEY,
  key_id      uuid NOT NULL REFERENCES interlock.api_key,
  expires_at  timestamptz NOT NULL
);

-- The tenants whose people may act from a Slack team. A tenant in the team offers it to another tenant, which accepts:
-- both have to agree. A team without an accepted row belongs to tenant `default`, whose operators run the bot.
CREATE TABLE interlock.slack_team (
  team_id      text NOT NULL,
  tenant_id    uuid NOT NULL REFERENCES interlock.tenant,
  offered_by   text NOT NULL,
  offered_at   timestamptz NOT NULL,
  accepted_by  text,
  accepted_at  timestamptz,
  PRIMARY KEY (team_id, tenant_id),
  CHECK ((accepted_by IS NULL) = (accepted_at IS NULL))
);

-- The Slack cards of an approval, for later rewrites. More than one only if a sender died between Slack's answer and
-- our commit; the other card is recorded when a user presses its button.
CREATE TABLE interlock.slack_card (
  approval_id  uuid NOT NULL REFERENCES interlock.approval,
  tenant_id    uuid NOT NULL,
  channel      text NOT NULL,
  ts           text NOT NULL,
  PRIMARY KEY (approval_id, channel, ts)
);
