-- The foundation: tenants and keys, workflows, runs and their journal, the queue, workers, approvals.
--
-- What the states are and which may follow which is rendered from interlock.lifecycle; a test compares the two.
-- Lock order, everywhere: lane, worker, ready, run, approval, entry.

-- ---------------------------------------------------------------- refusals

CREATE FUNCTION refuse_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% cannot go from % to %', TG_TABLE_NAME, OLD.status, NEW.status USING ERRCODE = 'check_violation';
END $$;

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% % has ended and cannot be changed', TG_TABLE_NAME, OLD.id USING ERRCODE = 'check_violation';
END $$;

-- Retention drops whole partitions; nothing else may touch what was written.
CREATE FUNCTION refuse_rewrite() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the journal is append-only: % refused', TG_OP USING ERRCODE = 'check_violation';
END $$;

-- ---------------------------------------------------------------- tenants

CREATE TABLE tenant (
  id          uuid PRIMARY KEY,
  name        text NOT NULL UNIQUE CHECK (name ~ '^[a-z0-9][a-z0-9_.-]{0,99}$'),
  created_at  timestamptz NOT NULL
);

CREATE TABLE api_key (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL REFERENCES tenant,
  workspace_id  text,
  name          text NOT NULL,
  role          text NOT NULL CHECK (role IN ('viewer', 'operator', 'approver', 'admin', 'agent')),
  hash          bytea NOT NULL UNIQUE CHECK (length(hash) = 32),
  created_at    timestamptz NOT NULL,
  revoked_at    timestamptz
);
CREATE INDEX api_key_of_tenant ON api_key (tenant_id, id);

-- One row per tenant: its share of the workers, and its turn. `active` says that it has ready runs; `vtime` is the
-- work it was given divided by its weight, so the least is the next to be served. The row is updated once per batch;
-- half-empty pages keep those updates on the page.
CREATE TABLE lane (
  tenant_id        uuid PRIMARY KEY REFERENCES tenant,
  weight           float8 NOT NULL DEFAULT 1 CHECK (weight > 0 AND weight <= 1000),
  max_concurrency  int CHECK (max_concurrency > 0),
  in_flight        int NOT NULL DEFAULT 0 CHECK (in_flight >= 0),
  vtime            float8 NOT NULL DEFAULT 0,
  active           boolean NOT NULL DEFAULT false,
  full_up          boolean GENERATED ALWAYS AS (in_flight >= coalesce(max_concurrency, 2147483647)) STORED
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_turn ON lane (vtime) WHERE active AND NOT full_up;

-- ---------------------------------------------------------------- workflows

CREATE TABLE workflow (
  tenant_id   uuid NOT NULL REFERENCES tenant,
  name        text NOT NULL,
  version     int NOT NULL CHECK (version > 0),
  digest      text NOT NULL,
  source      jsonb NOT NULL,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, name, version),
  UNIQUE (tenant_id, name, digest)
);

-- ---------------------------------------------------------------- runs

