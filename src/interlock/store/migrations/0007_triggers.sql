-- Triggers and schedules: what starts runs without anybody asking for each. And the idempotency record grows what it
-- needs to tell a delivery that failed from one that is under way.

-- ---------------------------------------------------------------- idempotency

ALTER TABLE idempotency
  ADD COLUMN attempts         int NOT NULL DEFAULT 1 CHECK (attempts > 0),
  ADD COLUMN error            text,
  ADD COLUMN lock_expires_at  timestamptz,
  -- An id that nobody may use again is remembered for longer than its answer is kept.
  ADD COLUMN forget_at        timestamptz CHECK (forget_at >= expires_at);

-- A row that is `processing` and can be seen was left by a process that is gone: nobody knows when it began.
UPDATE idempotency SET lock_expires_at = created_at WHERE status = 'processing';
UPDATE idempotency SET error = 'unknown' WHERE status = 'failed';

ALTER TABLE idempotency
  ADD CONSTRAINT idempotency_error CHECK ((error IS NOT NULL) = (status IN ('failed'))),
  ADD CONSTRAINT idempotency_lock_expires_at CHECK ((lock_expires_at IS NOT NULL) = (status IN ('processing')));

DROP INDEX idempotency_expiry;
CREATE INDEX idempotency_forget ON idempotency (coalesce(forget_at, expires_at));

-- ---------------------------------------------------------------- triggers

-- What a sender's delivery or a Slack command starts. It acts with the key of whoever applied it. Its signing secret is
-- in `secret`, encrypted; here stands its name.
CREATE TABLE trigger (
  tenant_id     uuid NOT NULL REFERENCES tenant,
  name          text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_.-]{0,99}$'),
  kind          text NOT NULL CHECK (kind IN ('github', 'webhook', 'slack')),
  command       text,
  key_id        uuid NOT NULL REFERENCES api_key,
  workspace_id  text,
  workflow      text NOT NULL,
  source        jsonb NOT NULL,
  digest        text NOT NULL,
  created_at    timestamptz NOT NULL,
  updated_at    timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, name),
  CONSTRAINT trigger_command CHECK ((command IS NOT NULL) = (kind = 'slack'))
);
CREATE UNIQUE INDEX trigger_of_command ON trigger (tenant_id, command) WHERE command IS NOT NULL;

-- ---------------------------------------------------------------- schedules

-- `next_at` is the slot that comes next; a schedule that is paused has none, and stands in no index that is looked at.
CREATE TABLE schedule (
  tenant_id     uuid NOT NULL REFERENCES tenant,
  name          text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_.-]{0,99}$'),
  key_id        uuid NOT NULL REFERENCES api_key,
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
CREATE INDEX schedule_due ON schedule (next_at) WHERE next_at IS NOT NULL;
