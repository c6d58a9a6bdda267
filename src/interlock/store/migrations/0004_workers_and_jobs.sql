-- Workers, the supervisors that start them, the jobs that reserve them, and the history of all of these.

-- ---------------------------------------------------------------- jobs

-- A batch of runs with reserved workers. The foreign key enforces that a child is one level deeper than its parent, and
-- of the same tenant.
CREATE TABLE interlock.job (
  id                uuid PRIMARY KEY,
  tenant_id         uuid NOT NULL REFERENCES interlock.tenant,
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
  status            interlock.job_state NOT NULL,
  reason            text,
  requested_by      text NOT NULL,
  requester         jsonb NOT NULL,
  deadline_at       timestamptz,
  created_at        timestamptz NOT NULL,
  started_at        timestamptz,
  completed_at      timestamptz,
  UNIQUE (tenant_id, id, depth),
  FOREIGN KEY (tenant_id, parent_job_id, parent_depth) REFERENCES interlock.job (tenant_id, id, depth),
  CONSTRAINT job_root_has_no_parent CHECK ((parent_job_id IS NULL) = (depth = 0)),
  CONSTRAINT job_completed_at CHECK (
    CASE WHEN completed_at IS NULL THEN status::interlock.job_without_completed_at
         ELSE status::interlock.job_with_completed_at END IS NOT NULL
  )
);
CREATE INDEX job_of_tenant ON interlock.job (tenant_id, id);
CREATE INDEX job_children ON interlock.job (parent_job_id) WHERE parent_job_id IS NOT NULL;
CREATE INDEX job_open ON interlock.job (status, id) WHERE completed_at IS NULL;

-- ---------------------------------------------------------------- workers

-- A process that starts and ends worker processes on its machine. Their logs are in `log_dir`.
CREATE TABLE interlock.supervisor (
  id             uuid PRIMARY KEY,
  host           text NOT NULL,
  pid            int NOT NULL,
  log_dir        text NOT NULL,
  desired_workers         int NOT NULL CHECK (desired_workers >= 0),
  reason         text,
  lease_seconds  float8 NOT NULL CHECK (lease_seconds > 0),
  heartbeat_at   timestamptz NOT NULL,
  started_at     timestamptz NOT NULL,
  stopped_at     timestamptz
);
CREATE INDEX supervisor_live ON interlock.supervisor (id) WHERE stopped_at IS NULL;

-- `pid` is NULL until the process of a requested worker has started. `tenants` NULL: all of them. A reservation sets
-- `job_id`, which every claim reads anyway. Every heartbeat updates the row; half-empty pages keep those updates on the
-- page.
CREATE TABLE interlock.worker (
  id             uuid PRIMARY KEY,
  supervisor_id  uuid REFERENCES interlock.supervisor,
  workspace_id   text,
  name           text NOT NULL,
  host           text,
  pid            int,
  status         interlock.worker_state NOT NULL,
  reason         text,
  capacity       int NOT NULL,
  labels         text[] NOT NULL DEFAULT '{default}' CHECK (cardinality(labels) > 0),
  tenants        uuid[],
  -- Free-form data of the requester; the engine never reads it.
  metadata       jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(metadata) = 'object'),
  job_id         uuid REFERENCES interlock.job,
  lease_seconds  float8 NOT NULL CHECK (lease_seconds > 0),
  heartbeat_at   timestamptz NOT NULL,
  started_at     timestamptz NOT NULL,
  stopped_at     timestamptz,
  stopped_by     text,
  -- Set when the worker ends: from then on others get its runs. Until this time a tool of its process may still act.
  may_act_until  timestamptz,
  CONSTRAINT worker_may_act_until CHECK ((may_act_until IS NULL) = (stopped_at IS NULL)),
  CONSTRAINT worker_stopped_at CHECK (
    CASE WHEN stopped_at IS NULL THEN status::interlock.worker_without_stopped_at
         ELSE status::interlock.worker_with_stopped_at END IS NOT NULL
  ),
  CONSTRAINT worker_reserved_is_alive CHECK (job_id IS NULL OR (stopped_at IS NULL AND pid IS NOT NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX worker_live ON interlock.worker (id) WHERE stopped_at IS NULL;
CREATE INDEX worker_stopped ON interlock.worker (stopped_at) WHERE stopped_at IS NOT NULL;
CREATE INDEX worker_of_job ON interlock.worker (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX worker_of_supervisor ON interlock.worker (supervisor_id, id) WHERE supervisor_id IS NOT NULL;

-- ---------------------------------------------------------------- history of workers and jobs

-- The journal of workers and jobs: every transition, and which worker was reserved for which job. A row without an
-- event is a note. The check lists the moves itself: writes are too rare for that to cost anything.
CREATE TABLE interlock.resource_event (
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
  CONSTRAINT resource_event_transition CHECK (
    CASE
    WHEN event IS NULL THEN from_state IS NULL AND to_state IS NULL
    WHEN to_state IS NULL THEN false
    WHEN from_state IS NULL THEN
      event = 'create' AND machine || ':' || to_state = ANY ('{worker:idle,job:submitted}'::text[])
    ELSE machine || ':' || from_state || ':' || event || ':' || to_state = ANY ('{
      worker:idle:start:running, worker:idle:terminate:terminated, worker:running:pause:paused,
      worker:running:complete:completed, worker:running:fail:failed, worker:running:terminate:terminated,
      worker:paused:resume:running, worker:paused:terminate:terminated,
      job:submitted:validate:pending, job:submitted:fail:failed, job:submitted:cancel:canceled,
      job:pending:allocate:running, job:pending:cancel:canceled,
      job:running:succeed:completed, job:running:fail:failed, job:running:cancel:canceled
    }'::text[]) END)
);
CREATE INDEX resource_event_in_time ON interlock.resource_event (machine, at);

