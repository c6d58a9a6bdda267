-- Runs: the row and the journal of each run, the commands that reach it from outside and from other runs, and the
-- idempotency records of requests.
--
-- The journal records what happened; the row holds what queries must find without reading the journal. The queue
-- decides the order of runs and which worker may claim one.

-- ---------------------------------------------------------------- run

-- The row changes when a run starts, is leased, waits or ends; the journal has everything in between. `seq` is the
-- number of the last entry as of the row's last change. No foreign key to tenant: its row lock would make every two
-- starts of a tenant collide.
CREATE TABLE run (
  id                uuid PRIMARY KEY,
  tenant_id         uuid NOT NULL,
  workspace_id      text,
  workflow          text NOT NULL,
  workflow_version  int NOT NULL,
  -- True if that version has a cap.
  capped            boolean NOT NULL DEFAULT false,
  status            text NOT NULL,
  reason            text,
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
  -- The lane that the run is claimed from; NULL: the tenant's own lane.
  side_id           uuid,
  inbox             int NOT NULL DEFAULT 0 CHECK (inbox >= 0),
  wake_at           timestamptz,
  -- The flow, with its version, that every worker which loaded the run lacks. A worker that has it wakes the run.
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
-- Runs of one workflow, newest first, among a million other runs.
CREATE INDEX run_by_workflow ON run (tenant_id, workflow, id);
-- Runs about one repository, newest first. Only deliveries of a repository's events name one, so the index does not
-- slow down other runs.
CREATE INDEX run_by_repository ON run (tenant_id, (trigger #>> '{metadata,repository}'), id)
  WHERE trigger #>> '{metadata,repository}' IS NOT NULL;
CREATE INDEX run_open ON run (status) WHERE completed_at IS NULL;
CREATE INDEX run_leased ON run (lease_worker) WHERE lease_worker IS NOT NULL;
CREATE INDEX run_capped ON run (tenant_id, workflow) WHERE capped AND lease_worker IS NOT NULL;
CREATE INDEX run_wakes ON run (wake_at) WHERE wake_at IS NOT NULL;
CREATE INDEX run_awaiting ON run (awaits_flow) WHERE awaits_flow IS NOT NULL;
CREATE INDEX run_deadlines ON run (deadline_at) WHERE deadline_at IS NOT NULL AND completed_at IS NULL;
CREATE INDEX run_of_parent ON run (parent_run_id, id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX run_retries ON run (resumed_from) WHERE resumed_from IS NOT NULL;
CREATE INDEX run_of_job ON run (job_id, status) WHERE job_id IS NOT NULL;
CREATE UNIQUE INDEX run_of_session ON run (session_id, session_run) WHERE session_id IS NOT NULL;
CREATE UNIQUE INDEX run_active_in_session ON run (session_id) WHERE session_id IS NOT NULL AND completed_at IS NULL;

CREATE TRIGGER run_moves BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT run_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER run_final BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.completed_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();
-- Without its row, a run could not be found any more, although its journal exists.
CREATE TRIGGER run_stays BEFORE DELETE ON run FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER run_keep BEFORE TRUNCATE ON run FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();

-- Everyone who requested what a run does: the requesters of the run itself, of the runs that it continues, and of the
-- runs whose steps started any of these; not only the last requester.
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

-- Partitioned by the time in the run's id, so that a run's entries lie together and retention drops whole months.
-- Migrations and sweeps create the months ahead of time; entries without a month go to the default partition.
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
  -- Compared as an array so that NULLs take part in the comparison.
  CONSTRAINT entry_transition CHECK (
    (CASE WHEN step IS NULL THEN 'run ' ELSE 'step ' END || ARRAY[from_state, event, to_state]::text)::entry_move
    IS NOT NULL
  )
) PARTITION BY RANGE (run_id);
CREATE TABLE entry_rest PARTITION OF entry DEFAULT;

CREATE TRIGGER entry_append_only BEFORE UPDATE OR DELETE ON entry FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
-- TRUNCATE of a partition fires the partition's triggers and not the journal's: each partition gets one when created.
CREATE TRIGGER entry_keep BEFORE TRUNCATE ON entry FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER entry_keep BEFORE TRUNCATE ON entry_rest FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();

-- ---------------------------------------------------------------- retention

-- Months that retention detached (`detached_at`) and dropped (`dropped_at`), and months that an operator keeps.
-- Retention detaches a month first and drops it after a grace time, so that a mistake can be undone.
CREATE TABLE journal_month (
  name         text PRIMARY KEY CHECK (name ~ '^entry_\d{6}$'),
  detached_at  timestamptz,
  dropped_at   timestamptz CHECK (dropped_at >= detached_at),
  kept_at      timestamptz CHECK (kept_at IS NULL OR detached_at IS NULL)
);

CREATE FUNCTION month_end(month text) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
  SELECT (make_date(substr(month, 7, 4)::int, substr(month, 11, 2)::int, 1) + interval '1 month') AT TIME ZONE 'UTC'
$$;

CREATE FUNCTION is_journal_month(month text) RETURNS boolean LANGUAGE sql STABLE AS $$
  SELECT month ~ '^entry_\d{6}$'
         AND EXISTS (SELECT FROM pg_inherits WHERE inhparent = 'entry'::regclass AND inhrelid = to_regclass(month))
$$;

-- The three functions below use only the server's clock: a caller with a wrong clock or a stale result can destroy
-- nothing. They return whether they did it.
CREATE FUNCTION detach_month(month text, keep_days int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('journal_month', 42));
  IF NOT is_journal_month(month) THEN
    RETURN false;
  END IF;
  IF month_end(month) > now() - make_interval(days => keep_days)
     OR EXISTS (SELECT FROM journal_month WHERE name = month AND kept_at IS NOT NULL) THEN
    RETURN false;
  END IF;
  EXECUTE format('ALTER TABLE entry DETACH PARTITION %I', month);
  EXECUTE format('CREATE TRIGGER entry_detached BEFORE INSERT OR UPDATE OR DELETE ON %I FOR EACH ROW'
                 ' EXECUTE FUNCTION refuse_rewrite()', month);
  INSERT INTO journal_month (name, detached_at) VALUES (month, now())
  ON CONFLICT (name) DO UPDATE SET detached_at = now(), dropped_at = NULL;
  RETURN true;
END $$;

CREATE FUNCTION drop_month(month text, grace_days int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('journal_month', 42));
  UPDATE journal_month SET dropped_at = now()
   WHERE name = month AND dropped_at IS NULL AND detached_at <= now() - make_interval(days => grace_days);
  IF NOT FOUND OR is_journal_month(month) THEN
    RETURN false;
  END IF;
  EXECUTE format('DROP TABLE IF EXISTS %I', month);
  RETURN true;
END $$;

-- `low` and `high` are the bounds that the month had.
CREATE FUNCTION keep_month(month text, low uuid, high uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('journal_month', 42));
  IF to_regclass(month) IS NULL OR EXISTS (SELECT FROM journal_month WHERE name = month AND dropped_at IS NOT NULL) THEN
    RETURN false;
  END IF;
  IF NOT is_journal_month(month) THEN
    EXECUTE format('DROP TRIGGER entry_detached ON %I', month);
    EXECUTE format('ALTER TABLE entry ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', month, low, high);
  END IF;
  INSERT INTO journal_month (name, kept_at) VALUES (month, now())
  ON CONFLICT (name) DO UPDATE SET detached_at = NULL, kept_at = now();
  RETURN true;
END $$;

-- ---------------------------------------------------------------- run commands

-- Commands for a run that a worker holds; the holder removes them and appends the resulting entries.
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

-- Commands from one run to another: written in the transaction that causes them, delivered in a separate one. A run
-- that ends must not lock its parent, nor a parent its children: the two could deadlock.
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

-- A request and its answer. `attempts`, `error` and `lock_expires_at` distinguish a failed request, a request in
-- progress, and a request whose process is gone.
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
  updated_at       timestamptz NOT NULL DEFAULT now(),
  lock_expires_at  timestamptz,
  expires_at       timestamptz NOT NULL,
  -- An id that must never be used again is remembered for longer than its answer is kept.
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
