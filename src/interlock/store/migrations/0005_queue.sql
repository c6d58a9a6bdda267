-- The queue: the order of ready runs, which runs can be claimed, and the dispatch slots that bypass both.
--
-- A ready run is in `ready_run`, in one queue. A worker claims from one pool at a time: from the queues that are next in
-- turn, the first runs of each. A blocked run is in `blocked_run`. A run that waits for a person or for a time is in no
-- table here. A run that starts while a worker is idle goes to that worker's dispatch slot.
--
-- Lock order, everywhere: job, supervisor, worker, ready run, run, approval, journal entry, resource event. Before all of
-- these, the signal that is delivered and the session that starts a run. After the run, the name of an event that is
-- sent or awaited; after everything, notification target and outbox message.
--
-- A queue is locked last, and never over a round trip: a process that stops with the lock would stop its whole tenant.
-- A claim and the start of a single run lock queues while they execute. Every other transaction writes its changes of
-- queues into `queue_change`, and its COMMIT applies them.
--
-- Among several queues, tenants' own queues come first, then those of jobs and labels, each in order of id. The lock that
-- keeps a tenant's queues active comes before their rows. A transaction that holds a queue never waits for a row of
-- `ready_run` or `blocked_run`: SKIP LOCKED passes rows that a command has locked.

-- ---------------------------------------------------------------- queues

