-- Effects outlive the run that made them: in the runs that continue it.

-- The first of the runs that continue each other; NULL in that one itself. The keys of effects are made of it, so that
-- what a continued run does again has the key that it had before, and the system acted on can tell that it is the same.
ALTER TABLE run ADD COLUMN root_id uuid;

-- Which of the effects under a key it is: those before it were undone, and a key whose effect was undone is free again.
-- A column of its own, because a receipt that succeeded is final.
ALTER TABLE receipt
  ADD COLUMN nth int NOT NULL DEFAULT 1,
  DROP CONSTRAINT receipt_tenant_id_idempotency_key_key,
  ADD UNIQUE (tenant_id, idempotency_key, nth);

-- The step by which the run undoes it: of a run that was started for this it is the only one.
ALTER TABLE reversal ADD COLUMN step text NOT NULL DEFAULT 'undo';
UPDATE reversal SET step = receipt.step || ':undo'
  FROM receipt WHERE receipt.id = reversal.receipt_id AND receipt.run_id = reversal.run_id;
ALTER TABLE reversal ALTER COLUMN step DROP DEFAULT;

-- What became of undoing an effect. Somebody else may try only what was given up: that run has ended, and did not undo
-- it. A run that cannot be seen yet has just claimed it.
CREATE FUNCTION undoing(asked reversal) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN run.status = 'succeeded' OR 'succeeded' = ANY(tries.states) THEN 'done'
    WHEN run.completed_at IS NOT NULL AND tries.states <@ ARRAY['failed'] THEN 'given_up'
    ELSE 'under_way'
  END
  FROM (SELECT ARRAY(SELECT status FROM receipt WHERE run_id = asked.run_id AND step = asked.step) AS states) AS tries
  LEFT JOIN run ON run.id = asked.run_id
$$;
