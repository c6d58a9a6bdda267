-- Approvals and receipts: what people are asked and answer, and what was done because of it.
--
-- A yes is about one exact action, by its digest, and is used once. The intent of every effect is in a receipt before
-- the effect begins, and its answer after it; whatever undoes the effect points at that receipt.

-- ---------------------------------------------------------------- approvals

CREATE TABLE approval (
  id               uuid PRIMARY KEY,
  tenant_id        uuid NOT NULL,
  run_id           uuid NOT NULL,
  step             text NOT NULL,
  session_id       uuid,
  kind             text NOT NULL DEFAULT 'gate' CHECK (kind IN ('gate', 'action', 'in_doubt')),
  status           text NOT NULL,
  -- What is asked of those who decide, and by which rules.
  tier             text NOT NULL CHECK (tier IN ('low', 'med', 'high')),
  two_person       boolean NOT NULL,
  approvers        text[] NOT NULL DEFAULT '{}',
  reason_required  boolean NOT NULL DEFAULT false,
  rule_ids         text[] NOT NULL DEFAULT '{}',
  reason           text,
  policy_digest    text,
  -- What is asked for. An edited action is a new action, with a digest of its own.
  summary          text NOT NULL,
  action           jsonb NOT NULL,
  digest           text NOT NULL,
  receipt_id       uuid,
  -- The action as it was first proposed, once a person has changed it.
  proposed         jsonb,
  -- Everybody who changed the action, everybody who asked for what the run does: each of them counts as having asked
  -- for the action, not only the last, and none of them approves it.
  edited_by        text[] NOT NULL DEFAULT '{}',
  asked_by         text[] NOT NULL DEFAULT '{}',
  requested_by     text NOT NULL,
  requested_at     timestamptz NOT NULL,
  remind_at        timestamptz,
  escalate_to      text[] NOT NULL DEFAULT '{}',
  escalate_at      timestamptz,
  escalated_at     timestamptz,
  expires_at       timestamptz NOT NULL,
  resolved_at      timestamptz,
  CONSTRAINT approval_status CHECK (status::approval_state IS NOT NULL),
  CONSTRAINT approval_resolved_at CHECK (
    CASE WHEN resolved_at IS NULL THEN status::approval_without_resolved_at
         ELSE status::approval_with_resolved_at END IS NOT NULL
  )
);
CREATE INDEX approval_of_tenant ON approval (tenant_id, status, id);
-- A run's approvals are looked for by its id: by its bundle of evidence, and by every cancel.
CREATE INDEX approval_of_run ON approval (run_id, id);
CREATE INDEX approval_expiry ON approval (expires_at) WHERE status = 'requested';
CREATE INDEX approval_reminders ON approval (remind_at) WHERE status = 'requested' AND remind_at IS NOT NULL;
CREATE INDEX approval_escalations ON approval (escalate_at)
  WHERE status = 'requested' AND escalate_at IS NOT NULL AND escalated_at IS NULL;

CREATE TRIGGER approval_moves BEFORE UPDATE ON approval FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT approval_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
CREATE TRIGGER approval_final BEFORE UPDATE ON approval FOR EACH ROW
  WHEN (OLD.resolved_at IS NOT NULL)
  EXECUTE FUNCTION refuse_change();

-- A person votes once on an action: two approvers are two people. Votes on what the action was before it was edited
-- were about another one, and do not count.
CREATE TABLE vote (
  approval_id  uuid NOT NULL REFERENCES approval,
  digest       text NOT NULL DEFAULT '',
  voter        text NOT NULL,
  decision     text NOT NULL CHECK (decision IN ('approved', 'rejected')),
  reason       text,
  at           timestamptz NOT NULL,
  PRIMARY KEY (approval_id, digest, voter)
);

-- When the action that an approval allowed was begun: a yes is used once. Not on the approval's row, which is final
-- once it is decided.
CREATE TABLE consumption (
  approval_id  uuid PRIMARY KEY REFERENCES approval,
  receipt_id   uuid NOT NULL,
  at           timestamptz NOT NULL
);

