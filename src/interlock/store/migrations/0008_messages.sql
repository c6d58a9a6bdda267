-- Messages: notifications to other systems, written in the same transaction as the change and sent afterwards.
--
-- A statement that opens, changes or decides an approval, or that ends a run, also writes the messages about it: both
-- commit or neither does. `destination` holds the subscribers; for a tenant without one, nothing is written.

-- ---------------------------------------------------------------- destinations

-- A webhook's address is its URL, Slack's is a channel. Removed ones stay, so that their deliveries can be inspected.
-- The signing secret of a webhook is encrypted like those of tools, with a key that is not in the database.
CREATE TABLE destination (
  id             uuid PRIMARY KEY,
  tenant_id      uuid NOT NULL REFERENCES tenant,
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
  CONSTRAINT destination_sealed CHECK ((nonce IS NULL) = (ciphertext IS NULL)),
  CONSTRAINT destination_secret CHECK ((ciphertext IS NOT NULL) = (channel = 'webhook')),
  CONSTRAINT destination_removed CHECK (removed_at IS NULL OR disabled_at IS NOT NULL)
);
CREATE INDEX destination_in_use ON destination (tenant_id) WHERE disabled_at IS NULL;
CREATE UNIQUE INDEX destination_slack ON destination (tenant_id) WHERE channel = 'slack' AND disabled_at IS NULL;

-- ---------------------------------------------------------------- messages

-- `message_id` is the same in all attempts. `payload` is the state at that moment; if it is NULL, the subject's own row
-- has it (an ended run does not change any more; a Slack card shows the current state when it is sent). While a message
-- is being sent, `due_at` is when it is tried again if the sender dies. No foreign keys: appends write here.
CREATE TABLE outbox (
  id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  message_id       uuid NOT NULL DEFAULT gen_random_uuid(),
  tenant_id        uuid NOT NULL,
  destination_id   uuid NOT NULL,
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
CREATE INDEX outbox_due ON outbox (destination_id, due_at) WHERE done_at IS NULL;
CREATE INDEX outbox_waiting_for_slack ON outbox (subject_id, id) WHERE done_at IS NULL AND channel = 'slack';
CREATE INDEX outbox_of_destination ON outbox (destination_id, id);
CREATE INDEX outbox_done ON outbox (done_at) WHERE done_at IS NOT NULL;

-- Writes the message about an approval. It names the session too, so that a client which follows a conversation can
-- match it. Called in the RETURNING of the statement that changed it. People act rarely, so the wake-up is cheap.
CREATE FUNCTION announce(news text, about approval, moment timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO outbox (tenant_id, destination_id, channel, event, subject_id, payload, created_at, due_at)
  SELECT about.tenant_id, d.id, d.channel, news, about.id,
         CASE WHEN d.channel = 'webhook' THEN jsonb_build_object(
           'approval_id', about.id, 'run_id', about.run_id, 'session_id', about.session_id, 'step_key', about.step,
           'kind', about.kind, 'status', about.status, 'tier', about.tier, 'two_person', about.two_person,
           'digest', about.digest, 'rule_ids', about.rule_ids, 'requested_at', about.requested_at,
           'expires_at', about.expires_at, 'escalated_at', about.escalated_at, 'resolved_at', about.resolved_at
         ) END,
         moment, moment
    FROM destination AS d
   WHERE d.tenant_id = about.tenant_id
     AND d.disabled_at IS NULL
     AND news = ANY(d.events)
     AND (d.workspace_id IS NULL OR d.workspace_id = (SELECT run.workspace_id FROM run WHERE run.id = about.run_id));
  IF FOUND THEN
    PERFORM pg_notify('interlock_outbox', '');
  END IF;
END $$;

-- Writes the message that one run has ended; a worker's append does it for many at once.
CREATE FUNCTION announce_end(ended run) RETURNS void LANGUAGE sql AS $$
  INSERT INTO outbox (tenant_id, destination_id, channel, event, subject_id, created_at, due_at)
  SELECT ended.tenant_id, d.id, d.channel, 'run.completed', ended.id, ended.completed_at, ended.completed_at
    FROM destination AS d
   WHERE d.tenant_id = ended.tenant_id
     AND d.disabled_at IS NULL
     AND 'run.completed' = ANY(d.events)
     AND (d.workspace_id IS NULL OR d.workspace_id = ended.workspace_id)
$$;

-- ---------------------------------------------------------------- Slack

-- The key that a Slack user acts with. Only a link code creates a row: the holder of the key requested the code, and
-- the Slack user sent it back, so one person holds both.
CREATE TABLE slack_user (
  tenant_id   uuid NOT NULL REFERENCES tenant,
  team_id     text NOT NULL,
  user_id     text NOT NULL,
  key_id      uuid NOT NULL REFERENCES api_key,
  created_at  timestamptz NOT NULL,
  PRIMARY KEY (team_id, user_id, tenant_id)
);

-- A code is used once and for ten minutes. Only its hash is stored.
CREATE TABLE slack_link_code (
  code_hash   bytea PRIMARY KEY,
  key_id      uuid NOT NULL REFERENCES api_key,
  expires_at  timestamptz NOT NULL
);

-- The tenants whose people may act from a Slack team. A tenant in the team offers it to another tenant, which accepts:
-- both have to agree. A team without an accepted row belongs to tenant `default`, whose operators run the bot.
CREATE TABLE slack_team (
  team_id      text NOT NULL,
  tenant_id    uuid NOT NULL REFERENCES tenant,
  offered_by   text NOT NULL,
  offered_at   timestamptz NOT NULL,
  accepted_by  text,
  accepted_at  timestamptz,
  PRIMARY KEY (team_id, tenant_id),
  CHECK ((accepted_by IS NULL) = (accepted_at IS NULL))
);

CREATE FUNCTION is_in_slack_team(tenant uuid, team text) RETURNS boolean LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM slack_team WHERE team_id = team AND tenant_id = tenant AND accepted_at IS NOT NULL)
      OR NOT EXISTS (SELECT FROM slack_team WHERE team_id = team AND accepted_at IS NOT NULL)
         AND EXISTS (SELECT FROM tenant AS t WHERE t.id = tenant AND t.name = 'default')
$$;

-- The Slack cards of an approval, for later rewrites. More than one only if a sender died between Slack's answer and
-- our commit; the other card is recorded when a user presses its button.
CREATE TABLE slack_card (
  approval_id  uuid NOT NULL REFERENCES approval,
  tenant_id    uuid NOT NULL,
  channel      text NOT NULL,
  ts           text NOT NULL,
  PRIMARY KEY (approval_id, channel, ts)
);
