-- Effects: what became of their reversals.

-- The state of a reversal. Another run may take over only a reversal that was given up: its run ended without reversing
-- the effect. A run that is not visible yet has just claimed it.
CREATE OR REPLACE FUNCTION interlock.reversal_state(asked interlock.reversal) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN run.status = 'succeeded' OR 'succeeded' = ANY(tries.states) THEN 'done'
    WHEN run.completed_at IS NOT NULL AND tries.states <@ ARRAY['failed'] THEN 'given_up'
    ELSE 'under_way'
  END
  FROM (SELECT ARRAY(SELECT status::text FROM interlock.receipt WHERE run_id = asked.run_id AND step = asked.step) AS states) AS tries
  LEFT JOIN interlock.run ON run.id = asked.run_id
$$;
