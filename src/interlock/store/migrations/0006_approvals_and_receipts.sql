-- Approvals and receipts: questions to people, their votes, and the effects that resulted.
--
-- An approval is about one exact action, by its digest, and is used once. A receipt holds the intent of every effect
-- before the effect begins, and its result afterwards; a reversal of the effect refers to that receipt.

-- ---------------------------------------------------------------- approvals

CREATE TABLE interlock.approval (
  id               uuid PRIMARY KEY,
  tenant_id        uuid NOT NULL,
  run_id           uuid NOT NULL,
  step             text NOT NULL,
  session_id       uuid,
  kind             text NOT NULL DEFAULT 'gate' CHECK (kind IN ('gate', 'action', 'in_doubt')),
  status           interlock.approval_state NOT NULL,
  -- The requirements on the approvers, and the rules that set them.
  tier             text NOT NULL CHECK (tier IN ('low', 'med', 'high')),
  two_person       boolean NOT NULL,
  approvers        text[] NOT NULL DEFAULT '{}',
  reason_required  boolean NOT NULL DEFAULT false,
  rule_ids         text[] NOT NULL DEFAULT '{}',
  reason           text,
  policy_digest    text,
  -- The proposed action. An edited action is a new action with a new digest.
  summary          text NOT NULL,
  action           jsonb NOT NULL,
  digest           text NOT NULL,
  receipt_id       uuid,
  -- The action as first proposed, once a person has changed it.
  proposed         jsonb,
  -- All editors of the action, the last at the end; all requesters of what the run does.
  edited_by        text[] NOT NULL DEFAULT '{}',
  edited_at        timestamptz,
  asked_by         text[] NOT NULL DEFAULT '{}',
  requested_by     text NOT NULL,
  requested_at     timestamptz NOT NULL,
  remind_at        timestamptz,
  escalate_to      text[] NOT NULL DEFAULT '{}',
  escalate_at      timestamptz,
  escalated_at     timestamptz,
  expires_at       timestamptz NOT NULL,
  resolved_at      timestamptz,
  CONSTRAINT approval_edited CHECK ((edited_at IS NULL) = (edited_by = '{}') AND (edited_at IS NULL) = (proposed IS NULL)),
  CONSTRAINT approval_resolved_at CHECK (
    CASE WHEN resolved_at IS NULL THEN status::interlock.approval_without_resolved_at
         ELSE status::interlock.approval_with_resolved_at END IS NOT NULL
  )
);
CREATE INDEX approval_of_tenant ON interlock.approval (tenant_id, status, id);
-- Evidence bundles and every cancel look up a run's approvals by the run's id.
CREATE INDEX approval_of_run ON interlock.approval (run_id, id);
CREATE INDEX approval_expiry ON interlock.approval (expires_at) WHERE status = 'requested';
CREATE INDEX approval_reminders ON interlock.approval (remind_at) WHERE status = 'requested' AND remind_at IS NOT NULL;
CREATE INDEX approval_escalations ON interlock.approval (escalate_at)
  WHERE status = 'requested' AND escalate_at IS NOT NULL AND escalated_at IS NULL;

-- A person votes once on an action: two approvers are two people. Votes on the action before an edit were about another
-- action, and do not count.
CREATE TABLE interlock.vote (
  approval_id  uuid NOT NULL REFERENCES interlock.approval,
  digest       text NOT NULL DEFAULT '',
  voter        text NOT NULL,
  decision     text NOT NULL CHECK (decision IN ('approved', 'rejected')),
  reason       text,
  at           timestamptz NOT NULL,
  PRIMARY KEY (approval_id, digest, voter)
);

-- When the approved action was started: an approval is used once. Not in the approval's row, which is final once the
-- approval is decided.
CREATE TABLE interlock.approval_use (
  approval_id  uuid PRIMARY KEY REFERENCES interlock.approval,
  receipt_id   uuid NOT NULL,
  at           timestamptz NOT NULL
);

-- A standing approval ("this tool, these arguments, for one hour"), for actions below tier high that need one approver.
-- `workspace_id` is that of the grant's creator; NULL for the whole tenant.
CREATE TABLE interlock.standing_grant (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL REFERENCES interlock.tenant,
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
CREATE INDEX standing_grant_of_tenant ON interlock.standing_grant (tenant_id, tool, expires_at);

-- ---------------------------------------------------------------- receipts

-- One effect, one key, one successful receipt per workspace: keys of different workspaces neither match nor conflict.
-- The row exists before the effect begins. `nth` counts the effects under a key: the earlier ones were reversed, and
-- the key of a reversed effect is free again. A separate column, because a receipt that succeeded is final.
CREATE TABLE interlock.receipt (
  id                 uuid PRIMARY KEY,
  tenant_id          uuid NOT NULL,
  workspace_id       text,
  run_id             uuid NOT NULL,
  step               text NOT NULL,
  tool               text NOT NULL,
  idempotency_key    text NOT NULL,
  nth                int NOT NULL DEFAULT 1,
  action_digest      text NOT NULL,
  status             interlock.receipt_state NOT NULL,
  -- Set while the receipt is in doubt and the call still runs in a thread of this worker: its result is not known yet.
  acting_worker      uuid REFERENCES interlock.worker,
  attempt            int NOT NULL,
  request_metadata   jsonb NOT NULL,
  response_metadata  jsonb,
  output             jsonb,
  -- The error of the last attempt, if it failed or its outcome is unknown.
  error              text,
  undo               text,
  created_at         timestamptz NOT NULL,
  completed_at       timestamptz,
  CONSTRAINT receipt_completed_at CHECK (
    CASE WHEN completed_at IS NULL THEN status::interlock.receipt_without_completed_at
         ELSE status::interlock.receipt_with_completed_at END IS NOT NULL
  ),
  UNIQUE NULLS NOT DISTINCT (tenant_id, idempotency_key, workspace_id, nth)
);
CREATE INDEX receipt_of_run ON interlock.receipt (run_id, id);
CREATE INDEX receipt_still_acting ON interlock.receipt (acting_worker) WHERE acting_worker IS NOT NULL;
CREATE INDEX receipt_in_doubt ON interlock.receipt (tenant_id, id) WHERE status = 'in_doubt';

-- The run that reverses an effect: at most one reversal per receipt. `step` is the step that does it: in a run that was
-- started as a reversal it is the only step.
CREATE TABLE interlock.reversal (
  receipt_id  uuid PRIMARY KEY REFERENCES interlock.receipt,
  tenant_id   uuid NOT NULL,
  run_id      uuid NOT NULL,
  step        text NOT NULL,
  reason      text,
  asked_by    text NOT NULL,
  asked_at    timestamptz NOT NULL
);

