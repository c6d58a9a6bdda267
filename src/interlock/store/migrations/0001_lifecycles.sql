-- Lifecycles: the states of each machine, the allowed moves, and the checks that refuse everything else.
--
-- The states and moves in this file are rendered from interlock.lifecycle, the only place that defines them; a test
-- compares what the database enforces with the current rendering. The later files create the tables that have a
-- lifecycle. Their checks cast `status` to these domains, and to `*_with_x` or `*_without_x` where a column x is set in
-- exactly some of the states. Their triggers call `*_may_move` to refuse a move.
--
-- The lists are not in the tables' own constraints, because the server parses the text of a table's constraints and
-- triggers again for every statement, and that took a fifth of the time of a start or an append. A domain's constraint
-- is read once for each connection, and so is a function. The constraint of a domain has the name of the constraint
-- that casts to it, so that the error names the broken rule.

-- ---------------------------------------------------------------- epochs

-- The identity of this database, and how often it was restored to an earlier moment. The first migration and
-- `interlock db restored` begin an epoch. The id of the first epoch is the database's id: a copy has the same id.
CREATE TABLE epoch (
  number       int PRIMARY KEY CHECK (number > 0),
  id           uuid NOT NULL DEFAULT gen_random_uuid(),
  began_at     timestamptz NOT NULL,
  restored_to  timestamptz CHECK ((restored_to IS NULL) = (number = 1))
);
INSERT INTO epoch (number, began_at) VALUES (1, now());

-- ---------------------------------------------------------------- refusals

CREATE FUNCTION refuse_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% cannot go from % to %', TG_TABLE_NAME, OLD.status, NEW.status USING ERRCODE = 'check_violation';
END $$;

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% % has ended and cannot be changed', TG_TABLE_NAME, OLD.id USING ERRCODE = 'check_violation';
END $$;

-- Retention drops whole partitions; no other statement may change or delete entries.
CREATE FUNCTION refuse_rewrite() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the journal is append-only: % refused', TG_OP USING ERRCODE = 'check_violation';
END $$;

-- ---------------------------------------------------------------- run

CREATE DOMAIN run_state AS text
  CONSTRAINT run_status CHECK (VALUE IN (
    'pending', 'running', 'waiting_approval', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled'
  ));
CREATE DOMAIN run_without_completed_at AS text
  CONSTRAINT run_completed_at CHECK (VALUE IN (
    'pending', 'running', 'waiting_approval', 'waiting_external', 'canceling'
  ));
CREATE DOMAIN run_with_completed_at AS text
  CONSTRAINT run_completed_at CHECK (VALUE IN ('succeeded', 'failed', 'canceled'));
CREATE DOMAIN run_without_reason AS text
  CONSTRAINT run_reason CHECK (VALUE IN ('pending', 'running', 'waiting_approval', 'waiting_external', 'canceling'));
CREATE DOMAIN run_with_reason AS text
  CONSTRAINT run_reason CHECK (VALUE IN ('succeeded', 'failed', 'canceled'));

-- The states of a run while a worker holds it: neither waiting nor ended.
CREATE DOMAIN run_leased AS text
  CONSTRAINT run_waiting_is_free CHECK (VALUE IN ('running', 'canceling'));

CREATE DOMAIN run_known_reason AS text
  CONSTRAINT run_reason_known CHECK (VALUE IN (
    'completed', 'rejected', 'approval_expired', 'policy_denied', 'attempts_exhausted', 'terminal_error',
    'timed_out', 'external_timeout', 'orphaned', 'resume_failed', 'compensation_failed', 'cap_exceeded',
    'canceled_by_user', 'canceled_by_parent', 'interrupted'
  ));