-- "This tool, these arguments, for one hour": an answer given in advance, for what is not high and needs one person.
-- `workspace_id` is that of whoever gave it; null for the whole tenant.
CREATE TABLE standing_grant (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL REFERENCES tenant,
  workspace_id  text,
  tool          text NOT NULL,
  arguments     jsonb NOT NULL,
  tier          text NOT NULL CHECK (tier IN ('low', 'med')),
  reason        text,
  created_by    text NOT NULL,
  created_at    timestamptz NOT NULL,
  expires_at    timestamptz NOT NULL CHECK (expires_at > created_at),
  revoked_at    timestamptz,
  revoked_by    text,
  uses          int NOT NULL DEFAULT 0
);
CREATE INDEX standing_grant_of_tenant ON standing_grant (tenant_id, tool, expires_at);

-- ---------------------------------------------------------------- receipts

-- One effect, one key, one successful receipt per tenant. The row is there before the effect begins. `nth` is which of
-- the effects under a key it is: those before it were undone, and a key whose effect was undone is free again. A column
-- of its own, because a receipt that succeeded is final.
CREATE TABLE receipt (
  id                 uuid PRIMARY KEY,
  tenant_id          uuid NOT NULL,
  run_id             uuid NOT NULL,
  step               text NOT NULL,
  tool               text NOT NULL,
  idempotency_key    text NOT NULL,
  nth                int NOT NULL DEFAULT 1,
  action_digest      text NOT NULL,
  status             text NOT NULL,
  attempt            int NOT NULL,
  request_metadata   jsonb NOT NULL,
  response_metadata  jsonb,
  output             jsonb,
  undo               text,
  created_at         timestamptz NOT NULL,
  completed_at       timestamptz,
  CONSTRAINT receipt_status CHECK (status::receipt_state IS NOT NULL),
  CONSTRAINT receipt_completed_at CHECK (
    CASE WHEN completed_at IS NULL THEN status::receipt_without_completed_at
         ELSE status::receipt_with_completed_at END IS NOT NULL
  ),
  UNIQUE (tenant_id, idempotency_key, nth)
);
CREATE INDEX receipt_of_run ON receipt (run_id, id);
CREATE INDEX receipt_in_doubt ON receipt (tenant_id, id) WHERE status = 'in_doubt';

CREATE TRIGGER receipt_moves BEFORE UPDATE ON receipt FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NOT receipt_may_move(OLD.status, NEW.status))
  EXECUTE FUNCTION refuse_move();
-- By its status, since a failed one has ended too and may be attempted again.
CREATE TRIGGER receipt_final BEFORE UPDATE ON receipt FOR EACH ROW
  WHEN (OLD.status IN ('succeeded'))
  EXECUTE FUNCTION refuse_change();

-- Who undoes an effect: at most one reversal per receipt. `step` is the one by which the run undoes it: of a run that
-- was started for this it is the only one.
CREATE TABLE reversal (
  receipt_id  uuid PRIMARY KEY REFERENCES receipt,
  tenant_id   uuid NOT NULL,
  run_id      uuid NOT NULL,
  step        text NOT NULL,
  reason      text,
  asked_by    text NOT NULL,
  asked_at    timestamptz NOT NULL
);

-- What became of undoing an effect. Somebody else may try only what was given up: that run has ended, and did not undo
-- it. A run that cannot be seen yet has just claimed it.
CREATE FUNCTION undoing(asked reversal) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN run.status = 'succeeded' OR 'succeeded' = ANY(tries.states) THEN 'done'
    WHEN run.completed_at IS NOT NULL AND tries.states <@ ARRAY['failed'] THEN 'given_up'
    ELSE 'under_way'
  END
  FROM (SELECT ARRAY(SELECT status FROM receipt WHERE run_id = asked.run_id AND step = asked.step) AS states) AS tries
  LEFT JOIN run ON run.id = asked.run_id
$$;
