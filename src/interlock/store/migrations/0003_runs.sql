-- Runs: the row of each, its journal, the words that reach it from outside and from other runs, and the memory of the
-- requests that asked for it.
--
-- The journal is what happened; the row is what has to be found without reading it. Whose turn a run is, and who may
-- take it, is the queue's.

-- ---------------------------------------------------------------- run

-- The row changes when a run starts, is leased, waits or ends; what happens in between is in the journal. `seq` is
-- the number of its last entry as of the row's last change. No foreign key to tenant: its row lock would make every
-- two starts of a tenant meet.
CREATE TABLE run (
  id                uuid PRIMARY KEY,
  tenant_id         uuid NOT NULL,
  workspace_id      text,
  workflow          text NOT NULL,
  workflow_version  int NOT NULL,
  -- Whether that version has a cap.
  capped            boolean NOT NULL DEFAULT false,
  status            text NOT NULL,
  reason            text,
  input             jsonb,
  result            jsonb,
  error             jsonb,
  trigger           jsonb NOT NULL,
  requested_by      text NOT NULL,
  -- Who asked decides what is allowed: their role and groups at the moment of asking are kept.
  requester         jsonb,
  session_id        uuid,
  -- Which run of its session it is: the events of a session are in the order of this and of their own number.
  session_run       int,
  -- Whoever sent the message lets pass what would ask one person and is not high.
  auto_approve      boolean NOT NULL DEFAULT false,
  job_id            uuid,
  parent_run_id     uuid,
  -- The step of the parent that waits for this run.
  parent_step       text,
  resumed_from      uuid,
  -- The first of the runs that continue each other; NULL in that one itself. The keys of effects are made of it, so
  -- that what a continued run does again has the key that it had before, and the system acted on can tell that it is
  -- the same.
  root_id           uuid,
  resume_count      int NOT NULL DEFAULT 0,
  cost_usd          numeric NOT NULL DEFAULT 0,
  seq               int NOT NULL,
  -- One higher with every claim: whoever still has a lower one is refused.
  lease_token       bigint NOT NULL DEFAULT 0,
  lease_worker      uuid,
  -- The lane that it is claimed from; NULL: its tenant's own.
  side_id           uuid,
  inbox             int NOT NULL DEFAULT 0 CHECK (inbox >= 0),
  wake_at           timestamptz,
  -- The flow, with its version, that no worker which looked at the run has. One that has it wakes the run.
  awaits_flow       text,
  deadline_at       timestamptz,
  watched_until     timestamptz,
  created_at        timestamptz NOT NULL,
  started_at        timestamptz,
  completed_at      timestamptz,
  duration_ms       bigint GENERATED ALWAYS AS ((extract(epoch FROM completed_at - created_at) * 1000)::bigint) STORED,
  CONSTRAINT run_status CHECK (status::run_state IS NOT NULL),
  CONSTRAINT run_completed_at CHECK (
    CASE WHEN completed_at IS NULL THEN status::run_without_completed_at
         ELSE status::run_with_completed_at END IS NOT NULL
  ),
  CONSTRAINT run_reason CHECK (
    CASE WHEN reason IS NULL THEN status::run_without_reason ELSE status::run_with_reason END IS NOT NULL
  ),
  CONSTRAINT run_reason_known CHECK (reason IS NULL OR reason::run_known_reason IS NOT NULL),
  CONSTRAINT run_waiting_is_free CHECK (lease_worker IS NULL OR status::run_leased IS NOT NULL),
  CONSTRAINT run_ended_is_free CHECK (completed_at IS NULL OR (lease_worker IS NULL AND wake_at IS NULL)),
  CONSTRAINT run_awaits_flow CHECK (awaits_flow IS NULL OR status = 'waiting_external'),
  CONSTRAINT run_parent_step CHECK (parent_step IS NULL OR parent_run_id IS NOT NULL),
  CONSTRAINT run_in_session CHECK ((session_id IS NULL) = (session_run IS NULL)),
  CONSTRAINT run_auto_approve CHECK (NOT auto_approve OR session_id IS NOT NULL)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX run_of_tenant ON run (tenant_id, id);
CREATE INDEX run_by_status ON run (tenant_id, status, id);
-- Runs of one workflow, newest first, among a million of others.
CREATE INDEX run_by_workflow ON run (tenant_id, workflow, id);
CREATE INDEX run_open ON run (status) WHERE completed_at IS NULL;
CREATE INDEX run_leased ON run (lease_worker) WHERE lease_worker IS NOT NULL;
CREATE INDEX run_capped ON run (tenant_id, workflow) WHERE capped AND lease_worker IS NOT NULL;
CREATE INDEX run_wakes ON run (wake_at) WHERE wake_at IS NOT NULL;
CREATE INDEX run_awaiting ON run (awaits_flow) WHERE awaits_flow IS NOT NULL;
CREATE INDEX run_deadlines ON run (deadline_at) WHERE deadline_at IS NOT NULL AND completed_at IS NULL;
CREATE INDEX run_of_parent ON run (parent_run_id, id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX run_of_job ON run (job_id, status) WHERE job_id IS NOT NULL;
CREATE UNIQUE INDEX run_of_session ON run (session_id, session_run) WHERE session_id IS NOT NULL;
CREATE UNIQUE INDEX run_active_in_session ON run (session_id) WHERE session_id IS NOT NULL AND completed_at IS NULL;

CREATE TRIGGER run_moves BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT run_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER run_final BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.completed_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();

-- Who asked for what a run does: whoever started it, the runs that it continues, and those that started any of these
-- for a step of theirs; not only who started it last.
CREATE FUNCTION askers_of(asked uuid) RETURNS text[] LANGUAGE sql STABLE AS $$
  WITH RECURSIVE behind AS (
    SELECT id, requested_by, resumed_from, parent_run_id FROM run WHERE id = asked
    UNION
    SELECT run.id, run.requested_by, run.resumed_from, run.parent_run_id
      FROM behind JOIN run ON run.id = ANY(ARRAY[behind.resumed_from, behind.parent_run_id])
  )
  SELECT array_agg(DISTINCT requested_by) FROM behind
$$;

-- ---------------------------------------------------------------- the journal

-- Partitioned by the time in the run's id, so that a run's entries lie together and retention drops whole months. The
-- months are made ahead of time, by migrating and by sweeps; what has none lands in the rest.
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
  -- As an array, because then a NULL is a word like others.
  CONSTRAINT entry_transition CHECK (
    (CASE WHEN step IS NULL THEN 'run ' ELSE 'step ' END || ARRAY[from_state, event, to_state]::text)::entry_move
    IS NOT NULL
  )
) PARTITION BY RANGE (run_id);
CREATE TABLE entry_rest PARTITION OF entry DEFAULT;

CREATE TRIGGER entry_append_only BEFORE UPDATE OR DELETE ON entry FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
-- TRUNCATE of a partition asks its own triggers and not the journal's: each gets one when it is made.
CREATE TRIGGER entry_keep BEFORE TRUNCATE ON entry FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER entry_keep BEFORE TRUNCATE ON entry_rest FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();

-- ---------------------------------------------------------------- words

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

-- What one run has to tell another: written in the transaction that it tells of, delivered in one of its own. A run
-- that ends must not lock its parent, nor a parent its children: they would meet half-way.
CREATE TABLE errand (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  from_run   uuid NOT NULL,
  to_run     uuid NOT NULL,
  command    text NOT NULL CHECK (command IN ('child_ended', 'cancel')),
  step       text,
  at         timestamptz NOT NULL,
  CONSTRAINT errand_step CHECK ((step IS NOT NULL) = (command = 'child_ended')),
  CONSTRAINT errand_to_another CHECK (from_run <> to_run)
);

-- ---------------------------------------------------------------- idempotency

-- A request that was made, and its answer. `attempts`, `error` and `lock_expires_at` tell one that failed from one that
-- is under way, and that from one whose process is gone.
CREATE TABLE idempotency (
  tenant_id        uuid NOT NULL,
  key              text NOT NULL,
  source           text NOT NULL,
  status           text NOT NULL,
  attempts         int NOT NULL DEFAULT 1 CHECK (attempts > 0),
  request_hash     bytea NOT NULL,
  response_status  int,
  response_body    bytea,
  error            text,
  run_id           uuid,
  created_at       timestamptz NOT NULL,
  lock_expires_at  timestamptz,
  expires_at       timestamptz NOT NULL,
  -- An id that nobody may use again is remembered for longer than its answer is kept.
  forget_at        timestamptz CHECK (forget_at >= expires_at),
  PRIMARY KEY (tenant_id, key),
  CONSTRAINT idempotency_status CHECK (status::idempotency_state IS NOT NULL),
  CONSTRAINT idempotency_response_body CHECK (
    CASE WHEN response_body IS NULL THEN status::idempotency_without_response_body
         ELSE status::idempotency_with_response_body END IS NOT NULL
  ),
  CONSTRAINT idempotency_error CHECK (
    CASE WHEN error IS NULL THEN status::idempotency_without_error ELSE status::idempotency_with_error END IS NOT NULL
  ),
  CONSTRAINT idempotency_lock_expires_at CHECK (
    CASE WHEN lock_expires_at IS NULL THEN status::idempotency_without_lock_expires_at
         ELSE status::idempotency_with_lock_expires_at END IS NOT NULL
  )
);
CREATE INDEX idempotency_forget ON idempotency (coalesce(forget_at, expires_at));
