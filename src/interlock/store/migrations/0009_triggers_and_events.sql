-- Triggers, schedules and events: what starts runs automatically, and the external events that runs wait for.

-- ---------------------------------------------------------------- triggers

-- The workflow that a sender's delivery or a Slack command starts. It acts with the key of the person who applied it.
-- The signing secret is in `secret`, encrypted; this row has its name.
CREATE TABLE interlock.trigger (
  tenant_id     uuid NOT NULL REFERENCES interlock.tenant,
  name          text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_.-]{0,99}$'),
  kind          text NOT NULL CHECK (kind IN ('github', 'webhook', 'slack')),
  command       text,
  key_id        uuid NOT NULL REFERENCES interlock.api_key,
  workspace_id  text,
  workflow      text NOT NULL,
  source        jsonb NOT NULL,
  digest        text NOT NULL,
  created_at    timestamptz NOT NULL,
  updated_at    timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, name),
  CONSTRAINT trigger_command CHECK ((command IS NOT NULL) = (kind = 'slack'))
);
CREATE UNIQUE INDEX trigger_of_command ON interlock.trigger (tenant_id, command) WHERE command IS NOT NULL;

-- ---------------------------------------------------------------- schedules

-- `next_at` is the next slot; it is NULL for a paused schedule, which is therefore in no index that is searched.
CREATE TABLE interlock.schedule (
  tenant_id     uuid NOT NULL REFERENCES interlock.tenant,
  name          text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_.-]{0,99}$'),
  key_id        uuid NOT NULL REFERENCES interlock.api_key,
  workspace_id  text,
  cron          text NOT NULL,
  timezone      text NOT NULL,
  workflow      text NOT NULL,
  input         jsonb NOT NULL,
  missed        text NOT NULL CHECK (missed IN ('skip', 'last', 'all')),
  next_at       timestamptz,
  paused_at     timestamptz,
  paused_why    text,
  last_slot     timestamptz,
  last_run_id   uuid,
  created_at    timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, name),
  CONSTRAINT schedule_paused CHECK ((next_at IS NULL) = (paused_at IS NOT NULL)),
  CONSTRAINT schedule_paused_why CHECK (paused_why IS NULL OR paused_at IS NOT NULL),
  CONSTRAINT schedule_last CHECK ((last_run_id IS NULL) = (last_slot IS NULL))
);
CREATE INDEX schedule_due ON interlock.schedule (next_at) WHERE next_at IS NOT NULL;

-- ---------------------------------------------------------------- events

-- An event is kept until a step waits for it or it expires. Its consumer marks it here in the transaction that delivers
-- it to the step, or that posts it to the inbox of the run's holder: once, and for one step.
CREATE TABLE interlock.external_event (
  tenant_id     uuid NOT NULL REFERENCES interlock.tenant,
  id            text NOT NULL,
  number        bigint GENERATED ALWAYS AS IDENTITY,
  workspace_id  text,
  type          text NOT NULL,
  correlation   text NOT NULL,
  payload       jsonb NOT NULL,
  sent_by       text NOT NULL,
  received_at   timestamptz NOT NULL,
  expires_at    timestamptz NOT NULL CHECK (expires_at > received_at),
  run_id        uuid,
  step          text,
  consumed_at   timestamptz,
  PRIMARY KEY (tenant_id, number),
  -- A sender chooses an event's id. Senders of two workspaces may choose the same id for two events.
  CONSTRAINT external_event_id UNIQUE NULLS NOT DISTINCT (tenant_id, id, workspace_id),
  CONSTRAINT external_event_consumed
    CHECK ((run_id IS NULL) = (consumed_at IS NULL) AND (step IS NULL) = (consumed_at IS NULL))
);
CREATE UNIQUE INDEX external_event_of_step ON interlock.external_event (run_id, step) WHERE run_id IS NOT NULL;
CREATE INDEX external_event_kept ON interlock.external_event (tenant_id, type, correlation, number) WHERE consumed_at IS NULL;
CREATE INDEX external_event_expiry ON interlock.external_event (expires_at);

-- The only row of a waiting step. Both the event and the time-out begin by deleting it: the one that finds the row ends
-- the wait.
CREATE TABLE interlock.event_subscription (
  run_id        uuid NOT NULL,
  step          text NOT NULL,
  number        bigint GENERATED ALWAYS AS IDENTITY,
  tenant_id     uuid NOT NULL,
  workspace_id  text,
  type          text NOT NULL,
  correlation   text NOT NULL,
  timeout_at    timestamptz,
  PRIMARY KEY (run_id, step)
);
CREATE INDEX event_subscription_for ON interlock.event_subscription (tenant_id, type, correlation, number);
CREATE INDEX event_subscription_timeout ON interlock.event_subscription (timeout_at) WHERE timeout_at IS NOT NULL;

