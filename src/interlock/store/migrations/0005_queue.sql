-- The queue: the order of ready runs, which runs can be claimed, and the dispatch slots that bypass both.
--
-- A ready run is in `ready`, in a lane. A worker claims from one pool at a time: the lanes that are next in turn, and
-- the first runs of each. A blocked run is in `held_back`. A run that waits for a person or for a time is in no table
-- here. A run that starts while a worker is idle goes to that worker's seat.
--
-- Lock order, everywhere: job, supervisor, worker, ready, run, approval, entry, history. Before all of these, the
-- errand that is delivered and the session that starts a run. After the run, the name of an event that is sent or
-- awaited; after everything, destination and outbox.
--
-- A lane is locked last, and never over a round trip: a process that stops with the lock would stop its whole tenant.
-- A statement that is its own transaction (a claim, an append, a start) locks lanes after its worker and before its
-- runs. A transaction of several statements writes its changes for the lanes into `queue_change`, and its COMMIT
-- applies them. The two cannot deadlock: a statement that waits for a run while it holds a lane waits for a run that
-- its own worker holds, and commands only write to the inbox of such a run.
--
-- Among several lanes, tenants' own lanes come first, in order of tenant, then side lanes; a transaction that waits for
-- a side lane already has its tenant's, or needs no other. The lock that keeps a tenant's lanes awake comes before
-- their rows. A transaction that holds a lane never waits for a row of `ready` or `held_back`: SKIP LOCKED passes rows
-- that a command has locked.

-- ---------------------------------------------------------------- lanes

