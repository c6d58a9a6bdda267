-- Secrets: what tools are given and nobody sees. The values are encrypted with a key that is not in the database; a
-- ciphertext moved to another tenant or name does not open. Only the newest version is kept.

CREATE TABLE secret (
  tenant_id   uuid NOT NULL REFERENCES tenant,
  name        text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_]{0,99}$'),
  version     int NOT NULL CHECK (version > 0),
  nonce       bytea NOT NULL CHECK (length(nonce) = 12),
  ciphertext  bytea NOT NULL,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, name)
);