CREATE FUNCTION run_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'pending' THEN after IN ('running', 'waiting_approval', 'waiting_external', 'canceling', 'failed', 'canceled')
    WHEN 'running' THEN after IN ('waiting_approval', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'waiting_approval' THEN after IN ('running', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'waiting_external' THEN after IN ('running', 'waiting_approval', 'canceling', 'succeeded', 'failed', 'canceled')
    WHEN 'canceling' THEN after IN ('canceling', 'failed', 'canceled')
    ELSE false
  END;
END $$;

-- ---------------------------------------------------------------- entries of the journal

-- A transition of the run, or of the step that the entry names, or no transition.
CREATE DOMAIN entry_move AS text
  CONSTRAINT entry_transition CHECK (VALUE IN (
    'run {NULL,NULL,NULL}', 'step {NULL,NULL,NULL}', 'run {NULL,create,pending}', 'run {pending,start,running}',
    'run {pending,hold,waiting_approval}', 'run {pending,park,waiting_external}', 'run {pending,fail,failed}',
    'run {pending,cancel,canceling}', 'run {pending,cancel,canceled}', 'run {pending,compensate,canceling}',
    'run {running,hold,waiting_approval}', 'run {running,park,waiting_external}', 'run {running,succeed,succeeded}',
    'run {running,fail,failed}', 'run {running,cancel,canceling}', 'run {running,cancel,canceled}',
    'run {running,compensate,canceling}', 'run {waiting_approval,resume,running}',
    'run {waiting_approval,park,waiting_external}', 'run {waiting_approval,succeed,succeeded}',
    'run {waiting_approval,fail,failed}', 'run {waiting_approval,cancel,canceling}',
    'run {waiting_approval,cancel,canceled}', 'run {waiting_approval,compensate,canceling}',
    'run {waiting_external,resume,running}', 'run {waiting_external,hold,waiting_approval}',
    'run {waiting_external,succeed,succeeded}', 'run {waiting_external,fail,failed}',
    'run {waiting_external,cancel,canceling}', 'run {waiting_external,cancel,canceled}',
    'run {waiting_external,compensate,canceling}', 'run {canceling,stopped,canceled}', 'run {canceling,fail,failed}',
    'run {canceling,compensate,canceling}', 'step {pending,claim,running}', 'step {pending,open,waiting_approval}',
    'step {pending,park,waiting_external}', 'step {pending,skip,skipped}', 'step {pending,cancel,canceled}',
    'step {running,reclaim,running}', 'step {running,succeed,succeeded}', 'step {running,retry,pending}',
    'step {running,fail,failed}', 'step {running,hold,waiting_approval}', 'step {running,park,waiting_external}',
    'step {running,cancel,canceled}', 'step {waiting_approval,release,pending}',
    'step {waiting_approval,grant,succeeded}', 'step {waiting_approval,refuse,failed}',
    'step {waiting_approval,refuse,skipped}', 'step {waiting_approval,cancel,canceled}',
    'step {waiting_external,resume,pending}', 'step {waiting_external,arrive,succeeded}',
    'step {waiting_external,fail,failed}', 'step {waiting_external,cancel,canceled}'
  ));

-- ---------------------------------------------------------------- approval

CREATE DOMAIN approval_state AS text
  CONSTRAINT approval_status CHECK (VALUE IN ('requested', 'approved', 'rejected', 'expired', 'canceled'));
CREATE DOMAIN approval_without_resolved_at AS text
  CONSTRAINT approval_resolved_at CHECK (VALUE IN ('requested'));
CREATE DOMAIN approval_with_resolved_at AS text
  CONSTRAINT approval_resolved_at CHECK (VALUE IN ('approved', 'rejected', 'expired', 'canceled'));

CREATE FUNCTION approval_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'requested' THEN after IN ('approved', 'rejected', 'expired', 'canceled')
    ELSE false
  END;
END $$;

-- ---------------------------------------------------------------- receipt

CREATE DOMAIN receipt_state AS text
  CONSTRAINT receipt_status CHECK (VALUE IN ('attempted', 'in_doubt', 'failed', 'succeeded'));
CREATE DOMAIN receipt_without_completed_at AS text
  CONSTRAINT receipt_completed_at CHECK (VALUE IN ('attempted', 'in_doubt'));
CREATE DOMAIN receipt_with_completed_at AS text
  CONSTRAINT receipt_completed_at CHECK (VALUE IN ('failed', 'succeeded'));

CREATE FUNCTION receipt_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'attempted' THEN after IN ('attempted', 'in_doubt', 'failed', 'succeeded')
    WHEN 'in_doubt' THEN after IN ('failed', 'succeeded')
    WHEN 'failed' THEN after IN ('attempted')
    ELSE false
  END;
END $$;

-- ---------------------------------------------------------------- worker

CREATE DOMAIN worker_state AS text
  CONSTRAINT worker_status CHECK (VALUE IN ('idle', 'running', 'paused', 'completed', 'failed', 'terminated'));
CREATE DOMAIN worker_without_stopped_at AS text
  CONSTRAINT worker_stopped_at CHECK (VALUE IN ('idle', 'running', 'paused'));
CREATE DOMAIN worker_with_stopped_at AS text
  CONSTRAINT worker_stopped_at CHECK (VALUE IN ('completed', 'failed', 'terminated'));

CREATE FUNCTION worker_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'idle' THEN after IN ('running', 'terminated')
    WHEN 'running' THEN after IN ('paused', 'completed', 'failed', 'terminated')
    WHEN 'paused' THEN after IN ('running', 'terminated')
    ELSE false
  END;
END $$;

-- ---------------------------------------------------------------- job

CREATE DOMAIN job_state AS text
  CONSTRAINT job_status CHECK (VALUE IN ('submitted', 'pending', 'running', 'completed', 'failed', 'canceled'));
CREATE DOMAIN job_without_completed_at AS text
  CONSTRAINT job_completed_at CHECK (VALUE IN ('submitted', 'pending', 'running'));
CREATE DOMAIN job_with_completed_at AS text
  CONSTRAINT job_completed_at CHECK (VALUE IN ('completed', 'failed', 'canceled'));

CREATE FUNCTION job_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'submitted' THEN after IN ('pending', 'failed', 'canceled')
    WHEN 'pending' THEN after IN ('running', 'canceled')
    WHEN 'running' THEN after IN ('completed', 'failed', 'canceled')
    ELSE false
  END;
END $$;

-- ---------------------------------------------------------------- idempotency

-- Every move is allowed: an expired record starts again from any state.
CREATE DOMAIN idempotency_state AS text
  CONSTRAINT idempotency_status CHECK (VALUE IN ('processing', 'failed', 'completed'));
CREATE DOMAIN idempotency_without_response_body AS text
  CONSTRAINT idempotency_response_body CHECK (VALUE IN ('processing', 'failed'));
CREATE DOMAIN idempotency_with_response_body AS text
  CONSTRAINT idempotency_response_body CHECK (VALUE IN ('completed'));
CREATE DOMAIN idempotency_without_error AS text
  CONSTRAINT idempotency_error CHECK (VALUE IN ('processing', 'completed'));
CREATE DOMAIN idempotency_with_error AS text
  CONSTRAINT idempotency_error CHECK (VALUE IN ('failed'));
CREATE DOMAIN idempotency_without_lock_expires_at AS text
  CONSTRAINT idempotency_lock_expires_at CHECK (VALUE IN ('failed', 'completed'));
CREATE DOMAIN idempotency_with_lock_expires_at AS text
  CONSTRAINT idempotency_lock_expires_at CHECK (VALUE IN ('processing'));
