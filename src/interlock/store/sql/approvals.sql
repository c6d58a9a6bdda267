-- Approvals: the question, the votes, the decision.

-- name: open_approvals
-- params: approvals interlock.new_approval[]
-- returns: nothing
-- The reminder is due half-way to the expiry.
INSERT INTO interlock.approval (
  id, tenant_id, run_id, session_id, step, kind, status, tier, two_person, summary, action, digest, requested_by, rule_ids,
  reason, reason_required, policy_digest, approvers, escalate_to, escalate_at, receipt_id, asked_by, requested_at,
  remind_at, expires_at
)
SELECT new.id, new.tenant_id, new.run_id, (SELECT session_id FROM interlock.run WHERE run.id = new.run_id), new.step,
       new.kind, 'requested', new.tier, new.two_person, new.summary, new.action, new.digest, new.requested_by,
       new.rule_ids, new.reason, new.reason_required, new.policy_digest, new.approvers, new.escalate_to,
       interlock.now() + make_interval(secs => new.escalate_after), new.receipt_id, interlock.requesters_of(new.run_id),
       interlock.now(), interlock.now() + make_interval(secs => new.expires_in / 2),
       interlock.now() + make_interval(secs => new.expires_in)
  FROM unnest(@approvals) AS new
ON CONFLICT (id) DO NOTHING
RETURNING interlock.announce('approval.requested', approval, interlock.now())::text;

-- name: get_approval
SELECT * FROM interlock.approval WHERE tenant_id = $1 AND id = $2;

-- name: lock_approval
SELECT *, interlock.now() AS now FROM interlock.approval WHERE tenant_id = $1 AND id = $2 FOR NO KEY UPDATE;

-- name: list_approvals
SELECT approval.* FROM interlock.approval
  LEFT JOIN interlock.run ON run.id = approval.run_id
 WHERE approval.tenant_id = $1
   AND ($2::uuid IS NULL OR approval.id < $2)
   AND ($3::text IS NULL OR approval.status = $3)
   AND ($4::uuid IS NULL OR approval.run_id = $4)
   AND ($6::text IS NULL OR run.workspace_id = $6)
   AND ($7::uuid IS NULL OR approval.session_id = $7)
 ORDER BY approval.id DESC LIMIT $5;

-- name: votes_on
-- While the approval is open, only votes of valid keys among the current approvers: a new policy may name others.
SELECT approval_id, vote.digest, voter, decision, vote.reason, at
  FROM interlock.vote JOIN interlock.approval ON approval.id = approval_id
 WHERE approval_id = ANY($1::uuid[])
   AND (approval.status <> 'requested' OR (
     interlock.key_holds(voter)
     AND (vote.reason <> '' OR NOT approval.reason_required)
     AND (cardinality(approvers) = 0 OR EXISTS (
       SELECT FROM interlock.api_key
        WHERE api_key.id = interlock.key_of(voter)
          AND groups && (approvers || CASE WHEN escalated_at IS NOT NULL THEN escalate_to END)
     ))
   ))
 ORDER BY at, voter;

-- name: cast_vote
-- While the approval is open, an approver may change an approval into a rejection; the last vote counts.
INSERT INTO interlock.vote (approval_id, digest, voter, decision, reason, at)
VALUES ($1, $2, $3, $4, $5, interlock.now())
ON CONFLICT (approval_id, digest, voter) DO UPDATE
   SET decision = excluded.decision, reason = excluded.reason, at = excluded.at
RETURNING voter, interlock.announce(
  'approval.voted', (SELECT approval FROM interlock.approval WHERE approval.id = approval_id), interlock.now()
)::text AS announced;

-- name: approval_on_receipt
SELECT * FROM interlock.approval WHERE tenant_id = $1 AND receipt_id = $2 AND kind = 'in_doubt' ORDER BY id DESC LIMIT 1;

-- name: edit_action
-- A new action under the same question; the votes so far were about the old one. If the policy requires approval ($13:
-- for how long), the approvers are those of its rule; otherwise they stay as they were.
UPDATE interlock.approval
   SET proposed = coalesce(proposed, action), action = $2::text::jsonb, digest = $3, tier = $4, two_person = $5, rule_ids = $6, reason = $7, policy_digest = $8,
       summary = $9, edited_by = array_append(edited_by, $10), edited_at = interlock.now(), approvers = $11, reason_required = $12,
       expires_at = coalesce(interlock.now() + make_interval(secs => $13), expires_at),
       remind_at = coalesce(interlock.now() + make_interval(secs => $13 / 2), remind_at),
       escalate_to = $14,
       escalate_at = CASE WHEN $13 IS NULL THEN escalate_at ELSE interlock.now() + make_interval(secs => $15) END,
       escalated_at = CASE WHEN $13 IS NULL THEN escalated_at END
 WHERE id = $1
RETURNING *, interlock.announce('approval.edited', approval, interlock.now())::text AS announced;

-- name: resolve_approval
-- moves: approval requested -approve|reject|expire|cancel-> *
UPDATE interlock.approval SET status = $2, resolved_at = interlock.now() WHERE id = $1
RETURNING *, interlock.announce('approval.resolved', approval, interlock.now())::text AS announced;

-- name: withdraw_pending
-- moves: approval requested -cancel-> canceled
-- params: run_ids uuid[]
-- returns: WithdrawnApproval*
-- For runs that go no further: withdraw the open approvals of their steps and delete their event subscriptions.
WITH ended AS (
  DELETE FROM interlock.event_subscription WHERE run_id = ANY(@run_ids)
)
UPDATE interlock.approval SET status = 'canceled', resolved_at = interlock.now()
 WHERE run_id = ANY(@run_ids) AND status = 'requested'
RETURNING status, requested_at, resolved_at, interlock.announce('approval.resolved', approval, interlock.now())::text;
