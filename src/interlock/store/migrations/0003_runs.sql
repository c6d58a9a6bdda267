-- Runs: the row and the journal of each run, the commands that reach it from outside and from other runs, and the
-- idempotency records of requests.
--
-- The journal records what happened; the row holds what queries must find without reading the journal. The queue
-- decides the order of runs and which worker may claim one.

-- ---------------------------------------------------------------- run

-- The row changes when a run starts, is leased, waits or ends; the journal has everything in between. `seq` is the
-- number of the last entry as of the row's last change. No foreign key to tenant: its row lock would make every two
-- starts of a tenant collide.
CREATE TABLE interlock.run (
  id                uuid PRIMARY KEY,
  tenant_id         uuid NOT NULL,
  workspace_id      text,
  workflow          text NOT NULL,
  workflow_version  int NOT NULL,
  -- True if that version limits how many of its runs may be in flight.
  has_concurrency_limit boolean NOT NULL DEFAULT false,
  status            interlock.run_state NOT NULL,
  reason            interlock.run_known_reason,
  input             jsonb,
  result            jsonb,
  error             jsonb,
  trigger           jsonb NOT NULL,
  requested_by      text NOT NULL,
  -- The requester decides what is allowed: the role and groups at the time of the request are kept.
  requester         jsonb,
  session_id        uuid,
  -- The number of this run in its session: a session's events are ordered by this number, then by their own.
  session_run       int,
  -- The sender of the message pre-approves actions that need one approver and are not of tier high.
  auto_approve      boolean NOT NULL DEFAULT false,
  job_id            uuid,
  parent_run_id     uuid,
  -- The step of the parent that waits for this run.
  parent_step       text,
  resumed_from      uuid,
  -- The first run in a chain of resumed runs; NULL in that run itself. Idempotency keys of effects are derived from it,
  -- so an effect that a resumed run repeats keeps its key, and the target system can recognize it.
  root_id           uuid,
  resume_count      int NOT NULL DEFAULT 0,
  cost_usd          numeric NOT NULL DEFAULT 0,
  seq               int NOT NULL,
  -- Grows by one with every claim: a writer with a lower token is refused.
  lease_token       bigint NOT NULL DEFAULT 0,
  lease_worker      uuid,
  -- The queue that the run is claimed from: its tenant's, its job's, or that of a worker label.
  queue_id          uuid NOT NULL,
  pending_commands  int NOT NULL DEFAULT 0 CHECK (pending_commands >= 0),
  resume_at         timestamptz,
  -- The flow, with its version, that every worker which loaded the run lacks. A worker that has it wakes the run.
  awaits_flow       text,
  deadline_at       timestamptz,
  watched_until     timestamptz,
  created_at        timestamptz NOT NULL,
  started_at        timestamptz,
  completed_at      timestamptz,
  duration_ms       bigint GENERATED ALWAYS AS ((extract(epoch FROM completed_at - created_at) * 1000)::bigint) STORED,
  CONSTRAINT run_completed_at CHECK (
    CASE WHEN completed_at IS NULL THEN status::interlock.run_without_completed_at
         ELSE status::interlock.run_with_completed_at END IS NOT NULL
  ),
  CONSTRAINT run_reason CHECK (
    CASE WHEN reason IS NULL THEN status::interlock.run_without_reason ELSE status::interlock.run_with_reason END IS NOT NULL
  ),
  CONSTRAINT run_waiting_is_free CHECK (lease_worker IS NULL OR status::interlock.run_leased IS NOT NULL),
  CONSTRAINT run_ended_is_free CHECK (completed_at IS NULL OR (lease_worker IS NULL AND resume_at IS NULL)),
  CONSTRAINT run_awaits_flow CHECK (awaits_flow IS NULL OR status = 'waiting_external'),
  CONSTRAINT run_parent_step CHECK (parent_step IS NULL OR parent_run_id IS NOT NULL),
  CONSTRAINT run_in_session CHECK ((session_id IS NULL) = (session_run IS NULL)),
  CONSTRAINT run_auto_approve CHECK (NOT auto_approve OR session_id IS NOT NULL)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX run_of_tenant ON interlock.run (tenant_id, id);
CREATE INDEX run_by_status ON interlock.run (tenant_id, status, id);
-- Runs of one workflow, newest first, among a million other runs.
CREATE INDEX run_by_workflow ON interlock.run (tenant_id, workflow, id);
-- Runs about one repository, newest first. Only deliveries of a repository's events name one, so the index does not
-- slow down other runs.
CREATE INDEX run_by_repository ON interlock.run (tenant_id, (trigger #>> '{metadata,repository}'), id)
  WHERE trigger #>> '{metadata,repository}' IS NOT NULL;
CREATE INDEX run_open ON interlock.run (status) WHERE completed_at IS NULL;
CREATE INDEX run_leased ON interlock.run (lease_worker) WHERE lease_worker IS NOT NULL;
CREATE INDEX run_limited ON interlock.run (tenant_id, workflow) WHERE has_concurrency_limit AND lease_worker IS NOT NULL;
CREATE INDEX run_resumes ON interlock.run (resume_at) WHERE resume_at IS NOT NULL;
CREATE INDEX run_awaiting ON interlock.run (awaits_flow) WHERE awaits_flow IS NOT NULL;
CREATE INDEX run_deadlines ON interlock.run (deadline_at) WHERE deadline_at IS NOT NULL AND completed_at IS NULL;
CREATE INDEX run_of_parent ON interlock.run (parent_run_id, id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX run_retries ON interlock.run (resumed_from) WHERE resumed_from IS NOT NULL;
CREATE INDEX run_of_job ON interlock.run (job_id, status) WHERE job_id IS NOT NULL;
CREATE UNIQUE INDEX run_of_session ON interlock.run (session_id, session_run) WHERE session_id IS NOT NULL;
CREATE UNIQUE INDEX run_active_in_session ON interlock.run (session_id) WHERE session_id IS NOT NULL AND completed_at IS NULL;

-- ---------------------------------------------------------------- the journal

-- Partitioned by the time in the run's id, so that a run's entries lie together and retention drops whole months.
-- Migrations and sweeps create the months ahead of time; entries without a month go to the default partition.
CREATE TABLE interlock.journal_entry (
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
  -- Compared as an array so that NULLs take part in the comparison.
  CONSTRAINT journal_entry_transition CHECK (
    (CASE WHEN step IS NULL THEN 'run ' ELSE 'step ' END || ARRAY[from_state, event, to_state]::text)::interlock.entry_move
    IS NOT NULL
  )
) PARTITION BY RANGE (run_id);
CREATE TABLE interlock.journal_entry_rest PARTITION OF interlock.journal_entry DEFAULT;

-- ---------------------------------------------------------------- retention

-- Months that retention detached (`detached_at`) and dropped (`dropped_at`), and months that an operator keeps.
-- Retention detaches a month first and drops it after a grace time, so that a mistake can be undone.
CREATE TABLE interlock.journal_month (
  name         text PRIMARY KEY CHECK (name ~ '^journal_entry_\d{6}$'),
  detached_at  timestamptz,
  dropped_at   timestamptz CHECK (dropped_at >= detached_at),
  kept_at      timestamptz CHECK (kept_at IS NULL OR detached_at IS NULL)
);

-- ---------------------------------------------------------------- run commands

-- Commands for a run that a worker holds; the holder removes them and appends the resulting entries.
CREATE TABLE interlock.run_command (
  id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  run_id   uuid NOT NULL,
  command  text NOT NULL,
  step     text,
  actor    text NOT NULL,
  data     jsonb NOT NULL,
  at       timestamptz NOT NULL
);
CREATE INDEX run_command_of_run ON interlock.run_command (run_id, id);

-- Commands from one run to another: written in the transaction that causes them, delivered in a separate one. A run
-- that ends must not lock its parent, nor a parent its children: the two could deadlock.
CREATE TABLE interlock.run_signal (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  from_run   uuid NOT NULL,
  to_run     uuid NOT NULL,
  command    text NOT NULL CHECK (command IN ('child_ended', 'cancel')),
  step       text,
  at         timestamptz NOT NULL,
  CONSTRAINT run_signal_step CHECK ((step IS NOT NULL) = (command = 'child_ended')),
  CONSTRAINT run_signal_to_another CHECK (from_run <> to_run)
);

-- ---------------------------------------------------------------- idempotency

-- A request and its answer. `attempts`, `error` and `lock_expires_at` distinguish a failed request, a request in
-- progress, and a request whose process is gone.
CREATE TABLE interlock.idempotency_record (
  tenant_id        uuid NOT NULL,
  key              text NOT NULL,
  source           text NOT NULL,
  status           interlock.idempotency_state NOT NULL,
  attempts         int NOT NULL DEFAULT 1 CHECK (attempts > 0),
  request_hash     bytea NOT NULL,
  response_status  int,
  response_body    bytea,
  error            text,
  run_id           uuid,
  created_at       timestamptz NOT NULL,
  updated_at       timestamptz NOT NULL DEFAULT now(),
  lock_expires_at  timestamptz,
  expires_at       timestamptz NOT NULL,
  -- An id that must never be used again is remembered for longer than its answer is kept.
  forget_at        timestamptz CHECK (forget_at >= expires_at),
  PRIMARY KEY (tenant_id, key),
  CONSTRAINT idempotency_response_body CHECK (
    CASE WHEN response_body IS NULL THEN status::interlock.idempotency_without_response_body
         ELSE status::interlock.idempotency_with_response_body END IS NOT NULL
  ),
  CONSTRAINT idempotency_error CHECK (
    CASE WHEN error IS NULL THEN status::interlock.idempotency_without_error ELSE status::interlock.idempotency_with_error END IS NOT NULL
  ),
  CONSTRAINT idempotency_lock_expires_at CHECK (
    CASE WHEN lock_expires_at IS NULL THEN status::interlock.idempotency_without_lock_expires_at
         ELSE status::interlock.idempotency_with_lock_expires_at END IS NOT NULL
  )
);
CREATE INDEX idempotency_record_forget ON interlock.idempotency_record (coalesce(forget_at, expires_at));
