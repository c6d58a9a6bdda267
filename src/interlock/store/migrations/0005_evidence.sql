-- Evidence: which ended runs still need their bundle, and where the bundles are.

-- Written by the sealer, in the transaction that seals a run's last entry: whoever reads it finds the whole run in the
-- chain, and whoever ends a run writes nothing for it. While a bundle is being made `due_at` is when it may be tried
-- again should its maker die.
CREATE TABLE evidence_due (
  run_id     uuid PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  due_at     timestamptz NOT NULL,
  attempts   int NOT NULL DEFAULT 0
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX evidence_due_next ON evidence_due (due_at);

CREATE TABLE evidence (
  run_id     uuid PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  name       text NOT NULL,
  sha256     text NOT NULL CHECK (sha256 ~ '^[0-9a-f]{64}$'),
  key_id     text NOT NULL,
  made_at    timestamptz NOT NULL
);
CREATE TRIGGER evidence_append_only BEFORE UPDATE OR DELETE ON evidence FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER evidence_keep BEFORE TRUNCATE ON evidence FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();

-- Runs that were sealed before there was evidence.
INSERT INTO evidence_due (run_id, tenant_id, due_at)
SELECT run.id, run.tenant_id, now()
  FROM run
 WHERE run.completed_at IS NOT NULL
   AND EXISTS (SELECT FROM seal WHERE seal.run_id = run.id AND seal.seq = run.seq);

-- A run's approvals are looked for by its id: by its bundle, and by every cancel.
CREATE INDEX approval_of_run ON approval (run_id, id);
