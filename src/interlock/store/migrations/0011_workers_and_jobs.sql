-- Workers that take orders, the supervisors that start them, jobs, and the side lanes of a tenant.
--
-- Lock order, with what is new in it: job, lane, supervisor, worker, ready, run, approval, entry, history. Of several
-- lanes, tenants' own come first, in order of tenant, then side lanes; who waits for a side lane has its tenant's already,
-- or no other.

-- ---------------------------------------------------------------- lanes

-- Besides its own lane a tenant has side lanes: one for each job, and one for each label that its steps ask for. Workers
-- claim from one pool at a time: `default`, a label, or a job's id. `tenant_id` is set in a tenant's own lane and nowhere
-- else, so whatever looks a tenant up by it still finds one row. A run in a side lane counts in both lanes: the tenant's
-- cap is one cap.
ALTER TABLE lane DROP CONSTRAINT lane_pkey;
ALTER TABLE lane
  ALTER COLUMN tenant_id DROP NOT NULL,
  ADD CONSTRAINT lane_of_tenant UNIQUE (tenant_id),
  ADD COLUMN side_id uuid,
  ADD COLUMN side_of uuid REFERENCES tenant,
  ADD COLUMN id uuid GENERATED ALWAYS AS (coalesce(tenant_id, side_id)) STORED,
  ADD COLUMN home_id uuid NOT NULL GENERATED ALWAYS AS (coalesce(tenant_id, side_of)) STORED,
  ADD COLUMN pool text NOT NULL DEFAULT 'default' CHECK (pool <> ''),
  ADD CONSTRAINT lane_is_own_or_side CHECK (num_nonnulls(tenant_id, side_id) = 1 AND (side_id IS NULL) = (side_of IS NULL));
ALTER TABLE lane ADD CONSTRAINT lane_pkey PRIMARY KEY (id);
CREATE INDEX lane_sides ON lane (side_of) WHERE side_of IS NOT NULL;
DROP INDEX lane_turn;
CREATE INDEX lane_turn ON lane (pool, vtime) WHERE active AND NOT full_up;

-- NULL: in its tenant's own lane. Nothing is rewritten for runs that are there already.
ALTER TABLE run ADD COLUMN side_id uuid;
CREATE INDEX run_of_job ON run (job_id, status) WHERE job_id IS NOT NULL;

ALTER TABLE ready
  ADD COLUMN side_id uuid,
  ADD COLUMN lane_id uuid NOT NULL GENERATED ALWAYS AS (coalesce(side_id, tenant_id)) STORED;
DROP INDEX ready_by_turn;
CREATE INDEX ready_by_turn ON ready (lane_id, turn);

ALTER TABLE held_back ADD COLUMN side_id uuid;

-- Whose turn it is in a pool. A lane that rested has neither credit nor debt: it joins there.
CREATE FUNCTION turn_in(wanted text) RETURNS float8 LANGUAGE sql STABLE AS $$
  SELECT vtime FROM lane WHERE pool = wanted AND active AND NOT full_up ORDER BY vtime LIMIT 1
$$;

-- As before. A tenant has one such lock for all its lanes: whoever fills one does not know beforehand which.
DROP FUNCTION wake_lane(uuid);
CREATE FUNCTION wake_lane(tenant uuid, side uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant::text, 42));
  UPDATE lane SET active = true, vtime = coalesce(turn_in(pool), vtime)
   WHERE id = coalesce(side, tenant) AND NOT active;
  IF FOUND THEN
    PERFORM pg_notify('interlock_ready', '');
  END IF;
END $$;

