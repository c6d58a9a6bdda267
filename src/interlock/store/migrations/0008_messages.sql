-- Messages: what has to be said to the outside, written with what it speaks of and sent afterwards.
--
-- A statement that opens, changes or decides an approval, or that ends a run, also writes the messages about it: both
-- commit or neither does. Whoever subscribed stands in `destination`; a tenant with nobody there writes nothing.

-- ---------------------------------------------------------------- destinations

-- A webhook's address is its URL, Slack's is a channel. Removed ones stay, so that their deliveries can be looked at.
-- The secret that a webhook is signed with is encrypted like those of tools, with a key that is not in the database.
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

-- `message_id` is the same over all tries. `payload` is what was true at that moment; without one the subject's own row
-- says it (an ended run does not change any more; a Slack card shows what is true when it is sent). While a message is
-- being sent `due_at` is when it may be tried again should the sender die. No foreign keys: appends write here.
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

-- What is told of an approval. It names the session too: whoever follows a conversation knows which one it is about.
-- Called in the RETURNING of the statement that did it. People are few and slow: a wake-up costs nobody anything here.
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

-- That a run has ended, for one run; a worker's append does it for many at once.
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

-- Who a Slack user is to us: one of the tenant's keys, with its role, groups and workspace.
CREATE TABLE slack_user (
  tenant_id   uuid NOT NULL REFERENCES tenant,
  team_id     text NOT NULL,
  user_id     text NOT NULL,
  key_id      uuid NOT NULL REFERENCES api_key,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (team_id, user_id, tenant_id)
);

-- Where an approval's cards are, so that they can be rewritten. More than one only if a sender died between Slack's
-- answer and our commit; the other one is noted when somebody presses its button.
CREATE TABLE slack_card (
  approval_id  uuid NOT NULL REFERENCES approval,
  tenant_id    uuid NOT NULL,
  channel      text NOT NULL,
  ts           text NOT NULL,
  PRIMARY KEY (approval_id, channel, ts)
);
