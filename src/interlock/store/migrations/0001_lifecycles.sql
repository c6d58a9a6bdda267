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
CREATE TABLE interlock.epoch (
  number       int PRIMARY KEY CHECK (number > 0),
  id           uuid NOT NULL DEFAULT gen_random_uuid(),
  began_at     timestamptz NOT NULL,
  restored_to  timestamptz CHECK ((restored_to IS NULL) = (number = 1))
);
INSERT INTO interlock.epoch (number, began_at) VALUES (1, now());

-- ---------------------------------------------------------------- run

CREATE DOMAIN interlock.run_state AS text
  CONSTRAINT run_status CHECK (VALUE IN (
    'pending', 'running', 'waiting_approval', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled'
  ));
CREATE DOMAIN interlock.run_without_completed_at AS text
  CONSTRAINT run_completed_at CHECK (VALUE IN (
    'pending', 'running', 'waiting_approval', 'waiting_external', 'canceling'
  ));
CREATE DOMAIN interlock.run_with_completed_at AS text
  CONSTRAINT run_completed_at CHECK (VALUE IN ('succeeded', 'failed', 'canceled'));
CREATE DOMAIN interlock.run_without_reason AS text
  CONSTRAINT run_reason CHECK (VALUE IN ('pending', 'running', 'waiting_approval', 'waiting_external', 'canceling'));
CREATE DOMAIN interlock.run_with_reason AS text
  CONSTRAINT run_reason CHECK (VALUE IN ('succeeded', 'failed', 'canceled'));

-- The states of a run while a worker holds it: neither waiting nor ended.
CREATE DOMAIN interlock.run_leased AS text
  CONSTRAINT run_waiting_is_free CHECK (VALUE IN ('running', 'canceling'));

CREATE DOMAIN interlock.run_known_reason AS text
  CONSTRAINT run_reason_known CHECK (VALUE IN (
    'completed', 'rejected', 'approval_expired', 'policy_denied', 'attempts_exhausted', 'terminal_error',
    'timed_out', 'external_timeout', 'orphaned', 'resume_failed', 'compensation_failed', 'cap_exceeded',
    'canceled_by_user', 'canceled_by_parent', 'interrupted'
  ));

-- ---------------------------------------------------------------- entries of the journal

-- A transition of the run, or of the step that the entry names, or no transition.
CREATE DOMAIN interlock.entry_move AS text
  CONSTRAINT journal_entry_transition CHECK (VALUE IN (
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

CREATE DOMAIN interlock.approval_state AS text
  CONSTRAINT approval_status CHECK (VALUE IN ('requested', 'approved', 'rejected', 'expired', 'canceled'));
CREATE DOMAIN interlock.approval_without_resolved_at AS text
  CONSTRAINT approval_resolved_at CHECK (VALUE IN ('requested'));
CREATE DOMAIN interlock.approval_with_resolved_at AS text
  CONSTRAINT approval_resolved_at CHECK (VALUE IN ('approved', 'rejected', 'expired', 'canceled'));

-- ---------------------------------------------------------------- receipt

CREATE DOMAIN interlock.receipt_state AS text
  CONSTRAINT receipt_status CHECK (VALUE IN ('attempted', 'in_doubt', 'failed', 'succeeded'));
CREATE DOMAIN interlock.receipt_without_completed_at AS text
  CONSTRAINT receipt_completed_at CHECK (VALUE IN ('attempted', 'in_doubt'));
CREATE DOMAIN interlock.receipt_with_completed_at AS text
  CONSTRAINT receipt_completed_at CHECK (VALUE IN ('failed', 'succeeded'));

-- ---------------------------------------------------------------- worker

CREATE DOMAIN interlock.worker_state AS text
  CONSTRAINT worker_status CHECK (VALUE IN ('idle', 'running', 'paused', 'completed', 'failed', 'terminated'));
CREATE DOMAIN interlock.worker_without_stopped_at AS text
  CONSTRAINT worker_stopped_at CHECK (VALUE IN ('idle', 'running', 'paused'));
CREATE DOMAIN interlock.worker_with_stopped_at AS text
  CONSTRAINT worker_stopped_at CHECK (VALUE IN ('completed', 'failed', 'terminated'));

-- ---------------------------------------------------------------- job

CREATE DOMAIN interlock.job_state AS text
  CONSTRAINT job_status CHECK (VALUE IN ('submitted', 'pending', 'running', 'completed', 'failed', 'canceled'));
CREATE DOMAIN interlock.job_without_completed_at AS text
  CONSTRAINT job_completed_at CHECK (VALUE IN ('submitted', 'pending', 'running'));
CREATE DOMAIN interlock.job_with_completed_at AS text
  CONSTRAINT job_completed_at CHECK (VALUE IN ('completed', 'failed', 'canceled'));

-- ---------------------------------------------------------------- idempotency

-- Every move is allowed: an expired record starts again from any state.
CREATE DOMAIN interlock.idempotency_state AS text
  CONSTRAINT idempotency_status CHECK (VALUE IN ('processing', 'failed', 'completed'));
CREATE DOMAIN interlock.idempotency_without_response_body AS text
  CONSTRAINT idempotency_response_body CHECK (VALUE IN ('processing', 'failed'));
CREATE DOMAIN interlock.idempotency_with_response_body AS text
  CONSTRAINT idempotency_response_body CHECK (VALUE IN ('completed'));
CREATE DOMAIN interlock.idempotency_without_error AS text
  CONSTRAINT idempotency_error CHECK (VALUE IN ('processing', 'completed'));
CREATE DOMAIN interlock.idempotency_with_error AS text
  CONSTRAINT idempotency_error CHECK (VALUE IN ('failed'));
CREATE DOMAIN interlock.idempotency_without_lock_expires_at AS text
  CONSTRAINT idempotency_lock_expires_at CHECK (VALUE IN ('failed', 'completed'));
CREATE DOMAIN interlock.idempotency_with_lock_expires_at AS text
  CONSTRAINT idempotency_lock_expires_at CHECK (VALUE IN ('processing'));
