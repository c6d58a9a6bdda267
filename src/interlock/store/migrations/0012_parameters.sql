-- Parameters: the rows that functions and statements take as arrays, instead of parallel arrays of their columns.

-- ---------------------------------------------------------------- the queue

-- A run that enters or leaves the queue. `left_queue_id`: it gives back a lease that it got from this queue. `queue_id`:
-- it becomes ready in this queue, or NULL. `workflow`: set if its workflow has a cap.
CREATE TYPE interlock.queue_move AS (
  tenant_id      uuid,
  run_id         uuid,
  left_queue_id  uuid,
  queue_id       uuid,
  workflow       text,
  priority       smallint,
  is_new         boolean,
  reclaimed      boolean
);

-- How many runs a claim takes from a queue at most.
CREATE TYPE interlock.queue_share AS (
  queue_id  uuid,
  runs      int
);

-- ---------------------------------------------------------------- runs

-- A run to be started, as the caller describes it.
CREATE TYPE interlock.new_run AS (
  run_id                 uuid,
  tenant_id              uuid,
  workspace_id           text,
  workflow               text,
  workflow_version       int,
  has_concurrency_limit  boolean,
  input                  jsonb,
  trigger                jsonb,
  requested_by           text,
  requester              jsonb,
  deadline_seconds       float8,
  watch_seconds          float8,
  job_id                 uuid,
  parent_run_id          uuid,
  parent_step            text,
  session_id             uuid,
  session_run            int,
  auto_approve           boolean,
  resumed_from           uuid,
  resume_count           int,
  root_id                uuid
);

-- A journal entry to be added, with the fencing token that its writer holds.
CREATE TYPE interlock.new_entry AS (
  run_id      uuid,
  token       bigint,
  seq         int,
  type        text,
  step        text,
  from_state  text,
  event       text,
  to_state    text,
  attempt     int,
  actor       text,
  data        jsonb,
  output      jsonb
);

-- A run that its writer gives back: the new values of its row. A worker gives back a lease that it got from
-- `left_queue_id`; a command has none. `priority`: the run becomes ready in `queue_id`, which is its queue from now on.
CREATE TYPE interlock.run_release AS (
  run_id         uuid,
  token          bigint,
  from_status    text,
  to_status      text,
  reason         text,
  result         jsonb,
  error          jsonb,
  resume_at      timestamptz,
  awaits_flow    text,
  seq            int,
  cost_usd       numeric,
  left_queue_id  uuid,
  queue_id       uuid,
  priority       smallint,
  is_new         boolean,
  reclaimed      boolean
);

-- A run whose entries were kept. `move` is set if it was given back.
CREATE TYPE interlock.written_run AS (
  run_id                uuid,
  tenant_id             uuid,
  workspace_id          text,
  completed_at          timestamptz,
  is_watched            boolean,
  has_pending_commands  boolean,
  move                  interlock.queue_move
);

-- ---------------------------------------------------------------- effects of a write

-- An approval to be opened. `expires_in` and `escalate_after` are seconds.
CREATE TYPE interlock.new_approval AS (
  id               uuid,
  tenant_id        uuid,
  run_id           uuid,
  step             text,
  kind             text,
  tier             text,
  two_person       boolean,
  summary          text,
  action           jsonb,
  digest           text,
  requested_by     text,
  rule_ids         text[],
  reason           text,
  reason_required  boolean,
  policy_digest    text,
  approvers        text[],
  escalate_to      text[],
  escalate_after   float8,
  expires_in       float8,
  receipt_id       uuid
);

-- An effect that a step will attempt.
CREATE TYPE interlock.new_intent AS (
  id                uuid,
  tenant_id         uuid,
  run_id            uuid,
  step              text,
  tool              text,
  idempotency_key   text,
  action_digest     text,
  attempt           int,
  request_metadata  jsonb,
  undo              text
);

-- The result of an attempted effect.
CREATE TYPE interlock.receipt_result AS (
  receipt_id         uuid,
  status             text,
  output             jsonb,
  response_metadata  jsonb,
  acting_worker      uuid,
  error              text
);

-- A step that waits for an external event.
CREATE TYPE interlock.new_subscription AS (
  tenant_id    uuid,
  run_id       uuid,
  step         text,
  type         text,
  correlation  text,
  timeout_at   timestamptz
);
