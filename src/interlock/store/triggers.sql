-- Triggers: what each table refuses, and what follows from its changes. Replaced on every migrate, after the functions.

-- ---------------------------------------------------------------- a status moves only as its lifecycle allows

CREATE OR REPLACE TRIGGER run_moves BEFORE UPDATE ON interlock.run FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT interlock.run_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION interlock.refuse_move();
CREATE OR REPLACE TRIGGER approval_moves BEFORE UPDATE ON interlock.approval FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT interlock.approval_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION interlock.refuse_move();
CREATE OR REPLACE TRIGGER receipt_moves BEFORE UPDATE ON interlock.receipt FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT interlock.receipt_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION interlock.refuse_move();
CREATE OR REPLACE TRIGGER worker_moves BEFORE UPDATE ON interlock.worker FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT interlock.worker_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION interlock.refuse_move();
CREATE OR REPLACE TRIGGER job_moves BEFORE UPDATE ON interlock.job FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT interlock.job_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION interlock.refuse_move();

-- ---------------------------------------------------------------- rows that have ended do not change

CREATE OR REPLACE TRIGGER run_final BEFORE UPDATE ON interlock.run FOR EACH ROW
  WHEN (OLD.completed_at IS NOT NULL)
  EXECUTE FUNCTION interlock.refuse_change();
CREATE OR REPLACE TRIGGER approval_final BEFORE UPDATE ON interlock.approval FOR EACH ROW
  WHEN (OLD.resolved_at IS NOT NULL)
  EXECUTE FUNCTION interlock.refuse_change();
-- Checks the status, since a failed receipt has ended too and may be attempted again.
CREATE OR REPLACE TRIGGER receipt_final BEFORE UPDATE ON interlock.receipt FOR EACH ROW
  WHEN (OLD.status IN ('succeeded'))
  EXECUTE FUNCTION interlock.refuse_change();
CREATE OR REPLACE TRIGGER job_final BEFORE UPDATE ON interlock.job FOR EACH ROW
  WHEN (OLD.completed_at IS NOT NULL)
  EXECUTE FUNCTION interlock.refuse_change();
-- An ended worker may change one thing: it may report that its tools stopped earlier than the deadline.
CREATE OR REPLACE TRIGGER worker_final BEFORE UPDATE ON interlock.worker FOR EACH ROW
  WHEN (OLD.stopped_at IS NOT NULL
        AND (to_jsonb(NEW) - 'may_act_until' <> to_jsonb(OLD) - 'may_act_until' OR NEW.may_act_until IS NULL
             OR NEW.may_act_until >= OLD.may_act_until))
  EXECUTE FUNCTION interlock.refuse_change();
CREATE OR REPLACE TRIGGER external_event_final BEFORE UPDATE ON interlock.external_event FOR EACH ROW
  WHEN (OLD.consumed_at IS NOT NULL)
  EXECUTE FUNCTION interlock.refuse_change();
CREATE OR REPLACE TRIGGER vote_final BEFORE UPDATE ON interlock.vote FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_late_vote();
CREATE OR REPLACE TRIGGER vote_keeps_its_voter BEFORE UPDATE ON interlock.vote FOR EACH ROW
  WHEN (ROW (OLD.approval_id, OLD.digest, OLD.voter) IS DISTINCT FROM ROW (NEW.approval_id, NEW.digest, NEW.voter))
  EXECUTE FUNCTION interlock.refuse_rewrite();

-- ---------------------------------------------------------------- rows that stay

-- Without its row, a run could not be found any more, although its journal exists.
CREATE OR REPLACE TRIGGER run_stays BEFORE DELETE ON interlock.run FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER run_keep BEFORE TRUNCATE ON interlock.run FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER vote_stays BEFORE DELETE ON interlock.vote FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER vote_keep BEFORE TRUNCATE ON interlock.vote FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();

CREATE OR REPLACE TRIGGER journal_entry_append_only BEFORE UPDATE OR DELETE ON interlock.journal_entry FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_rewrite();
-- TRUNCATE of a partition fires the partition's triggers and not the journal's: each partition gets one when created.
CREATE OR REPLACE TRIGGER journal_entry_keep BEFORE TRUNCATE ON interlock.journal_entry FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER journal_entry_keep BEFORE TRUNCATE ON interlock.journal_entry_rest FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER resource_event_append_only BEFORE UPDATE OR DELETE ON interlock.resource_event FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER resource_event_keep BEFORE TRUNCATE ON interlock.resource_event FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();

CREATE OR REPLACE TRIGGER audit_link_append_only BEFORE UPDATE OR DELETE ON interlock.audit_link FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER audit_link_keep BEFORE TRUNCATE ON interlock.audit_link FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER checkpoint_append_only BEFORE UPDATE OR DELETE ON interlock.checkpoint FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER checkpoint_keep BEFORE TRUNCATE ON interlock.checkpoint FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER evidence_append_only BEFORE UPDATE OR DELETE ON interlock.evidence FOR EACH ROW
  EXECUTE FUNCTION interlock.refuse_rewrite();
CREATE OR REPLACE TRIGGER evidence_keep BEFORE TRUNCATE ON interlock.evidence FOR EACH STATEMENT
  EXECUTE FUNCTION interlock.refuse_rewrite();

-- ---------------------------------------------------------------- what follows from a change

CREATE OR REPLACE TRIGGER journal_entry_note AFTER INSERT ON interlock.journal_entry REFERENCING NEW TABLE AS added
  FOR EACH STATEMENT EXECUTE FUNCTION interlock.note_audit_pending();

-- PostgreSQL has no CREATE OR REPLACE for constraint triggers.
DROP TRIGGER IF EXISTS queue_change_at_commit ON interlock.queue_change;
CREATE CONSTRAINT TRIGGER queue_change_at_commit AFTER INSERT ON interlock.queue_change DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION interlock.apply_queue_changes();
