-- Evidence: the contents of a bundle, and where the bundles are stored.

-- name: evidence_becomes_due
-- In the sealer's transaction: these runs ended, and all of their entries are in the chain now.
INSERT INTO interlock.evidence_due (run_id, tenant_id, due_at)
SELECT run_id, tenant_id, interlock.now() FROM unnest($1::uuid[], $2::uuid[]) AS ended (run_id, tenant_id)
ON CONFLICT (run_id) DO NOTHING;

-- name: claim_evidence
-- The oldest $1. If the signer dies, they are due again after $2 seconds, later with each attempt.
WITH due AS MATERIALIZED (
  SELECT run_id FROM interlock.evidence_due
   WHERE due_at <= interlock.now()
   ORDER BY due_at LIMIT $1
     FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE interlock.evidence_due
   SET attempts = attempts + 1,
       due_at = interlock.now() + make_interval(secs => least($2 * 2 ^ least(attempts, 10), 3600))
  FROM due
 WHERE evidence_due.run_id = due.run_id
RETURNING evidence_due.run_id, evidence_due.tenant_id, evidence_due.attempts;

-- name: is_evidence_due
SELECT EXISTS (SELECT FROM interlock.evidence_due WHERE tenant_id = $1 AND run_id = $2);

-- name: save_evidence
-- If two signers make the same bundle, the first one's row stays, and both get that file.
WITH made AS (
  INSERT INTO interlock.evidence (run_id, tenant_id, name, sha256, key_id, made_at)
  SELECT m.run_id, m.tenant_id, m.name, m.sha256, m.key_id, interlock.now()
    FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[]) AS m (run_id, tenant_id, name, sha256, key_id)
  ON CONFLICT (run_id) DO NOTHING
)
DELETE FROM interlock.evidence_due WHERE run_id = ANY($1::uuid[]);

-- name: get_evidence
SELECT run_id, name, sha256, key_id, made_at FROM interlock.evidence WHERE tenant_id = $1 AND run_id = $2;

-- name: evidence_due_below
-- Retention checks this before it deletes the runs below an id: a run without its entries has no bundle.
SELECT EXISTS (SELECT FROM interlock.evidence_due WHERE run_id < $1);

-- ---------------------------------------------------------------- contents of the bundles of many runs at once

-- name: runs_by_id
SELECT * FROM interlock.run WHERE id = ANY($1::uuid[]);

-- name: leaves_of_runs
-- Each run's journal as it is hashed, with each entry's position in the chain (NULL until it is sealed).
SELECT journal_entry.run_id, journal_entry.seq, journal_entry.tenant_id, journal_entry.at, journal_entry.type, journal_entry.step, journal_entry.from_state, journal_entry.event,
       journal_entry.to_state, journal_entry.attempt, journal_entry.token, journal_entry.actor,
       encode(sha256(convert_to(journal_entry.data::text, 'UTF8')), 'hex') AS data_sha256,
       encode(sha256(convert_to(journal_entry.output::text, 'UTF8')), 'hex') AS output_sha256,
       audit_link.position,
       CASE WHEN jsonb_typeof(journal_entry.data -> 'decision') = 'object' THEN journal_entry.data -> 'decision' END AS decision,
       journal_entry.data -> 'costs' AS costs
  FROM interlock.journal_entry
  LEFT JOIN interlock.audit_link ON audit_link.run_id = journal_entry.run_id AND audit_link.seq = journal_entry.seq
 WHERE journal_entry.run_id = ANY($1::uuid[])
 ORDER BY journal_entry.run_id, journal_entry.seq;

-- name: checkpoints_around_runs
-- For each run the two checkpoints that enclose positions $3 to $4: the last before, and the first that covers all.
SELECT placed.run_id, around.*
  FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bigint[]) AS placed (run_id, chain, first, last)
 CROSS JOIN LATERAL (
   (SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
      FROM interlock.checkpoint WHERE tenant_id = placed.chain AND position < placed.first
     ORDER BY position DESC, number DESC LIMIT 1)
   UNION ALL
   (SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
      FROM interlock.checkpoint WHERE tenant_id = placed.chain AND position >= placed.last
     ORDER BY position, number LIMIT 1)
 ) AS around
 ORDER BY placed.run_id, around.number;

-- name: approvals_of_runs
SELECT approval.* FROM interlock.approval WHERE run_id = ANY($1::uuid[]) ORDER BY run_id, id;

-- name: receipts_of_runs
SELECT receipt.*, reversal.run_id AS reversal_run_id, reversal.reason AS reversal_reason, reversal.asked_by AS reversed_by,
       reversal.asked_at AS reversed_at
  FROM interlock.receipt LEFT JOIN interlock.reversal ON reversal.receipt_id = receipt.id
 WHERE receipt.run_id = ANY($1::uuid[]) ORDER BY receipt.run_id, receipt.id;
