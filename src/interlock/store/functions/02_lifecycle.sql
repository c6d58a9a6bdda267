-- Lifecycles: what the triggers call to refuse a change. The *_may_move functions are rendered from interlock.lifecycle.

CREATE OR REPLACE FUNCTION interlock.refuse_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% cannot go from % to %', TG_TABLE_NAME, OLD.status, NEW.status USING ERRCODE = 'check_violation';
END $$;

CREATE OR REPLACE FUNCTION interlock.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '% % has ended and cannot be changed', TG_TABLE_NAME, OLD.id USING ERRCODE = 'check_violation';
END $$;

-- Retention drops whole partitions; no other statement may change or delete entries.
CREATE OR REPLACE FUNCTION interlock.refuse_rewrite() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the journal is append-only: % refused', TG_OP USING ERRCODE = 'check_violation';
END $$;

CREATE OR REPLACE FUNCTION interlock.run_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
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

CREATE OR REPLACE FUNCTION interlock.approval_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'requested' THEN after IN ('approved', 'rejected', 'expired', 'canceled')
    ELSE false
  END;
END $$;

CREATE OR REPLACE FUNCTION interlock.receipt_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'attempted' THEN after IN ('attempted', 'in_doubt', 'failed', 'succeeded')
    WHEN 'in_doubt' THEN after IN ('failed', 'succeeded')
    WHEN 'failed' THEN after IN ('attempted')
    ELSE false
  END;
END $$;

CREATE OR REPLACE FUNCTION interlock.worker_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'idle' THEN after IN ('running', 'terminated')
    WHEN 'running' THEN after IN ('paused', 'completed', 'failed', 'terminated')
    WHEN 'paused' THEN after IN ('running', 'terminated')
    ELSE false
  END;
END $$;

CREATE OR REPLACE FUNCTION interlock.job_may_move(before text, after text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
  RETURN CASE before
    WHEN 'submitted' THEN after IN ('pending', 'failed', 'canceled')
    WHEN 'pending' THEN after IN ('running', 'canceled')
    WHEN 'running' THEN after IN ('completed', 'failed', 'canceled')
    ELSE false
  END;
END $$;
