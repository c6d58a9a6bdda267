-- The audit chain: what waits to be sealed, the seals, and the signed checkpoints.
--
-- How nothing is missed although transactions commit in any order: the trigger writes a note of every statement's new
-- entries into `unsealed`, so an entry and its note become visible together. The sealer takes the notes it sees and
-- writes the seals in one transaction: a note it cannot see yet is there the next time, one that it took is gone.
-- No clock, no transaction horizon and no scan of the journal is involved.
--
-- Why a run's entries are sealed in the order of `seq`: entry n + 1 is written by somebody who saw entry n, after the
-- statement that wrote n and drew its note's id. So the note of n has the lower id, and is visible wherever that of
-- n + 1 is.

CREATE TABLE unsealed (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id  uuid NOT NULL,
  run_ids    uuid[] NOT NULL,
  seqs       int[] NOT NULL,
  CHECK (cardinality(run_ids) = cardinality(seqs))
) WITH (toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
-- Ids do not compress; what fits the page stays in it.
ALTER TABLE unsealed ALTER run_ids SET STORAGE EXTERNAL, ALTER seqs SET STORAGE EXTERNAL;

-- A place in a tenant's chain. It stays when retention drops the entry: the links around it still have to meet.
CREATE TABLE seal (
  tenant_id  uuid NOT NULL,
  position   bigint NOT NULL CHECK (position > 0),
  run_id     uuid NOT NULL,
  seq        int NOT NULL,
  link       bytea NOT NULL CHECK (length(link) = 32),
  PRIMARY KEY (tenant_id, position),
  UNIQUE (run_id, seq)
);

CREATE TABLE checkpoint (
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
CREATE INDEX checkpoint_at_position ON checkpoint (tenant_id, position);

CREATE TRIGGER seal_append_only BEFORE UPDATE OR DELETE ON seal FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER seal_keep BEFORE TRUNCATE ON seal FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER checkpoint_append_only BEFORE UPDATE OR DELETE ON checkpoint
  FOR EACH ROW EXECUTE FUNCTION refuse_rewrite();
CREATE TRIGGER checkpoint_keep BEFORE TRUNCATE ON checkpoint FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite();

-- By statement, not by row: an append of a hundred entries leaves one note.
CREATE FUNCTION note_unsealed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO unsealed (tenant_id, run_ids, seqs)
  SELECT tenant_id, array_agg(run_id), array_agg(seq) FROM added GROUP BY tenant_id;
  RETURN NULL;
END $$;
CREATE TRIGGER entry_note AFTER INSERT ON entry REFERENCING NEW TABLE AS added
  FOR EACH STATEMENT EXECUTE FUNCTION note_unsealed();

-- What was written before there was a chain. Making the trigger has waited for every writer and holds up new ones, so
-- nothing falls between the two.
INSERT INTO unsealed (tenant_id, run_ids, seqs)
SELECT tenant_id, array_agg(run_id ORDER BY run_id, seq), array_agg(seq ORDER BY run_id, seq)
  FROM (
    SELECT tenant_id, run_id, seq, row_number() OVER (PARTITION BY tenant_id ORDER BY run_id, seq) / 400 AS part
      FROM entry
  ) AS old
 GROUP BY tenant_id, part
 ORDER BY tenant_id, part;
