-- Audit: every statement that adds journal entries leaves a note for the sealer.

-- By statement, not by row: an append of a hundred entries leaves one note.
CREATE OR REPLACE FUNCTION interlock.note_audit_pending() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO interlock.audit_pending (tenant_id, run_ids, seqs)
  SELECT tenant_id, array_agg(run_id), array_agg(seq) FROM added GROUP BY tenant_id;
  RETURN NULL;
END $$;
