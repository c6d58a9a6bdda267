-- Events from outside and the waits for them; and a run that undoes what it did before it ends.

-- ---------------------------------------------------------------- events

-- An event is kept until a step waits for it or its time is over. Whoever consumes it says so here in the transaction
-- that makes it the step's, or leaves it in the inbox of whoever holds the run: once, and for one step.
CREATE TABLE outside_event (
  tenant_id     uuid NOT NULL REFERENCES tenant,
  id            text NOT NULL,
  number        bigint GENERATED ALWAYS AS IDENTITY,
  workspace_id  text,
  type          text NOT NULL,
  correlation   text NOT NULL,
  payload       jsonb NOT NULL,
  sent_by       text NOT NULL,
  received_at   timestamptz NOT NULL,
  expires_at    timestamptz NOT NULL CHECK (expires_at > received_at),
  run_id        uuid,
  step          text,
  consumed_at   timestamptz,
  PRIMARY KEY (tenant_id, id),
  CONSTRAINT outside_event_consumed
    CHECK ((run_id IS NULL) = (consumed_at IS NULL) AND (step IS NULL) = (consumed_at IS NULL))
);
CREATE UNIQUE INDEX outside_event_of_step ON outside_event (run_id, step) WHERE run_id IS NOT NULL;
CREATE INDEX outside_event_kept ON outside_event (tenant_id, type, correlation, number) WHERE consumed_at IS NULL;
CREATE INDEX outside_event_in_order ON outside_event (tenant_id, number);
CREATE INDEX outside_event_expiry ON outside_event (expires_at);