DROP FUNCTION rest_lane(uuid);
CREATE FUNCTION rest_lane(dry uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  -- Losing this in a crash only means that the next claim finds the lane empty again.
  PERFORM set_config('synchronous_commit', 'off', true);
  IF NOT pg_try_advisory_xact_lock(hashtextextended((SELECT home_id FROM lane WHERE id = dry)::text, 42)) THEN
    RETURN false;
  END IF;
  UPDATE lane SET active = false
   WHERE id = dry AND active AND NOT EXISTS (SELECT FROM ready WHERE ready.lane_id = dry);
  RETURN FOUND;
END $$;

-- As before, into the lane that each run belongs to. The tenant's own lane is locked for every change of a place,
-- whichever lane the run is in.
CREATE OR REPLACE FUNCTION let_in(tenant uuid, name text) RETURNS int LANGUAGE plpgsql AS $$
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

-- ---------------------------------------------------------------- jobs

-- A batch of runs with workers reserved for it. That a child is one deeper than its parent, and of the same tenant, is
-- in its foreign key.
CREATE TABLE job (
  id                uuid PRIMARY KEY,
  tenant_id         uuid NOT NULL REFERENCES tenant,
  workspace_id      text,
  parent_job_id     uuid,
  depth             int NOT NULL CHECK (depth BETWEEN 0 AND 5),
  parent_depth      int GENERATED ALWAYS AS (depth - 1) STORED,
  task_description  text NOT NULL,
  workflow          text NOT NULL,
  workflow_version  int,
  inputs            jsonb NOT NULL CHECK (jsonb_typeof(inputs) = 'array'),
  total             int NOT NULL CHECK (total > 0),
  done              int NOT NULL DEFAULT 0 CHECK (done >= 0),
  worker_count      int NOT NULL CHECK (worker_count BETWEEN 1 AND 10),
  status            text NOT NULL,
  reason            text,
  requested_by      text NOT NULL,
  requester         jsonb NOT NULL,
  deadline_at       timestamptz,
  created_at        timestamptz NOT NULL,
  started_at        timestamptz,
  completed_at      timestamptz,
  UNIQUE (tenant_id, id, depth),
  FOREIGN KEY (tenant_id, parent_job_id, parent_depth) REFERENCES job (tenant_id, id, depth),
  CONSTRAINT job_root_has_no_parent CHECK ((parent_job_id IS NULL) = (depth = 0)),
  CONSTRAINT job_status CHECK (status IN ('submitted', 'pending', 'running', 'completed', 'failed', 'canceled')),
  CONSTRAINT job_completed_at CHECK ((completed_at IS NOT NULL) = (status IN ('completed', 'failed', 'canceled')))
);
CREATE INDEX job_of_tenant ON job (tenant_id, id);
CREATE INDEX job_children ON job (parent_job_id) WHERE parent_job_id IS NOT NULL;
CREATE INDEX job_open ON job (status, id) WHERE completed_at IS NULL;

CREATE TRIGGER job_moves BEFORE UPDATE ON job FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND CASE OLD.status
    WHEN 'submitted' THEN NEW.status NOT IN ('pending', 'failed', 'canceled')
    WHEN 'pending' THEN NEW.status NOT IN ('running', 'canceled')
    WHEN 'running' THEN NEW.status NOT IN ('completed', 'failed', 'canceled')
    ELSE true
    END)
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER job_final BEFORE UPDATE ON job FOR EACH ROW
  WHEN (OLD.status IN ('completed', 'failed', 'canceled'))
  EXECUTE FUNCTION refuse_change();

-- ---------------------------------------------------------------- workers

-- A process that starts and ends worker processes on its machine. `log_dir` is where they write.
CREATE TABLE supervisor (
  id             uuid PRIMARY KEY,
  host           text NOT NULL,
  pid            int NOT NULL,
  log_dir        text NOT NULL,
  wished         int NOT NULL CHECK (wished >= 0),
  reason         text,
  lease_seconds  float8 NOT NULL CHECK (lease_seconds > 0),
  heartbeat_at   timestamptz NOT NULL,
  started_at     timestamptz NOT NULL,
  stopped_at     timestamptz
);
CREATE INDEX supervisor_live ON supervisor (id) WHERE stopped_at IS NULL;

-- `pid` is NULL until the process of a worker that was asked for is there. `tenants` NULL: all of them.
ALTER TABLE worker
  ALTER COLUMN pid DROP NOT NULL,
  ALTER COLUMN host DROP NOT NULL,
  ADD COLUMN supervisor_id uuid REFERENCES supervisor,
  ADD COLUMN workspace_id text,
  ADD COLUMN labels text[] NOT NULL DEFAULT '{default}' CHECK (cardinality(labels) > 0),
  ADD COLUMN tenants uuid[],
  ADD COLUMN job_id uuid REFERENCES job,
  ADD COLUMN stopped_by text,
  ADD CONSTRAINT worker_reserved_is_alive CHECK (job_id IS NULL OR (stopped_at IS NULL AND pid IS NOT NULL));
CREATE INDEX worker_of_job ON worker (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX worker_of_supervisor ON worker (supervisor_id, id) WHERE supervisor_id IS NOT NULL;

-- ---------------------------------------------------------------- what happened to workers and jobs

-- The journal of those that are no runs: every transition, and which worker was reserved for which job. A row without
-- an event is a note.
CREATE TABLE history (
  subject_id  uuid NOT NULL,
  seq         int NOT NULL CHECK (seq > 0),
  machine     text NOT NULL CHECK (machine IN ('worker', 'job')),
  at          timestamptz NOT NULL,
  type        text NOT NULL,
  from_state  text,
  event       text,
  to_state    text,
  actor       text NOT NULL,
  reason      text,
  data        jsonb,
  PRIMARY KEY (subject_id, seq),
  CONSTRAINT history_transition CHECK (
    CASE
    WHEN event IS NULL THEN from_state IS NULL AND to_state IS NULL
    WHEN to_state IS NULL THEN false
    WHEN from_state IS NULL THEN event = 'create' AND machine || ':' || to_state = ANY ('{worker:idle,job:submitted}'::text[])
    ELSE machine || ':' || from_state || ':' || event || ':' || to_state = ANY ('{worker:idle:start:running,worker:idle:terminate:terminated,worker:running:pause:paused,worker:running:complete:completed,worker:running:fail:failed,worker:running:terminate:terminated,worker:paused:resume:running,worker:paused:terminate:terminated,job:submitted:validate:pending,job:submitted:fail:failed,job:submitted:cancel:canceled,job:pending:allocate:running,job:pending:cancel:canceled,job:running:succeed:completed,job:running:fail:failed,job:running:cancel:canceled}'::text[]) END)
);
CREATE TRIGGER history_append_only BEFORE UPDATE OR DELETE ON history FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER history_keep BEFORE TRUNCATE ON history FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();