-- A tenant's own lane holds its share of the workers, its limits, and its turn. `active` says that the lane has ready
-- runs; `vtime` is the work it was given divided by its weight, so the lane with the least is served next. The row is
-- updated once per batch; half-empty pages keep those updates on the page.
--
-- A tenant also has side lanes: one for each job, and one for each label that its steps require. Workers claim from one
-- pool at a time: `default`, a label, or a job's id. `tenant_id` is set only in a tenant's own lane, so a look-up by it
-- finds one row. A run in a side lane counts in both lanes: the tenant has a single cap.
CREATE TABLE lane (
  id                  uuid GENERATED ALWAYS AS (coalesce(tenant_id, side_id)) STORED PRIMARY KEY,
  tenant_id           uuid CONSTRAINT lane_of_tenant UNIQUE REFERENCES tenant,
  side_id             uuid,
  side_of             uuid REFERENCES tenant,
  home_id             uuid NOT NULL GENERATED ALWAYS AS (coalesce(tenant_id, side_of)) STORED,
  pool                text NOT NULL DEFAULT 'default' CHECK (pool <> ''),
  weight              float8 NOT NULL DEFAULT 1 CHECK (weight > 0 AND weight <= 1000),
  vtime               float8 NOT NULL DEFAULT 0,
  active              boolean NOT NULL DEFAULT false,
  max_concurrency     int CHECK (max_concurrency > 0),
  in_flight           int NOT NULL DEFAULT 0 CHECK (in_flight >= 0),
  full_up             boolean GENERATED ALWAYS AS (in_flight >= coalesce(max_concurrency, 2147483647)) STORED,
  -- Each run that a worker gets carries these two values.
  max_writes_per_run  int CHECK (max_writes_per_run > 0),
  policy_version      int NOT NULL DEFAULT 0,
  max_runs_per_min    int CHECK (max_runs_per_min > 0),
  CONSTRAINT lane_is_own_or_side CHECK (num_nonnulls(tenant_id, side_id) = 1 AND (side_id IS NULL) = (side_of IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_turn ON lane (pool, vtime) WHERE active AND NOT full_up;
CREATE INDEX lane_sides ON lane (side_of) WHERE side_of IS NOT NULL;

-- A new policy version is in force from its COMMIT on. Not earlier: the lane is locked last.
CREATE FUNCTION enforce_policy() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  UPDATE lane SET policy_version = NEW.version WHERE tenant_id = NEW.tenant_id AND policy_version < NEW.version;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER policy_in_force AFTER INSERT ON policy DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION enforce_policy();

-- For a tenant's `max_runs_per_min`: the last minute in which a run was given a place, and how many of its places are
-- taken. Separate from the lane, because a start keeps this row locked until it commits, and only starts wait for it.
CREATE TABLE start_rate (
  tenant_id  uuid PRIMARY KEY REFERENCES tenant,
  minute     timestamptz,
  used       int NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- ---------------------------------------------------------------- ready

-- Only runs that can be claimed now. `fresh` runs were never claimed; the worker of `lost` runs died. `turn` is the
-- order within a lane: first the started runs that can continue, then the new ones and those that used up their time
-- slice, each in order of arrival. `workflow` is set only for runs of a workflow with a cap.
CREATE SEQUENCE ready_turn;
CREATE TABLE ready (
  tenant_id  uuid NOT NULL,
  run_id     uuid NOT NULL,
  side_id    uuid,
  lane_id    uuid NOT NULL GENERATED ALWAYS AS (coalesce(side_id, tenant_id)) STORED,
  turn       bigint NOT NULL DEFAULT nextval('ready_turn'),
  fresh      boolean NOT NULL,
  lost       boolean NOT NULL,
  workflow   text,
  PRIMARY KEY (tenant_id, run_id)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ready_by_turn ON ready (lane_id, turn);
CREATE INDEX ready_capped ON ready (tenant_id, workflow) WHERE workflow IS NOT NULL;

-- The current virtual time of a pool. A lane that rested has neither credit nor debt: it joins there.
CREATE FUNCTION turn_in(wanted text) RETURNS float8 LANGUAGE sql STABLE AS $$
  SELECT vtime FROM lane WHERE pool = wanted AND active AND NOT full_up ORDER BY vtime LIMIT 1
$$;

-- Called after a run was put into `ready`. The shared lock is taken before the lane is read (each statement of this
-- function has its own snapshot): either this function sees that rest_lane put the lane to rest and wakes it again, or
-- rest_lane finds the lock taken and leaves the lane awake. A tenant has one such lock for all its lanes, because a
-- caller does not know beforehand which lane it fills. Workers are notified only on the change from resting to active;
-- a worker sleeps only when no lane is active, so that is enough.
CREATE FUNCTION wake_lane(tenant uuid, side uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant::text, 42));
  UPDATE lane SET active = true, vtime = coalesce(turn_in(pool), vtime)
   WHERE id = coalesce(side, tenant) AND NOT active;
  IF FOUND THEN
    PERFORM pg_notify('interlock_ready', '');
  END IF;
END $$;

-- Called by a claim that found nothing in a lane. Returns whether the lane now rests. Never waits: a start may have
-- locked the lane's row, for a seat that another run took, before it requests that the lane stays awake.
CREATE FUNCTION rest_lane(dry uuid) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  home uuid;
BEGIN
  -- If a crash loses this update, the next claim just finds the lane empty again.
  PERFORM set_config('synchronous_commit', 'off', true);
  SELECT home_id INTO home FROM lane WHERE id = dry FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND OR NOT pg_try_advisory_xact_lock(hashtextextended(home::text, 42)) THEN
    RETURN false;
  END IF;
  UPDATE lane SET active = false
   WHERE id = dry AND active AND NOT EXISTS (SELECT FROM ready WHERE ready.lane_id = dry);
  RETURN FOUND;
END $$;

-- ---------------------------------------------------------------- caps of workflows

-- A limit on the runs of a workflow in flight, independent of the tenant's limit.
--
-- A claim does not know the cap. A run of a workflow with a cap first goes into `held_back`; it moves to `ready` only
-- with a place, and keeps the place as long as it is queued or leased. So a claimable run already has a place, and
-- workflows without a cap pay nothing. Places are counted from `ready` and the leases, under the row lock of the
-- tenant's own lane, which every change of either takes: no stored number could be wrong.
--
-- The cap is that of the newest version; NULL if that one has none, while runs of earlier versions may still exist.
CREATE TABLE workflow_cap (
  tenant_id        uuid NOT NULL REFERENCES tenant,
  workflow         text NOT NULL,
  max_concurrency  int CHECK (max_concurrency > 0),
  PRIMARY KEY (tenant_id, workflow)
);

CREATE TABLE held_back (
  tenant_id  uuid NOT NULL,
  workflow   text NOT NULL,
  run_id     uuid NOT NULL,
  side_id    uuid,
  turn       bigint NOT NULL,
  fresh      boolean NOT NULL,
  lost       boolean NOT NULL,
  PRIMARY KEY (tenant_id, run_id)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX held_back_by_turn ON held_back (tenant_id, workflow, turn);

-- Called in the transaction that blocks a run or frees a place. Each run goes into the lane that it belongs to. The
-- lock that keeps lanes awake comes before the lane's row, as in wake_lane. Returns how many runs were admitted.
CREATE FUNCTION let_in(tenant uuid, name text) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  room bigint;
  sides uuid[];
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant::text, 42));
  PERFORM FROM lane WHERE tenant_id = tenant FOR NO KEY UPDATE;
  room := coalesce((SELECT max_concurrency FROM workflow_cap WHERE tenant_id = tenant AND workflow = name), 2147483647)
    - (SELECT count(*) FROM run WHERE capped AND lease_worker IS NOT NULL AND tenant_id = tenant AND workflow = name)
    - (SELECT count(*) FROM ready WHERE tenant_id = tenant AND workflow = name);
  IF room <= 0 THEN
    RETURN 0;
  END IF;
  -- Skips a row that a command has locked: the command waits for this lane when it commits. If it ends without a
  -- commit, the sweep admits the run.
  WITH following AS MATERIALIZED (
    SELECT run_id FROM held_back WHERE tenant_id = tenant AND workflow = name ORDER BY turn LIMIT room
       FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM held_back USING following
     WHERE held_back.tenant_id = tenant AND held_back.run_id = following.run_id
    RETURNING held_back.*
  ), queued AS (
    INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost, workflow)
    SELECT tenant_id, run_id, side_id, turn, fresh, lost, workflow FROM gone
    RETURNING side_id
  )
  SELECT array_agg(side_id) INTO sides FROM queued;
  PERFORM wake_lane(tenant, side)
     FROM (SELECT DISTINCT side FROM unnest(sides) AS side ORDER BY side NULLS FIRST) AS lanes;
  RETURN coalesce(cardinality(sides), 0);
END $$;

-- ---------------------------------------------------------------- changes that a transaction makes to the lanes

-- Each transaction's COMMIT applies and deletes its rows, so no other transaction ever sees one, and losing the table
-- in a crash loses nothing. One row is about a lane (`lane_id`: `freed` places, and whether it has work now) or about a
-- workflow with a cap (`workflow`: admit as many runs as there is room for).
CREATE UNLOGGED TABLE queue_change (
  id         bigint GENERATED ALWAYS AS IDENTITY,
  xact       xid8 NOT NULL DEFAULT pg_current_xact_id(),
  tenant_id  uuid NOT NULL,
  lane_id    uuid,
  freed      int NOT NULL DEFAULT 0,
  has_work   boolean NOT NULL DEFAULT false,
  workflow   text,
  PRIMARY KEY (xact, id),
  CHECK (num_nonnulls(lane_id, workflow) = 1)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- The first row's trigger applies all rows of the transaction in lock order of the lanes; the triggers of the other
-- rows find nothing left.
CREATE FUNCTION apply_queue_changes() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  mine queue_change[];
BEGIN
  WITH taken AS (DELETE FROM queue_change WHERE xact = pg_current_xact_id() RETURNING queue_change)
  SELECT array_agg(queue_change) INTO mine FROM taken;
  IF mine IS NULL THEN
    RETURN NULL;
  END IF;
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant_id::text, 42))
     FROM (SELECT DISTINCT tenant_id FROM unnest(mine) WHERE has_work OR workflow IS NOT NULL) AS filled;
  -- A lane that is already awake and frees no place does not change, so it need not be locked.
  PERFORM FROM lane
    WHERE id = ANY(ARRAY(SELECT coalesce(lane_id, tenant_id) FROM unnest(mine) WHERE freed > 0 OR workflow IS NOT NULL))
       OR (id = ANY(ARRAY(SELECT lane_id FROM unnest(mine) WHERE has_work)) AND NOT active)
    ORDER BY side_id NULLS FIRST, id
      FOR NO KEY UPDATE;
  PERFORM pg_notify('interlock_ready', '') FROM lane
    WHERE id = ANY(ARRAY(SELECT lane_id FROM unnest(mine) WHERE freed > 0)) AND active AND full_up;
  UPDATE lane SET in_flight = in_flight - gone.places
    FROM (SELECT lane_id, sum(freed)::int AS places FROM unnest(mine) WHERE freed > 0 GROUP BY lane_id) AS gone
   WHERE lane.id = gone.lane_id;
  PERFORM wake_lane(tenant_id, nullif(lane_id, tenant_id))
     FROM (SELECT DISTINCT tenant_id, lane_id FROM unnest(mine) WHERE has_work) AS filled
    ORDER BY lane_id <> tenant_id, lane_id;
  PERFORM let_in(tenant_id, workflow)
     FROM (SELECT DISTINCT tenant_id, workflow FROM unnest(mine) WHERE workflow IS NOT NULL) AS capped
    ORDER BY tenant_id, workflow;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER queue_change_at_commit AFTER INSERT ON queue_change DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION apply_queue_changes();

-- A single statement, so that the lock lasts only as long as the count. Returns the old and the new count, or nothing
-- if they are equal. With the lane locked, no transaction is between taking a lease and counting it.
CREATE FUNCTION recount_lane(counted uuid, OUT before int, OUT after int) LANGUAGE plpgsql AS $$
BEGIN
  SELECT in_flight INTO before FROM lane WHERE id = counted FOR NO KEY UPDATE;
  SELECT count(*) INTO after FROM run WHERE lease_worker IS NOT NULL AND counted IN (tenant_id, side_id);
  UPDATE lane SET in_flight = after WHERE id = counted AND in_flight <> after;
  IF NOT FOUND THEN
    before := NULL;
    after := NULL;
  END IF;
END $$;

-- ---------------------------------------------------------------- starting a single run

-- An idle worker keeps a seat open, and a start may put its run there. Nothing depends on this hint: a worker looks for
-- work anyway, and opens a seat again that a crash lost. A start never waits for a locked seat. On `channel` the worker
-- is notified of the run on its seat.
CREATE UNLOGGED TABLE seat (
  worker_id  uuid PRIMARY KEY,
  actor      text NOT NULL,
  channel    text NOT NULL,
  tenants    uuid[]
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- Starts one run whose first step needs a worker, of a workflow without a cap, as its own transaction: with the record
-- of the request and its answer, into which the function writes the time of creation. `at` is NULL if nothing was
-- started: the request was made before, the version is not the newest any more, or the tenant's runs must be paced.
--
-- The run goes to a seat if no run of its tenant waits before it and there is room for it, else into the queue. Several
-- small statements, and only those that are needed: one statement for both cases is prepared for both every time.
CREATE FUNCTION start_run(
  clock timestamptz, new_id uuid, tenant uuid, workspace text, named text, numbered int, if_newest boolean,
  given text, cause text, starter text, deadline_seconds float8, watch_seconds float8, facts text,
  request_key text, request_source text, request_digest bytea, keep_seconds float8,
  answer_text text,
  OUT at timestamptz, OUT answer bytea
) LANGUAGE plpgsql AS $$
DECLARE
  home record;
  free seat;
  held record;
  made record;
  handed text;
BEGIN
  SELECT max_runs_per_min, EXISTS (SELECT FROM seat) AS seats,
         EXISTS (SELECT FROM workflow WHERE tenant_id = tenant AND name = named AND version > numbered) AS newer
    INTO home
    FROM lane WHERE tenant_id = tenant;
  IF home.max_runs_per_min IS NOT NULL OR (if_newest AND home.newer) THEN
    RETURN;
  END IF;
  answer := convert_to(
    replace(answer_text, 'created at ' || new_id,
            to_char(coalesce(clock, now()) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')),
    'UTF8'
  );
  IF request_key IS NOT NULL THEN
    INSERT INTO idempotency (tenant_id, key, source, status, request_hash, response_status, response_body, run_id,
                             created_at, updated_at, expires_at)
    VALUES (tenant, request_key, request_source, 'completed', request_digest, 201, answer, new_id,
            coalesce(clock, now()), coalesce(clock, now()), coalesce(clock, now()) + make_interval(secs => keep_seconds))
    ON CONFLICT (tenant_id, key) DO UPDATE
       SET status = 'completed', request_hash = excluded.request_hash, response_status = excluded.response_status,
           response_body = excluded.response_body, run_id = excluded.run_id, created_at = excluded.created_at,
           updated_at = excluded.updated_at, expires_at = excluded.expires_at, attempts = 1, error = NULL, lock_expires_at = NULL
     WHERE idempotency.expires_at <= excluded.created_at;
    IF NOT FOUND THEN
      RETURN;
    END IF;
  END IF;
  at := coalesce(clock, now());

  IF home.seats THEN
    UPDATE lane SET in_flight = in_flight + 1 WHERE tenant_id = tenant AND NOT active AND NOT full_up
    RETURNING max_writes_per_run, policy_version INTO held;
    IF FOUND THEN
      DELETE FROM seat WHERE worker_id = (
        SELECT seat.worker_id
          FROM seat JOIN worker ON worker.id = seat.worker_id
         WHERE worker.status = 'running' AND worker.job_id IS NULL
           AND (seat.tenants IS NULL OR tenant = ANY(seat.tenants))
         LIMIT 1
           FOR UPDATE OF seat SKIP LOCKED
           FOR KEY SHARE OF worker SKIP LOCKED
      ) RETURNING * INTO free;
      IF NOT FOUND THEN
        UPDATE lane SET in_flight = in_flight - 1 WHERE tenant_id = tenant;
      END IF;
    END IF;
  END IF;
  IF free.worker_id IS NOT NULL THEN
    INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                     created_at, deadline_at, watched_until, requester, started_at, lease_token, lease_worker)
    VALUES (new_id, tenant, workspace, named, numbered, 'running', given::jsonb, cause::jsonb, starter, 2,
            at, at + make_interval(secs => deadline_seconds), at + make_interval(secs => watch_seconds), facts::jsonb,
            at, 1, free.worker_id)
    RETURNING input::text, trigger::text, requester::text, deadline_at INTO made;
    INSERT INTO entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor, data)
    VALUES (new_id, 1, tenant, at, 'run_created', NULL, 'create', 'pending', 0, starter,
            jsonb_build_object('workflow', named, 'version', numbered, 'trigger', cause::jsonb)),
           (new_id, 2, tenant, at, 'run_transition', 'pending', 'start', 'running', 1, free.actor, NULL);
    handed := json_build_object(
      'id', new_id, 'tenant_id', tenant, 'workspace_id', workspace, 'workflow', named, 'workflow_version', numbered,
      'input', made.input, 'trigger', made.trigger, 'requested_by', starter, 'requester', made.requester, 'at', at,
      'deadline_at', made.deadline_at, 'lease_worker', free.worker_id, 'max_writes_per_run', held.max_writes_per_run,
      'policy_version', held.policy_version
    );
    PERFORM pg_notify(free.channel, CASE WHEN octet_length(handed) < 7900 THEN handed ELSE '' END);
    RETURN;
  END IF;

  INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                   created_at, deadline_at, watched_until, requester)
  VALUES (new_id, tenant, workspace, named, numbered, 'pending', given::jsonb, cause::jsonb, starter, 1,
          at, at + make_interval(secs => deadline_seconds), at + make_interval(secs => watch_seconds), facts::jsonb);
  INSERT INTO entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor, data)
  VALUES (new_id, 1, tenant, at, 'run_created', 'create', 'pending', 0, starter,
          jsonb_build_object('workflow', named, 'version', numbered, 'trigger', cause::jsonb));
  INSERT INTO ready (tenant_id, run_id, fresh, lost) VALUES (tenant, new_id, true, false);
  PERFORM wake_lane(tenant, NULL);
END $$;
