-- The queue: whose turn it is, which runs can be claimed, and the short way past both.
--
-- A run that can go on stands in `ready`, in a lane. A worker claims from one pool at a time: the lanes whose turn it
-- is, and the first runs of each. What has no place yet stands in `held_back`; what waits, for a person or for time,
-- stands nowhere here. A run that is started while a worker has nothing to do is put on that worker's seat.
--
-- Lock order, everywhere: job, lane, supervisor, worker, ready, run, approval, entry, history. Before all of these, the
-- errand that is delivered and the session that a run is begun in. After the run, the name of an event that is sent or
-- waited for; after everything, destination and outbox. Of several lanes, tenants' own come first, in order of tenant,
-- then side lanes; who waits for a side lane has its tenant's already, or no other. The lock that keeps a tenant's
-- lanes awake comes before their rows.

-- ---------------------------------------------------------------- lanes

-- A tenant has its own lane: its share of the workers, its limits, and its turn. `active` says that the lane has ready
-- runs; `vtime` is the work it was given divided by its weight, so the least is the next to be served. The row is
-- updated once per batch; half-empty pages keep those updates on the page.
--
-- Besides its own lane a tenant has side lanes: one for each job, and one for each label that its steps ask for.
-- Workers claim from one pool at a time: `default`, a label, or a job's id. `tenant_id` is set in a tenant's own lane
-- and nowhere else, so whatever looks a tenant up by it finds one row. A run in a side lane counts in both lanes: the
-- tenant's cap is one cap.
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
  -- A worker is told these two with each run that it gets.
  max_writes_per_run  int CHECK (max_writes_per_run > 0),
  policy_version      int NOT NULL DEFAULT 0,
  max_runs_per_min    int CHECK (max_runs_per_min > 0),
  -- The last minute that a run was given a place in, and how many of its places are taken.
  rate_minute         timestamptz,
  rate_used           int NOT NULL DEFAULT 0,
  CONSTRAINT lane_is_own_or_side CHECK (num_nonnulls(tenant_id, side_id) = 1 AND (side_id IS NULL) = (side_of IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_turn ON lane (pool, vtime) WHERE active AND NOT full_up;
CREATE INDEX lane_sides ON lane (side_of) WHERE side_of IS NOT NULL;

-- ---------------------------------------------------------------- ready

-- Runs that can be claimed now, and nothing else. `fresh` runs were never claimed; `lost` ones had a worker that died.
-- `turn` is the order within a lane: what was begun and can go on comes first, then what is new or has used up its time
-- slice, each in the order it came. `workflow` is named only for runs of a workflow with a cap.
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

-- Whose turn it is in a pool. A lane that rested has neither credit nor debt: it joins there.
CREATE FUNCTION turn_in(wanted text) RETURNS float8 LANGUAGE sql STABLE AS $$
  SELECT vtime FROM lane WHERE pool = wanted AND active AND NOT full_up ORDER BY vtime LIMIT 1
$$;

-- Called by whatever puts a run into `ready`, after it did. The shared lock is taken before the lane is looked at
-- (each statement of this function has its own snapshot): either we see that rest_lane put the lane to rest and wake
-- it again, or rest_lane finds the lock taken and leaves the lane awake. A tenant has one such lock for all its lanes:
-- whoever fills one does not know beforehand which. Workers are notified only on the change from resting to active; a
-- worker sleeps only when no lane is active, so that is enough.
CREATE FUNCTION wake_lane(tenant uuid, side uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant::text, 42));
  UPDATE lane SET active = true, vtime = coalesce(turn_in(pool), vtime)
   WHERE id = coalesce(side, tenant) AND NOT active;
  IF FOUND THEN
    PERFORM pg_notify('interlock_ready', '');
  END IF;
END $$;

-- Called by a claim that found nothing in a lane. Answers whether the lane now rests. It waits for nobody: whoever starts
-- a run may have locked the lane's row, for a seat that was then another's, before it asks that the lane stays awake.
CREATE FUNCTION rest_lane(dry uuid) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  home uuid;
BEGIN
  -- Losing this in a crash only means that the next claim finds the lane empty again.
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

-- At most so many runs of a workflow in flight, whatever its tenant may have.
--
-- A claim knows nothing of it. A run of a workflow with a cap first stands in `held_back`; only with a place does it go
-- into `ready`, and it keeps the place for as long as it is queued or leased. So what is claimed has a place already,
-- and workflows without a cap pay nothing. Places are counted where they are, in `ready` and among the leases, and
-- under the row lock of the tenant's own lane, which every change of either takes: there is no number that could be
-- wrong.
--
-- The cap is that of the newest version; null if that one has none, while runs of earlier ones may still be there.
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

-- Called in the transaction of whatever holds a run back or frees a place. Each run goes into the lane that it belongs
-- to. The lock that keeps lanes awake comes before the lane's row, as in wake_lane. Answers how many were let in.
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
  WITH following AS (
    SELECT run_id FROM held_back WHERE tenant_id = tenant AND workflow = name ORDER BY turn LIMIT room
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

-- ---------------------------------------------------------------- the short way of one run

-- A worker with nothing to do keeps a seat open, and whoever starts a run may put it there. A hint that nothing depends
-- on: a worker looks for work all the same, and a seat that is lost in a crash is opened again. No start waits for one
-- that is locked. `channel` is where the worker hears of the run that was put on it.
CREATE UNLOGGED TABLE seat (
  worker_id  uuid PRIMARY KEY,
  actor      text NOT NULL,
  channel    text NOT NULL,
  tenants    uuid[]
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- One run whose first step is for a worker, of a workflow without a cap, as its own transaction: with the record of the
-- request and its answer, in whose middle the time of creation is written. `at` is NULL if nothing was started: the
-- request was made before, the version is not the newest any more, or the tenant's runs have to be paced.
--
-- The run goes to a seat if nothing of its tenant waits before it and there is room for it, else into the queue.
-- Several small statements, and only those that are needed: one that could do either is prepared for both every time.
CREATE FUNCTION start_run(
  clock timestamptz, new_id uuid, tenant uuid, workspace text, named text, numbered int, if_newest boolean,
  given text, cause text, starter text, deadline_seconds float8, watch_seconds float8, facts text,
  request_key text, request_source text, request_digest bytea, keep_seconds float8,
  answer_before text, answer_after text,
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
    answer_before || to_char(coalesce(clock, now()) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
    || answer_after, 'UTF8'
  );
  IF request_key IS NOT NULL THEN
    INSERT INTO idempotency (tenant_id, key, source, status, request_hash, response_status, response_body, run_id,
                             created_at, expires_at)
    VALUES (tenant, request_key, request_source, 'completed', request_digest, 201, answer, new_id,
            coalesce(clock, now()), coalesce(clock, now()) + make_interval(secs => keep_seconds))
    ON CONFLICT (tenant_id, key) DO UPDATE
       SET status = 'completed', request_hash = excluded.request_hash, response_status = excluded.response_status,
           response_body = excluded.response_body, run_id = excluded.run_id, created_at = excluded.created_at,
           expires_at = excluded.expires_at, attempts = 1, error = NULL, lock_expires_at = NULL
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
           FOR SHARE OF worker SKIP LOCKED
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