-- The row changes when a run starts, is leased, waits or ends; what happens in between is in the journal. `seq` is
-- the number of its last entry as of the row's last change. No foreign key to tenant: its row lock would make every
-- two starts of a tenant meet.
CREATE TABLE run (
  id                uuid PRIMARY KEY,
  tenant_id         uuid NOT NULL,
  workspace_id      text,
  workflow          text NOT NULL,
  workflow_version  int NOT NULL,
  status            text NOT NULL,
  reason            text,
  input             jsonb,
  result            jsonb,
  error             jsonb,
  trigger           jsonb NOT NULL,
  requested_by      text NOT NULL,
  session_id        uuid,
  job_id            uuid,
  parent_run_id     uuid,
  resumed_from      uuid,
  resume_count      int NOT NULL DEFAULT 0,
  cost_usd          numeric NOT NULL DEFAULT 0,
  seq               int NOT NULL,
  lease_token       bigint NOT NULL DEFAULT 0,
  lease_worker      uuid,
  inbox             int NOT NULL DEFAULT 0 CHECK (inbox >= 0),
  wake_at           timestamptz,
  deadline_at       timestamptz,
  watched_until     timestamptz,
  created_at        timestamptz NOT NULL,
  started_at        timestamptz,
  completed_at      timestamptz,
  duration_ms       bigint GENERATED ALWAYS AS ((extract(epoch FROM completed_at - created_at) * 1000)::bigint) STORED,
  CONSTRAINT run_status CHECK (status IN ('pending', 'running', 'waiting_approval', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled')),
  CONSTRAINT run_completed_at CHECK ((completed_at IS NOT NULL) = (status IN ('succeeded', 'failed', 'canceled'))),
  CONSTRAINT run_reason CHECK ((reason IS NOT NULL) = (status IN ('succeeded', 'failed', 'canceled'))),
  CONSTRAINT run_reason_known CHECK (reason IN ('completed', 'rejected', 'approval_expired', 'policy_denied', 'attempts_exhausted', 'terminal_error', 'timed_out', 'external_timeout', 'orphaned', 'resume_failed', 'cap_exceeded', 'canceled_by_user', 'canceled_by_parent', 'interrupted')),
  CONSTRAINT run_ended_is_free CHECK (completed_at IS NULL OR (lease_worker IS NULL AND wake_at IS NULL)),
  CONSTRAINT run_waiting_is_free CHECK (lease_worker IS NULL OR status IN ('running', 'canceling'))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX run_of_tenant ON run (tenant_id, id);
CREATE INDEX run_by_status ON run (tenant_id, status, id);
CREATE INDEX run_open ON run (status) WHERE completed_at IS NULL;
CREATE INDEX run_leased ON run (lease_worker) WHERE lease_worker IS NOT NULL;
CREATE INDEX run_wakes ON run (wake_at) WHERE wake_at IS NOT NULL;
CREATE INDEX run_deadlines ON run (deadline_at) WHERE deadline_at IS NOT NULL AND completed_at IS NULL;

CREATE TRIGGER run_moves BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND CASE OLD.status
    WHEN 'pending' THEN NEW.status NOT IN ('running', 'waiting_approval', 'waiting_external', 'canceling', 'failed', 'canceled')
    WHEN 'running' THEN NEW.status NOT IN ('waiting_approval', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'waiting_approval' THEN NEW.status NOT IN ('running', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'waiting_external' THEN NEW.status NOT IN ('running', 'waiting_approval', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'canceling' THEN NEW.status NOT IN ('failed', 'canceled')
    ELSE true
    END)
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER run_final BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.status IN ('succeeded', 'failed', 'canceled'))
  EXECUTE FUNCTION refuse_change();

-- The queue: runs that can be claimed now, and nothing else. `fresh` runs were never claimed; `lost` ones had a
-- worker that died.
-- `turn` is the order within a lane: what was begun and can go on comes first, then what is new
-- or has used up its time slice, each in the order it came.
CREATE SEQUENCE ready_turn;
CREATE TABLE ready (
  tenant_id  uuid NOT NULL,
  run_id     uuid NOT NULL,
  turn       bigint NOT NULL DEFAULT nextval('ready_turn'),
  fresh      boolean NOT NULL,
  lost       boolean NOT NULL,
  PRIMARY KEY (tenant_id, run_id)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ready_by_turn ON ready (tenant_id, turn);

-- ---------------------------------------------------------------- the journal

-- Partitioned by the time in the run's id, so that a run's entries lie together and retention drops whole months.
CREATE TABLE entry (
  run_id      uuid NOT NULL,
  seq         int NOT NULL CHECK (seq > 0),
  tenant_id   uuid NOT NULL,
  at          timestamptz NOT NULL,
  type        text NOT NULL,
  step        text,
  from_state  text,
  event       text,
  to_state    text,
  attempt     int,
  token       bigint NOT NULL,
  actor       text NOT NULL,
  data        jsonb,
  output      jsonb,
  PRIMARY KEY (run_id, seq),
  CONSTRAINT entry_transition CHECK (
    CASE
    WHEN event IS NULL THEN from_state IS NULL AND to_state IS NULL
    WHEN to_state IS NULL THEN false
    WHEN from_state IS NULL THEN step IS NULL AND event = 'create' AND to_state = 'pending'
    ELSE CASE WHEN step IS NULL THEN 'run:' ELSE 'step:' END
      || from_state || ':' || event || ':' || to_state = ANY ('{
      run:pending:start:running, run:pending:hold:waiting_approval, run:pending:park:waiting_external,
      run:pending:fail:failed, run:pending:cancel:canceling, run:pending:cancel:canceled,
      run:running:hold:waiting_approval, run:running:park:waiting_external, run:running:succeed:succeeded,
      run:running:fail:failed, run:running:cancel:canceling, run:running:cancel:canceled,
      run:waiting_approval:resume:running, run:waiting_approval:park:waiting_external,
      run:waiting_approval:succeed:succeeded, run:waiting_approval:fail:failed,
      run:waiting_approval:cancel:canceling, run:waiting_approval:cancel:canceled,
      run:waiting_external:resume:running, run:waiting_external:hold:waiting_approval,
      run:waiting_external:succeed:succeeded, run:waiting_external:fail:failed,
      run:waiting_external:cancel:canceling, run:waiting_external:cancel:canceled,
      run:canceling:stopped:canceled, run:canceling:fail:failed, step:pending:claim:running,
      step:pending:open:waiting_approval, step:pending:park:waiting_external, step:pending:skip:skipped,
      step:pending:cancel:canceled, step:running:reclaim:running, step:running:succeed:succeeded,
      step:running:retry:pending, step:running:fail:failed, step:running:hold:waiting_approval,
      step:running:park:waiting_external, step:running:cancel:canceled, step:waiting_approval:release:pending,
      step:waiting_approval:grant:succeeded, step:waiting_approval:refuse:failed,
      step:waiting_approval:refuse:skipped, step:waiting_approval:cancel:canceled,
      step:waiting_external:resume:pending, step:waiting_external:arrive:succeeded,
      step:waiting_external:fail:failed, step:waiting_external:cancel:canceled
    }'::text[]) END)
) PARTITION BY RANGE (run_id);
CREATE TABLE entry_rest PARTITION OF entry DEFAULT;

CREATE TRIGGER entry_append_only BEFORE UPDATE OR DELETE ON entry FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER entry_keep BEFORE TRUNCATE ON entry FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();

-- Words from outside for a run that a worker holds; the holder takes them out and appends what they cause.
CREATE TABLE inbox (
  id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  run_id   uuid NOT NULL,
  command  text NOT NULL,
  step     text,
  actor    text NOT NULL,
  data     jsonb NOT NULL,
  at       timestamptz NOT NULL
);
CREATE INDEX inbox_of_run ON inbox (run_id, id);

-- ---------------------------------------------------------------- workers

CREATE TABLE worker (
  id             uuid PRIMARY KEY,
  name           text NOT NULL,
  host           text NOT NULL,
  pid            int NOT NULL,
  status         text NOT NULL,
  reason         text,
  capacity       int NOT NULL,
  lease_seconds  float8 NOT NULL CHECK (lease_seconds > 0),
  heartbeat_at   timestamptz NOT NULL,
  started_at     timestamptz NOT NULL,
  stopped_at     timestamptz,
  CONSTRAINT worker_status CHECK (status IN ('idle', 'running', 'paused', 'completed', 'failed', 'terminated')),
  CONSTRAINT worker_stopped_at CHECK ((stopped_at IS NOT NULL) = (status IN ('completed', 'failed', 'terminated')))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX worker_live ON worker (id) WHERE stopped_at IS NULL;
CREATE INDEX worker_stopped ON worker (stopped_at) WHERE stopped_at IS NOT NULL;

CREATE TRIGGER worker_moves BEFORE UPDATE ON worker FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND CASE OLD.status
    WHEN 'idle' THEN NEW.status NOT IN ('running', 'terminated')
    WHEN 'running' THEN NEW.status NOT IN ('paused', 'completed', 'failed', 'terminated')
    WHEN 'paused' THEN NEW.status NOT IN ('running', 'terminated')
    ELSE true
    END)
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER worker_final BEFORE UPDATE ON worker FOR EACH ROW
  WHEN (OLD.status IN ('completed', 'failed', 'terminated'))
  EXECUTE FUNCTION refuse_change();

-- ---------------------------------------------------------------- approvals

CREATE TABLE approval (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL,
  run_id        uuid NOT NULL,
  step          text NOT NULL,
  session_id    uuid,
  status        text NOT NULL,
  tier          text NOT NULL CHECK (tier IN ('low', 'med', 'high')),
  two_person    boolean NOT NULL,
  summary       text NOT NULL,
  action        jsonb NOT NULL,
  digest        text NOT NULL,
  requested_by  text NOT NULL,
  requested_at  timestamptz NOT NULL,
  expires_at    timestamptz NOT NULL,
  resolved_at   timestamptz,
  CONSTRAINT approval_status CHECK (status IN ('requested', 'approved', 'rejected', 'expired', 'canceled')),
  CONSTRAINT approval_resolved_at CHECK ((resolved_at IS NOT NULL) = (status IN ('approved', 'rejected', 'expired', 'canceled'))),
  UNIQUE (run_id, step, digest)
);
CREATE INDEX approval_of_tenant ON approval (tenant_id, status, id);
CREATE INDEX approval_expiry ON approval (expires_at) WHERE status = 'requested';

CREATE TRIGGER approval_moves BEFORE UPDATE ON approval FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND CASE OLD.status
    WHEN 'requested' THEN NEW.status NOT IN ('approved', 'rejected', 'expired', 'canceled')
    ELSE true
    END)
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER approval_final BEFORE UPDATE ON approval FOR EACH ROW
  WHEN (OLD.status IN ('approved', 'rejected', 'expired', 'canceled'))
  EXECUTE FUNCTION refuse_change();

-- A person votes once on an approval: two approvers are two people.
CREATE TABLE vote (
  approval_id  uuid NOT NULL REFERENCES approval,
  voter        text NOT NULL,
  decision     text NOT NULL CHECK (decision IN ('approved', 'rejected')),
  reason       text,
  at           timestamptz NOT NULL,
  PRIMARY KEY (approval_id, voter)
);

-- ---------------------------------------------------------------- idempotency

CREATE TABLE idempotency (
  tenant_id        uuid NOT NULL,
  key              text NOT NULL,
  source           text NOT NULL,
  status           text NOT NULL,
  request_hash     bytea NOT NULL,
  response_status  int,
  response_body    bytea,
  run_id           uuid,
  created_at       timestamptz NOT NULL,
  expires_at       timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, key),
  CONSTRAINT idempotency_status CHECK (status IN ('processing', 'failed', 'completed')),
  CONSTRAINT idempotency_response_body CHECK ((response_body IS NOT NULL) = (status IN ('completed')))
);
CREATE INDEX idempotency_expiry ON idempotency (expires_at);

-- ---------------------------------------------------------------- lanes: waking and resting

-- Called by whatever puts a run into `ready`, after it did. The shared lock is taken before the lane is looked at
-- (each statement of this function has its own snapshot): either we see that rest_lane put the lane to rest and wake
-- it again, or rest_lane finds the lock taken and leaves the lane awake. Workers are notified only on the change from
-- resting to active; a worker sleeps only when no lane is active, so that is enough.
CREATE FUNCTION wake_lane(tenant uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant::text, 42));
  UPDATE lane
     SET active = true,
         -- A lane that rested has neither credit nor debt: it joins at the turn of those that are waiting.
         vtime = coalesce((SELECT vtime FROM lane WHERE active AND NOT full_up ORDER BY vtime LIMIT 1), vtime)
   WHERE tenant_id = tenant AND NOT active;
  IF FOUND THEN
    PERFORM pg_notify('interlock_ready', '');
  END IF;
END $$;

-- Called by a claim that found nothing in a lane. Answers whether the lane now rests.
CREATE FUNCTION rest_lane(tenant uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  -- Losing this in a crash only means that the next claim finds the lane empty again.
  PERFORM set_config('synchronous_commit', 'off', true);
  IF NOT pg_try_advisory_xact_lock(hashtextextended(tenant::text, 42)) THEN
    RETURN false;
  END IF;
  UPDATE lane SET active = false
   WHERE tenant_id = tenant AND active AND NOT EXISTS (SELECT FROM ready WHERE ready.tenant_id = tenant);
  RETURN FOUND;
END $$;