-- A tenant has one queue of its own, with its share of the workers and its cap, and further queues: one for each job, and
-- one for each label that its steps require. `has_work` says that the queue has ready runs. `virtual_time` is the work
-- that it was given divided by its weight, so the queue with the least is served next. Workers claim from one pool at a
-- time: `default`, a label, or a job's id. A run in another queue than its tenant's counts in both.
--
-- The row is updated once for each batch; half-empty pages keep those updates on the page.
CREATE TABLE interlock.queue (
  id               uuid PRIMARY KEY,
  tenant_id        uuid NOT NULL REFERENCES interlock.tenant,
  kind             text NOT NULL CHECK (kind IN ('tenant', 'job', 'label')),
  pool             text NOT NULL DEFAULT 'default' CHECK (pool <> ''),
  weight           float8 NOT NULL DEFAULT 1 CHECK (weight > 0 AND weight <= 1000),
  virtual_time     float8 NOT NULL DEFAULT 0,
  has_work         boolean NOT NULL DEFAULT false,
  max_concurrency  int CHECK (max_concurrency > 0),
  in_flight        int NOT NULL DEFAULT 0 CHECK (in_flight >= 0),
  at_capacity      boolean GENERATED ALWAYS AS (coalesce(in_flight >= max_concurrency, false)) STORED,
  CONSTRAINT queue_of_tenant_has_its_id CHECK ((kind = 'tenant') = (id = tenant_id))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX queue_turn ON interlock.queue (pool, virtual_time) WHERE has_work AND NOT at_capacity;
CREATE INDEX queue_further ON interlock.queue (tenant_id) WHERE kind <> 'tenant';

-- The limits that every run of the tenant carries to its worker, and the version of the policy in force.
CREATE TABLE interlock.tenant_limits (
  tenant_id           uuid PRIMARY KEY REFERENCES interlock.tenant,
  max_writes_per_run  int CHECK (max_writes_per_run > 0),
  max_runs_per_min    int CHECK (max_runs_per_min > 0),
  policy_version      int NOT NULL DEFAULT 0
);

-- For `max_runs_per_min`: the last minute in which a run was given a place, and how many of its places are taken.
-- Separate from the limits, because a start keeps this row locked until it commits, and only starts wait for it.
CREATE TABLE interlock.start_rate (
  tenant_id  uuid PRIMARY KEY REFERENCES interlock.tenant,
  minute     timestamptz,
  used       int NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- ---------------------------------------------------------------- ready runs

-- Only runs that can be claimed now. `is_new` runs were never claimed; the worker of `reclaimed` runs was lost. Within a
-- queue, runs that can continue (`priority` 0) come before new runs and those that used up their time slice (1), each in
-- order of arrival. `workflow` is set only for runs of a workflow with a cap.
CREATE SEQUENCE interlock.queue_position;
CREATE TABLE interlock.ready_run (
  tenant_id  uuid NOT NULL,
  run_id     uuid NOT NULL,
  queue_id   uuid NOT NULL,
  priority   smallint NOT NULL,
  position   bigint NOT NULL DEFAULT nextval('interlock.queue_position'),
  is_new     boolean NOT NULL,
  reclaimed  boolean NOT NULL DEFAULT false,
  workflow   text,
  PRIMARY KEY (tenant_id, run_id)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ready_run_in_order ON interlock.ready_run (queue_id, priority, position);
CREATE INDEX ready_run_limited ON interlock.ready_run (tenant_id, workflow) WHERE workflow IS NOT NULL;

-- ---------------------------------------------------------------- caps of workflows

-- A limit on the runs of a workflow in flight, independent of the tenant's limit.
--
-- A claim does not know the cap. A run of a workflow with a cap first goes into `blocked_run`; it moves to `ready_run`
-- only with a place, and keeps the place as long as it is queued or leased. So a claimable run already has a place, and
-- workflows without a cap pay nothing. Places are counted from `ready_run` and the leases, under the row lock of the
-- tenant's own queue, which every change of either takes: no stored number could be wrong.
--
-- The cap is that of the newest version; NULL if that one has none, while runs of earlier versions may still exist.
CREATE TABLE interlock.workflow_cap (
  tenant_id        uuid NOT NULL REFERENCES interlock.tenant,
  workflow         text NOT NULL,
  max_concurrency  int CHECK (max_concurrency > 0),
  PRIMARY KEY (tenant_id, workflow)
);

CREATE TABLE interlock.blocked_run (
  tenant_id  uuid NOT NULL,
  workflow   text NOT NULL,
  run_id     uuid NOT NULL,
  queue_id   uuid NOT NULL,
  priority   smallint NOT NULL,
  position   bigint NOT NULL DEFAULT nextval('interlock.queue_position'),
  is_new     boolean NOT NULL,
  reclaimed  boolean NOT NULL DEFAULT false,
  PRIMARY KEY (tenant_id, run_id)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX blocked_run_in_order ON interlock.blocked_run (tenant_id, workflow, priority, position);

-- ---------------------------------------------------------------- changes that a transaction makes to queues

-- Each transaction's COMMIT applies and deletes its rows, so no other transaction ever sees one, and losing the table
-- in a crash loses nothing. One row is about a queue (`queue_id`: `freed` places, and whether it has work now) or about a
-- workflow with a cap (`workflow`: admit as many runs as there is room for).
CREATE UNLOGGED TABLE interlock.queue_change (
  id         bigint GENERATED ALWAYS AS IDENTITY,
  xact       xid8 NOT NULL DEFAULT pg_current_xact_id(),
  tenant_id  uuid NOT NULL,
  queue_id   uuid,
  freed      int NOT NULL DEFAULT 0,
  has_work   boolean NOT NULL DEFAULT false,
  workflow   text,
  PRIMARY KEY (xact, id),
  CHECK (num_nonnulls(queue_id, workflow) = 1)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- ---------------------------------------------------------------- dispatch slots

-- An idle worker keeps a dispatch slot open, and a start may put its run there. Nothing depends on this hint: a worker
-- looks for work anyway, and opens a slot again that a crash lost. A start never waits for a locked slot. On `channel`
-- the worker is notified of the run.
CREATE UNLOGGED TABLE interlock.dispatch_slot (
  worker_id  uuid PRIMARY KEY,
  actor      text NOT NULL,
  channel    text NOT NULL,
  tenants    uuid[]
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
