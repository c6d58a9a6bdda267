-- Tenants: who there is, the keys they act with, and what they publish (workflows, policies, secrets).

CREATE TABLE tenant (
  id          uuid PRIMARY KEY,
  name        text NOT NULL UNIQUE CHECK (name ~ '^[a-z0-9][a-z0-9_.-]{0,99}$'),
  created_at  timestamptz NOT NULL
);

-- ---------------------------------------------------------------- keys

-- People are in groups; a rule may ask for one of them.
CREATE TABLE api_key (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL REFERENCES tenant,
  workspace_id  text,
  name          text NOT NULL,
  role          text NOT NULL CHECK (role IN ('viewer', 'operator', 'approver', 'admin', 'agent')),
  groups        text[] NOT NULL DEFAULT '{}',
  hash          bytea NOT NULL UNIQUE CHECK (length(hash) = 32),
  created_at    timestamptz NOT NULL,
  revoked_at    timestamptz
);
CREATE INDEX api_key_of_tenant ON api_key (tenant_id, id);

-- What somebody said with their key reaches as far as the key: within its workspace, and until it is revoked. This is
-- the key that an actor in votes and grants acted with: their name, a colon, its id.
CREATE FUNCTION key_of(actor text) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT CASE WHEN actor ~ ':[0-9a-f-]{36}$' THEN right(actor, 36)::uuid END
$$;

-- Whether it was not revoked since: else what they said counts no more, unless it has decided something.
CREATE FUNCTION key_holds(actor text) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT EXISTS (SELECT FROM api_key WHERE id = key_of(actor) AND revoked_at IS NULL)
$$;

-- ---------------------------------------------------------------- workflows

CREATE TABLE workflow (
  tenant_id   uuid NOT NULL REFERENCES tenant,
  name        text NOT NULL,
  version     int NOT NULL CHECK (version > 0),
  digest      text NOT NULL,
  source      jsonb NOT NULL,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, name, version),
  UNIQUE (tenant_id, name, digest)
);

-- ---------------------------------------------------------------- policies

-- A tenant that never published a policy has version 0, the built-in one. Which is in force stands in its lane.
CREATE TABLE policy (
  tenant_id   uuid NOT NULL REFERENCES tenant,
  version     int NOT NULL CHECK (version > 0),
  digest      text NOT NULL,
  text        text NOT NULL,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, version)
);

-- ---------------------------------------------------------------- secrets

-- What tools are given and nobody sees. The values are encrypted with a key that is not in the database; a ciphertext
-- moved to another tenant or name does not open. Only the newest version is kept.
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
