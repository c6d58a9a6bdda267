-- The same rules, in less text. The server reads the text of a table's constraints and triggers anew for every statement,
-- byte by byte: with the lists of states in it, that took a fifth of the time of a start or an append. A domain's constraint
-- is read once for each connection, and so is a function. The constraints keep their names.

-- ---------------------------------------------------------------- run

CREATE DOMAIN run_state AS text CONSTRAINT run_status CHECK (VALUE IN ('pending', 'running', 'waiting_approval', 'waiting_external', 'canceling', 'succeeded', 'failed', 'canceled'));
CREATE DOMAIN run_without_completed_at AS text CONSTRAINT run_completed_at CHECK (VALUE IN ('pending', 'running', 'waiting_approval', 'waiting_external', 'canceling'));
CREATE DOMAIN run_with_completed_at AS text CONSTRAINT run_completed_at CHECK (VALUE IN ('succeeded', 'failed', 'canceled'));
CREATE DOMAIN run_without_reason AS text CONSTRAINT run_reason CHECK (VALUE IN ('pending', 'running', 'waiting_approval', 'waiting_external', 'canceling'));
CREATE DOMAIN run_with_reason AS text CONSTRAINT run_reason CHECK (VALUE IN ('succeeded', 'failed', 'canceled'));
CREATE DOMAIN run_leased AS text CONSTRAINT run_waiting_is_free CHECK (VALUE IN ('running', 'canceling'));
CREATE DOMAIN run_known_reason AS text CONSTRAINT run_reason_known CHECK (VALUE IN (
  'completed', 'rejected', 'approval_expired', 'policy_denied', 'attempts_exhausted', 'terminal_error',
  'timed_out', 'external_timeout', 'orphaned', 'resume_failed', 'compensation_failed', 'cap_exceeded',
  'canceled_by_user', 'canceled_by_parent', 'interrupted'
));
ALTER TABLE run
  DROP CONSTRAINT run_status,
  DROP CONSTRAINT run_completed_at,
  DROP CONSTRAINT run_reason,
  DROP CONSTRAINT run_waiting_is_free,
  DROP CONSTRAINT run_reason_known,
  ADD CONSTRAINT run_status CHECK (status::run_state IS NOT NULL),
  ADD CONSTRAINT run_completed_at CHECK (CASE WHEN completed_at IS NULL THEN status::run_without_completed_at ELSE status::run_with_completed_at END IS NOT NULL),
  ADD CONSTRAINT run_reason CHECK (CASE WHEN reason IS NULL THEN status::run_without_reason ELSE status::run_with_reason END IS NOT NULL),
  ADD CONSTRAINT run_waiting_is_free CHECK (lease_worker IS NULL OR status::run_leased IS NOT NULL),
  ADD CONSTRAINT run_reason_known CHECK (reason IS NULL OR reason::run_known_reason IS NOT NULL);
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
DROP TRIGGER run_moves ON run;
DROP TRIGGER run_final ON run;
CREATE TRIGGER run_moves BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT run_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER run_final BEFORE UPDATE ON run FOR EACH ROW
  WHEN (OLD.completed_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();

-- ---------------------------------------------------------------- approval

CREATE DOMAIN approval_state AS text CONSTRAINT approval_status CHECK (VALUE IN ('requested', 'approved', 'rejected', 'expired', 'canceled'));
CREATE DOMAIN approval_without_resolved_at AS text CONSTRAINT approval_resolved_at CHECK (VALUE IN ('requested'));
CREATE DOMAIN approval_with_resolved_at AS text CONSTRAINT approval_resolved_at CHECK (VALUE IN ('approved', 'rejected', 'expired', 'canceled'));
ALTER TABLE approval
  DROP CONSTRAINT approval_status,
  DROP CONSTRAINT approval_resolved_at,
  ADD CONSTRAINT approval_status CHECK (status::approval_state IS NOT NULL),
  ADD CONSTRAINT approval_resolved_at CHECK (CASE WHEN resolved_at IS NULL THEN status::approval_without_resolved_at ELSE status::approval_with_resolved_at END IS NOT NULL);
CREATE FUNCTION approval_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'requested' THEN after IN ('approved', 'rejected', 'expired', 'canceled')
    ELSE false
  END;
END $$;
DROP TRIGGER approval_moves ON approval;
DROP TRIGGER approval_final ON approval;
CREATE TRIGGER approval_moves BEFORE UPDATE ON approval FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT approval_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER approval_final BEFORE UPDATE ON approval FOR EACH ROW
  WHEN (OLD.resolved_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();

-- ---------------------------------------------------------------- receipt

CREATE DOMAIN receipt_state AS text CONSTRAINT receipt_status CHECK (VALUE IN ('attempted', 'in_doubt', 'failed', 'succeeded'));
CREATE DOMAIN receipt_without_completed_at AS text CONSTRAINT receipt_completed_at CHECK (VALUE IN ('attempted', 'in_doubt'));
CREATE DOMAIN receipt_with_completed_at AS text CONSTRAINT receipt_completed_at CHECK (VALUE IN ('failed', 'succeeded'));
ALTER TABLE receipt
  DROP CONSTRAINT receipt_status,
  DROP CONSTRAINT receipt_completed_at,
  ADD CONSTRAINT receipt_status CHECK (status::receipt_state IS NOT NULL),
  ADD CONSTRAINT receipt_completed_at CHECK (CASE WHEN completed_at IS NULL THEN status::receipt_without_completed_at ELSE status::receipt_with_completed_at END IS NOT NULL);
CREATE FUNCTION receipt_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'attempted' THEN after IN ('attempted', 'in_doubt', 'failed', 'succeeded')
    WHEN 'in_doubt' THEN after IN ('failed', 'succeeded')
    WHEN 'failed' THEN after IN ('attempted')
    ELSE false
  END;
END $$;
DROP TRIGGER receipt_moves ON receipt;
DROP TRIGGER receipt_final ON receipt;
CREATE TRIGGER receipt_moves BEFORE UPDATE ON receipt FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT receipt_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER receipt_final BEFORE UPDATE ON receipt FOR EACH ROW
  WHEN (OLD.status IN ('succeeded'))
  EXECUTE FUNCTION refuse_change();

-- ---------------------------------------------------------------- worker

CREATE DOMAIN worker_state AS text CONSTRAINT worker_status CHECK (VALUE IN ('idle', 'running', 'paused', 'completed', 'failed', 'terminated'));
CREATE DOMAIN worker_without_stopped_at AS text CONSTRAINT worker_stopped_at CHECK (VALUE IN ('idle', 'running', 'paused'));
CREATE DOMAIN worker_with_stopped_at AS text CONSTRAINT worker_stopped_at CHECK (VALUE IN ('completed', 'failed', 'terminated'));
ALTER TABLE worker
  DROP CONSTRAINT worker_status,
  DROP CONSTRAINT worker_stopped_at,
  ADD CONSTRAINT worker_status CHECK (status::worker_state IS NOT NULL),
  ADD CONSTRAINT worker_stopped_at CHECK (CASE WHEN stopped_at IS NULL THEN status::worker_without_stopped_at ELSE status::worker_with_stopped_at END IS NOT NULL);
CREATE FUNCTION worker_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'idle' THEN after IN ('running', 'terminated')
    WHEN 'running' THEN after IN ('paused', 'completed', 'failed', 'terminated')
    WHEN 'paused' THEN after IN ('running', 'terminated')
    ELSE false
  END;
END $$;
DROP TRIGGER worker_moves ON worker;
DROP TRIGGER worker_final ON worker;
CREATE TRIGGER worker_moves BEFORE UPDATE ON worker FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT worker_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER worker_final BEFORE UPDATE ON worker FOR EACH ROW
  WHEN (OLD.stopped_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();

-- ---------------------------------------------------------------- job

CREATE DOMAIN job_state AS text CONSTRAINT job_status CHECK (VALUE IN ('submitted', 'pending', 'running', 'completed', 'failed', 'canceled'));
CREATE DOMAIN job_without_completed_at AS text CONSTRAINT job_completed_at CHECK (VALUE IN ('submitted', 'pending', 'running'));
CREATE DOMAIN job_with_completed_at AS text CONSTRAINT job_completed_at CHECK (VALUE IN ('completed', 'failed', 'canceled'));
ALTER TABLE job
  DROP CONSTRAINT job_status,
  DROP CONSTRAINT job_completed_at,
  ADD CONSTRAINT job_status CHECK (status::job_state IS NOT NULL),
  ADD CONSTRAINT job_completed_at CHECK (CASE WHEN completed_at IS NULL THEN status::job_without_completed_at ELSE status::job_with_completed_at END IS NOT NULL);
CREATE FUNCTION job_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'submitted' THEN after IN ('pending', 'failed', 'canceled')
    WHEN 'pending' THEN after IN ('running', 'canceled')
    WHEN 'running' THEN after IN ('completed', 'failed', 'canceled')
    ELSE false
  END;
END $$;
DROP TRIGGER job_moves ON job;
DROP TRIGGER job_final ON job;
CREATE TRIGGER job_moves BEFORE UPDATE ON job FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT job_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER job_final BEFORE UPDATE ON job FOR EACH ROW
  WHEN (OLD.completed_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();

-- ---------------------------------------------------------------- idempotency

CREATE DOMAIN idempotency_state AS text CONSTRAINT idempotency_status CHECK (VALUE IN ('processing', 'failed', 'completed'));
CREATE DOMAIN idempotency_without_response_body AS text CONSTRAINT idempotency_response_body CHECK (VALUE IN ('processing', 'failed'));
CREATE DOMAIN idempotency_with_response_body AS text CONSTRAINT idempotency_response_body CHECK (VALUE IN ('completed'));
CREATE DOMAIN idempotency_without_error AS text CONSTRAINT idempotency_error CHECK (VALUE IN ('processing', 'completed'));
CREATE DOMAIN idempotency_with_error AS text CONSTRAINT idempotency_error CHECK (VALUE IN ('failed'));
CREATE DOMAIN idempotency_without_lock_expires_at AS text CONSTRAINT idempotency_lock_expires_at CHECK (VALUE IN ('failed', 'completed'));
CREATE DOMAIN idempotency_with_lock_expires_at AS text CONSTRAINT idempotency_lock_expires_at CHECK (VALUE IN ('processing'));
ALTER TABLE idempotency
  DROP CONSTRAINT idempotency_status,
  DROP CONSTRAINT idempotency_response_body,
  DROP CONSTRAINT idempotency_error,
  DROP CONSTRAINT idempotency_lock_expires_at,
  ADD CONSTRAINT idempotency_status CHECK (status::idempotency_state IS NOT NULL),
  ADD CONSTRAINT idempotency_response_body CHECK (CASE WHEN response_body IS NULL THEN status::idempotency_without_response_body ELSE status::idempotency_with_response_body END IS NOT NULL),
  ADD CONSTRAINT idempotency_error CHECK (CASE WHEN error IS NULL THEN status::idempotency_without_error ELSE status::idempotency_with_error END IS NOT NULL),
  ADD CONSTRAINT idempotency_lock_expires_at CHECK (CASE WHEN lock_expires_at IS NULL THEN status::idempotency_without_lock_expires_at ELSE status::idempotency_with_lock_expires_at END IS NOT NULL);

-- ---------------------------------------------------------------- entry

CREATE DOMAIN entry_move AS text CONSTRAINT entry_transition CHECK (VALUE IN (
  'run {NULL,NULL,NULL}', 'step {NULL,NULL,NULL}', 'run {NULL,create,pending}', 'run {pending,start,running}',
  'run {pending,hold,waiting_approval}', 'run {pending,park,waiting_external}', 'run {pending,fail,failed}',
  'run {pending,cancel,canceling}', 'run {pending,cancel,canceled}', 'run {pending,compensate,canceling}',
  'run {running,hold,waiting_approval}', 'run {running,park,waiting_external}',
  'run {running,succeed,succeeded}', 'run {running,fail,failed}', 'run {running,cancel,canceling}',
  'run {running,cancel,canceled}', 'run {running,compensate,canceling}', 'run {waiting_approval,resume,running}',
  'run {waiting_approval,park,waiting_external}', 'run {waiting_approval,succeed,succeeded}',
  'run {waiting_approval,fail,failed}', 'run {waiting_approval,cancel,canceling}',
  'run {waiting_approval,cancel,canceled}', 'run {waiting_approval,compensate,canceling}',
  'run {waiting_external,resume,running}', 'run {waiting_external,hold,waiting_approval}',
  'run {waiting_external,succeed,succeeded}', 'run {waiting_external,fail,failed}',
  'run {waiting_external,cancel,canceling}', 'run {waiting_external,cancel,canceled}',
  'run {waiting_external,compensate,canceling}', 'run {canceling,stopped,canceled}',
  'run {canceling,fail,failed}', 'run {canceling,compensate,canceling}', 'step {pending,claim,running}',
  'step {pending,open,waiting_approval}', 'step {pending,park,waiting_external}', 'step {pending,skip,skipped}',
  'step {pending,cancel,canceled}', 'step {running,reclaim,running}', 'step {running,succeed,succeeded}',
  'step {running,retry,pending}', 'step {running,fail,failed}', 'step {running,hold,waiting_approval}',
  'step {running,park,waiting_external}', 'step {running,cancel,canceled}',
  'step {waiting_approval,release,pending}', 'step {waiting_approval,grant,succeeded}',
  'step {waiting_approval,refuse,failed}', 'step {waiting_approval,refuse,skipped}',
  'step {waiting_approval,cancel,canceled}', 'step {waiting_external,resume,pending}',
  'step {waiting_external,arrive,succeeded}', 'step {waiting_external,fail,failed}',
  'step {waiting_external,cancel,canceled}'
));
ALTER TABLE entry
  DROP CONSTRAINT entry_transition,
  ADD CONSTRAINT entry_transition CHECK (
    (CASE WHEN step IS NULL THEN 'run ' ELSE 'step ' END || ARRAY[from_state, event, to_state]::text)::entry_move IS NOT NULL
  );
