-- Audit and evidence: entries to be sealed, the seals, the signed checkpoints, and the bundle of each ended run.
--
-- No entry is missed, although transactions commit in any order: the trigger writes a note of every statement's new
-- entries into `unsealed`, so an entry and its note become visible together. The sealer takes the notes it sees and
-- writes the seals in one transaction: a note that it cannot see yet is found the next time, and a note that it took is
-- deleted. No clock, no transaction horizon and no scan of the journal is involved.
--
-- A run's entries are sealed in the order of `seq`: the writer of entry n + 1 saw entry n, so it wrote after the
-- statement that wrote n and drew its note's id. So the note of n has the lower id, and is visible wherever that of
-- n + 1 is.

-- ---------------------------------------------------------------- entries to be sealed

CREATE TABLE interlock.audit_pending (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  run_ids    uuid[] NOT NULL,
  seqs       int[] NOT NULL,
  CHECK (cardinality(run_ids) = cardinality(seqs))
) WITH (toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
-- Ids do not compress; EXTERNAL keeps them in the page if they fit.
ALTER TABLE interlock.audit_pending ALTER run_ids SET STORAGE EXTERNAL, ALTER seqs SET STORAGE EXTERNAL;

-- ---------------------------------------------------------------- the chain

-- A position in a tenant's chain. It stays when retention drops the entry, so that the links around it still match.
CREATE TABLE interlock.audit_link (
  tenant_id  uuid NOT NULL,
  position   bigint NOT NULL CHECK (position > 0),
  run_id     uuid NOT NULL,
  seq        int NOT NULL,
  link       bytea NOT NULL CHECK (length(link) = 32),
  PRIMARY KEY (tenant_id, position),
  UNIQUE (run_id, seq)
);

CREATE TABLE interlock.checkpoint (
  tenant_id  uuid NOT NULL,
  number     bigint NOT NULL CHECK (number > 0),
  position   bigint NOT NULL CHECK (position >= 0),
  head       bytea NOT NULL CHECK (length(head) = 32),
  at         timestamptz NOT NULL,
  previous   bytea CHECK (length(previous) = 32),
  released   uuid,
  key_id     text NOT NULL,
  signature  bytea NOT NULL CHECK (length(signature) = 64),
  PRIMARY KEY (tenant_id, number),
  CHECK ((previous IS NULL) = (number = 1))
);
CREATE INDEX checkpoint_at_position ON interlock.checkpoint (tenant_id, position);
-- Each process remembers the newest checkpoint of all tenants, to notice that the database went back in time.
CREATE INDEX checkpoint_newest ON interlock.checkpoint (at);

-- ---------------------------------------------------------------- evidence

-- The ended runs that still need their bundle. The sealer writes the row in the transaction that seals a run's last
-- entry: so a reader finds the whole run in the chain, and the statement that ends a run writes nothing for it. While a
-- bundle is being made, `due_at` is when it is tried again if the signer dies.
CREATE TABLE interlock.evidence_due (
  run_id     uuid PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  due_at     timestamptz NOT NULL,
  attempts   int NOT NULL DEFAULT 0
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX evidence_due_next ON interlock.evidence_due (due_at);

-- The locations of the bundles.
CREATE TABLE interlock.evidence (
  run_id     uuid PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  name       text NOT NULL,
  sha256     text NOT NULL CHECK (sha256 ~ '^[0-9a-f]{64}$'),
  key_id     text NOT NULL,
  made_at    timestamptz NOT NULL
);
