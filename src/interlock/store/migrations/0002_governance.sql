-- Governed actions: policies, receipts, and what an approval is about.

-- ---------------------------------------------------------------- policies

-- A tenant that never published a policy has version 0, the built-in one.
CREATE TABLE policy (
  tenant_id   uuid NOT NULL REFERENCES tenant,
  version     int NOT NULL CHECK (version > 0),
  digest      text NOT NULL,
  text        text NOT NULL,
  created_at  timestamptz NOT NULL,
  created_by  text NOT NULL,
  PRIMARY KEY (tenant_id, version)
);

ALTER TABLE lane
  ADD COLUMN policy_version int NOT NULL DEFAULT 0,
  ADD COLUMN max_writes_per_run int CHECK (max_writes_per_run > 0),
  ADD COLUMN max_runs_per_min int CHECK (max_runs_per_min > 0),
  -- The last minute that a run was given a place in, and how many of its places are taken.
  ADD COLUMN rate_minute timestamptz,
  ADD COLUMN rate_used int NOT NULL DEFAULT 0;

-- Who asked decides what is allowed: their role and groups at the moment of asking are kept.
ALTER TABLE run ADD COLUMN requester jsonb;

-- ---------------------------------------------------------------- receipts

-- One effect, one key, one successful receipt per tenant. The row is there before the effect begins.
CREATE TABLE receipt (
  id                 uuid PRIMARY KEY,
  tenant_id          uuid NOT NULL,
  run_id             uuid NOT NULL,
  step               text NOT NULL,
  tool               text NOT NULL,
  idempotency_key    text NOT NULL,
  action_digest      text NOT NULL,
  status             text NOT NULL,
  attempt            int NOT NULL,
  request_metadata   jsonb NOT NULL,
  response_metadata  jsonb,
  output             jsonb,
  undo               text,
  created_at         timestamptz NOT NULL,
  completed_at       timestamptz,
  CONSTRAINT receipt_status CHECK (status IN ('attempted', 'in_doubt', 'failed', 'succeeded')),
  CONSTRAINT receipt_completed_at CHECK ((completed_at IS NOT NULL) = (status IN ('failed', 'succeeded'))),
  UNIQUE (tenant_id, idempotency_key)
);
CREATE INDEX receipt_of_run ON receipt (run_id, id);
CREATE INDEX receipt_in_doubt ON receipt (tenant_id, id) WHERE status = 'in_doubt';

CREATE TRIGGER receipt_moves BEFORE UPDATE ON receipt FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND CASE OLD.status
    WHEN 'attempted' THEN NEW.status NOT IN ('attempted', 'in_doubt', 'failed', 'succeeded')
    WHEN 'in_doubt' THEN NEW.status NOT IN ('failed', 'succeeded')
    WHEN 'failed' THEN NEW.status NOT IN ('attempted')
    ELSE true
    END)
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER receipt_final BEFORE UPDATE ON receipt FOR EACH ROW
  WHEN (OLD.status IN ('succeeded'))
  EXECUTE FUNCTION refuse_change();

-- At most one reversal per receipt.
CREATE TABLE reversal (
  receipt_id  uuid PRIMARY KEY REFERENCES receipt,
  tenant_id   uuid NOT NULL,
  run_id      uuid NOT NULL,
  reason      text,
  asked_by    text NOT NULL,
  asked_at    timestamptz NOT NULL
);

-- ---------------------------------------------------------------- approvals

ALTER TABLE approval
  ADD COLUMN kind text NOT NULL DEFAULT 'gate' CHECK (kind IN ('gate', 'action', 'in_doubt')),
  ADD COLUMN rule_ids text[] NOT NULL DEFAULT '{}',
  ADD COLUMN reason text,
  ADD COLUMN reason_required boolean NOT NULL DEFAULT false,
  ADD COLUMN policy_digest text,
  ADD COLUMN approvers text[] NOT NULL DEFAULT '{}',
  ADD COLUMN escalate_to text[] NOT NULL DEFAULT '{}',
  ADD COLUMN escalate_at timestamptz,
  ADD COLUMN escalated_at timestamptz,
  ADD COLUMN receipt_id uuid,
  -- When the action it allowed was begun. Not on the approval's row: that is final once it is decided.
  DROP CONSTRAINT approval_run_id_step_digest_key;

CREATE TABLE consumption (
  approval_id  uuid PRIMARY KEY REFERENCES approval,
  receipt_id   uuid NOT NULL,
  at           timestamptz NOT NULL
);

-- People are in groups; a rule may ask for one of them.
ALTER TABLE api_key ADD COLUMN groups text[] NOT NULL DEFAULT '{}';

-- An edited action is a new action: earlier votes were about another one and do not count.
ALTER TABLE approval ADD COLUMN edited_by text, ADD COLUMN remind_at timestamptz;
ALTER TABLE vote
  ADD COLUMN digest text NOT NULL DEFAULT '',
  DROP CONSTRAINT vote_pkey,
  ADD PRIMARY KEY (approval_id, digest, voter);

-- "This tool, these arguments, for one hour": an answer given in advance, for what is not high and needs one person.
CREATE TABLE standing_grant (
  id          uuid PRIMARY KEY,
  tenant_id   uuid NOT NULL REFERENCES tenant,
  tool        text NOT NULL,
  arguments   jsonb NOT NULL,
  tier        text NOT NULL CHECK (tier IN ('low', 'med')),
  reason      text,
  created_by  text NOT NULL,
  created_at  timestamptz NOT NULL,
  expires_at  timestamptz NOT NULL CHECK (expires_at > created_at),
  revoked_at  timestamptz,
  revoked_by  text,
  uses        int NOT NULL DEFAULT 0
);
CREATE INDEX standing_grant_of_tenant ON standing_grant (tenant_id, tool, expires_at);
