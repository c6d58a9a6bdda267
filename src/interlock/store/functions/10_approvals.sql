-- Approvals: votes are final once the approval is decided.

-- A voter may change the vote while the approval is open. No other change to a vote is possible.
CREATE OR REPLACE FUNCTION interlock.refuse_late_vote() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (SELECT FROM interlock.approval WHERE id = OLD.approval_id AND resolved_at IS NOT NULL) THEN
    RAISE EXCEPTION 'votes are append-only: the approval is decided' USING ERRCODE = 'check_violation';
  END IF;
  RETURN NEW;
END $$;