CREATE TRIGGER outside_event_final BEFORE UPDATE ON outside_event FOR EACH ROW
  WHEN (OLD.consumed_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();

-- All that a waiting step costs. The event that comes and the time-out both begin by deleting the row: whoever finds
-- it there is the one that ends the wait.
CREATE TABLE outside_wait (
  run_id        uuid NOT NULL,
  step          text NOT NULL,
  number        bigint GENERATED ALWAYS AS IDENTITY,
  tenant_id     uuid NOT NULL,
  workspace_id  text,
  type          text NOT NULL,
  correlation   text NOT NULL,
  timeout_at    timestamptz,
  PRIMARY KEY (run_id, step)
);
CREATE INDEX outside_wait_for ON outside_wait (tenant_id, type, correlation, number);
CREATE INDEX outside_wait_timeout ON outside_wait (timeout_at) WHERE timeout_at IS NOT NULL;

-- Between looking for a wait and keeping an event, and between looking for an event and beginning to wait, nobody may
-- do the other: both would look, find nothing, and miss each other for ever. Last in the lock order, after the run.
CREATE FUNCTION lock_event(tenant uuid, wanted text, about text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended(tenant::text || ' ' || wanted || ' ' || about, 43));
END $$;

-- The run's row is locked, or its lease is ours. Answers the event that came before, which is consumed thereby, or
-- nothing: then the step waits. Each statement here has a snapshot of its own, taken after the lock.
CREATE FUNCTION await_event(
  now timestamptz, tenant uuid, waiting uuid, waiting_step text, wanted text, about text, times_out_at timestamptz
) RETURNS SETOF outside_event LANGUAGE plpgsql AS $$
DECLARE
  place text;
BEGIN
  PERFORM lock_event(tenant, wanted, about);
  SELECT workspace_id INTO place FROM run WHERE id = waiting;
  RETURN QUERY
    UPDATE outside_event SET run_id = waiting, step = waiting_step, consumed_at = now
     WHERE tenant_id = tenant AND id = (
       SELECT kept.id FROM outside_event AS kept
        WHERE kept.tenant_id = tenant AND kept.type = wanted AND kept.correlation = about
          AND kept.consumed_at IS NULL AND kept.expires_at > now
          AND (kept.workspace_id IS NULL OR kept.workspace_id = place)
        ORDER BY kept.number LIMIT 1)
    RETURNING *;
  IF NOT FOUND THEN
    INSERT INTO outside_wait (run_id, step, tenant_id, workspace_id, type, correlation, timeout_at)
    VALUES (waiting, waiting_step, tenant, place, wanted, about, times_out_at);
  END IF;
END $$;

-- ---------------------------------------------------------------- undoing

ALTER TABLE run DROP CONSTRAINT run_reason_known;
ALTER TABLE run ADD CONSTRAINT run_reason_known CHECK (reason IN ('completed', 'rejected', 'approval_expired', 'policy_denied', 'attempts_exhausted', 'terminal_error', 'timed_out', 'external_timeout', 'orphaned', 'resume_failed', 'compensation_failed', 'cap_exceeded', 'canceled_by_user', 'canceled_by_parent', 'interrupted'));

DROP TRIGGER run_moves ON run;
CREATE TRIGGER run_moves BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND CASE OLD.status
    WHEN 'pending' THEN NEW.status NOT IN ('running', 'waiting_approval', 'waiting_external', 'canceling', 'failed', 'canceled')
    WHEN 'running' THEN NEW.status NOT IN ('waiting_approval', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'waiting_approval' THEN NEW.status NOT IN ('running', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'waiting_external' THEN NEW.status NOT IN ('running', 'waiting_approval', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'canceling' THEN NEW.status NOT IN ('canceling', 'failed', 'canceled')
    ELSE true
    END)
  EXECUTE FUNCTION refuse_move();

ALTER TABLE entry DROP CONSTRAINT entry_transition;
ALTER TABLE entry ADD CONSTRAINT entry_transition CHECK (
    CASE
    WHEN event IS NULL THEN from_state IS NULL AND to_state IS NULL
    WHEN to_state IS NULL THEN false
    WHEN from_state IS NULL THEN step IS NULL AND event = 'create' AND to_state = 'pending'
    ELSE CASE WHEN step IS NULL THEN 'run:' ELSE 'step:' END
      || from_state || ':' || event || ':' || to_state = ANY ('{
      run:pending:start:running, run:pending:hold:waiting_approval, run:pending:park:waiting_external,
      run:pending:fail:failed, run:pending:cancel:canceling, run:pending:cancel:canceled,
      run:pending:compensate:canceling, run:running:hold:waiting_approval, run:running:park:waiting_external,
      run:running:succeed:succeeded, run:running:fail:failed, run:running:cancel:canceling,
      run:running:cancel:canceled, run:running:compensate:canceling, run:waiting_approval:resume:running,
      run:waiting_approval:park:waiting_external, run:waiting_approval:succeed:succeeded,
      run:waiting_approval:fail:failed, run:waiting_approval:cancel:canceling, run:waiting_approval:cancel:canceled,
      run:waiting_approval:compensate:canceling, run:waiting_external:resume:running,
      run:waiting_external:hold:waiting_approval, run:waiting_external:succeed:succeeded,
      run:waiting_external:fail:failed, run:waiting_external:cancel:canceling, run:waiting_external:cancel:canceled,
      run:waiting_external:compensate:canceling, run:canceling:stopped:canceled, run:canceling:fail:failed,
      run:canceling:compensate:canceling, step:pending:claim:running, step:pending:open:waiting_approval,
      step:pending:park:waiting_external, step:pending:skip:skipped, step:pending:cancel:canceled,
      step:running:reclaim:running, step:running:succeed:succeeded, step:running:retry:pending,
      step:running:fail:failed, step:running:hold:waiting_approval, step:running:park:waiting_external,
      step:running:cancel:canceled, step:waiting_approval:release:pending, step:waiting_approval:grant:succeeded,
      step:waiting_approval:refuse:failed, step:waiting_approval:refuse:skipped,
      step:waiting_approval:cancel:canceled, step:waiting_external:resume:pending,
      step:waiting_external:arrive:succeeded, step:waiting_external:fail:failed, step:waiting_external:cancel:canceled
    }'::text[]) END);
