-- Tenants, their keys, and their workflows, policies and secrets.

CREATE TABLE interlock.tenant (
  id          uuid PRIMARY KEY,
  name        text NOT NULL UNIQUE CHECK (name ~ '^[a-z0-9][a-z0-9_.-]{0,99}$'),
  created_at  timestamptz NOT NULL
);

-- ---------------------------------------------------------------- keys

-- People belong to groups; a rule may require one of them.
CREATE TABLE interlock.api_key (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL REFERENCES interlock.tenant,
  workspace_id  text,
  name          text NOT NULL,
  role          text NOT NULL CHECK (role IN ('viewer', 'operator', 'approver', 'admin', 'agent')),
  groups        text[] NOT NULL DEFAULT '{}',
  hash          bytea NOT NULL UNIQUE CHECK (length(hash) = 32),
  created_at    timestamptz NOT NULL,
  revoked_at    timestamptz
);
CREATE INDEX api_key_of_tenant ON interlock.api_key (tenant_id, id);

-- ---------------------------------------------------------------- workflows

CREATE TABLE interlock.workflow (
  tenant_id   uuid NOT NULL REFERENCES interlock.tenant,
  name        text NOT NULL,
  version     int NOT NULL CHECK (version > 0),
  digest      text NOT NULL,
  source      jsonb NOT NULL,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, name, version)
);

-- Applying the same content again finds its version. A rollback creates a new version with earlier content.
CREATE INDEX workflow_by_digest ON interlock.workflow (tenant_id, name, digest);

-- ---------------------------------------------------------------- policies

-- A tenant that never published a policy has version 0, the built-in one. The tenant's lane names the version in force.
CREATE TABLE interlock.policy (
  tenant_id   uuid NOT NULL REFERENCES interlock.tenant,
  version     int NOT NULL CHECK (version > 0),
  digest      text NOT NULL,
  text        text NOT NULL,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, version)
);

-- ---------------------------------------------------------------- secrets

-- Values for tools that no reader may see. They are encrypted with a key that is not in the database; a ciphertext
-- moved to another tenant or name cannot be decrypted. Only the newest version is kept.
CREATE TABLE interlock.secret (
  tenant_id   uuid NOT NULL REFERENCES interlock.tenant,
  name        text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_]{0,99}$'),
  version     int NOT NULL CHECK (version > 0),
  nonce       bytea NOT NULL CHECK (length(nonce) = 12),
  ciphertext  bytea NOT NULL,
  -- Names of the tools that may receive the value, and patterns such as `shop.*`. Empty if only triggers use it.
  tools       text[] NOT NULL,
  -- The workspaces whose runs and triggers may use it; NULL means all of the tenant.
  workspaces  text[],
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, name)
);
