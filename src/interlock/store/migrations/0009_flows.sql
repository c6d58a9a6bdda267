-- Flows: runs that start runs, words between them, and runs whose code is not deployed.

ALTER TABLE run
  -- The step of the parent that waits for this run.
  ADD COLUMN parent_step text,
  -- The flow, with its version, that no worker which looked at the run has. One that has it wakes the run.
  ADD COLUMN awaits_flow text,
  ADD CONSTRAINT run_parent_step CHECK (parent_step IS NULL OR parent_run_id IS NOT NULL),
  ADD CONSTRAINT run_awaits_flow CHECK (awaits_flow IS NULL OR status = 'waiting_external');
CREATE INDEX run_of_parent ON run (parent_run_id, id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX run_awaiting ON run (awaits_flow) WHERE awaits_flow IS NOT NULL;

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
