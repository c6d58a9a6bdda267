-- Approvals: the question, the votes, the decision.

-- name: open_approvals
-- The reminder is due half-way to the expiry.
INSERT INTO approval (id, tenant_id, run_id, session_id, step, status, tier, two_person, summary, action, digest, requested_by,
                      requested_at, expires_at, kind, rule_ids, reason, reason_required, policy_digest, approvers,
                      escalate_to, escalate_at, receipt_id, remind_at, asked_by)
SELECT a.id, a.tenant_id, a.run_id, (SELECT session_id FROM run WHERE run.id = a.run_id), a.step, 'requested', a.tier, a.two_person, a.summary, a.action::jsonb, a.digest,
       a.requested_by, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => a.expires_in), a.kind,
       ARRAY(SELECT jsonb_array_elements_text(a.rule_ids::jsonb)), a.reason, a.reason_required, a.policy_digest,
       ARRAY(SELECT jsonb_array_elements_text(a.approvers::jsonb)),
       ARRAY(SELECT jsonb_array_elements_text(a.escalate_to::jsonb)),
       coalesce($1, now()) + make_interval(secs => a.escalate_after), a.receipt_id,
       coalesce($1, now()) + make_interval(secs => a.expires_in / 2), askers_of(a.run_id)
  FROM unnest($2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::text[], $7::boolean[], $8::text[], $9::text[],
              $10::text[], $11::text[], $12::float8[], $13::text[], $14::text[], $15::text[], $16::boolean[],
              $17::text[], $18::text[], $19::text[], $20::float8[], $21::uuid[])
    AS a (id, tenant_id, run_id, step, tier, two_person, summary, action, digest, requested_by, expires_in, kind,
          rule_ids, reason, reason_required, policy_digest, approvers, escalate_to, escalate_after, receipt_id)
ON CONFLICT (id) DO NOTHING
RETURNING announce('approval.requested', approval, coalesce($1, now()))::text;

-- name: get_approval
SELECT * FROM approval WHERE tenant_id = $1 AND id = $2;

-- name: lock_approval
SELECT *, coalesce($1, now()) AS now FROM approval WHERE tenant_id = $2 AND id = $3 FOR NO KEY UPDATE;

-- name: list_approvals
SELECT approval.* FROM approval
  LEFT JOIN run ON run.id = approval.run_id
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
  FROM vote JOIN approval ON approval.id = approval_id
 WHERE approval_id = ANY($1::uuid[])
   AND (approval.status <> 'requested' OR (
     key_holds(voter)
     AND (vote.reason <> '' OR NOT approval.reason_required)
     AND (cardinality(approvers) = 0 OR EXISTS (
       SELECT FROM api_key
        WHERE api_key.id = key_of(voter)
          AND groups && (approvers || CASE WHEN escalated_at IS NOT NULL THEN escalate_to END)
     ))
   ))
 ORDER BY at, voter;

-- name: cast_vote
-- While the approval is open, an approver may change an approval into a rejection; the last vote counts.
INSERT INTO vote (approval_id, digest, voter, decision, reason, at)
VALUES ($2, $3, $4, $5, $6, coalesce($1, now()))
ON CONFLICT (approval_id, digest, voter) DO UPDATE
   SET decision = excluded.decision, reason = excluded.reason, at = excluded.at
RETURNING voter, announce(
  'approval.voted', (SELECT approval FROM approval WHERE approval.id = approval_id), coalesce($1, now())
)::text AS announced;

-- name: approval_on_receipt
SELECT * FROM approval WHERE tenant_id = $1 AND receipt_id = $2 AND kind = 'in_doubt' ORDER BY id DESC LIMIT 1;

-- name: edit_action
-- A new action under the same question; the votes so far were about the old one. If the policy requires approval ($14:
-- for how long), the approvers are those of its rule; otherwise they stay as they were.
UPDATE approval
   SET proposed = coalesce(proposed, action), action = $2::text::jsonb, digest = $3, tier = $4, two_person = $5, rule_ids = $6, reason = $7, policy_digest = $8,
       summary = $9, edited_by = array_append(edited_by, $10), edited_at = coalesce($11, now()), approvers = $12, reason_required = $13,
       expires_at = coalesce(coalesce($11, now()) + make_interval(secs => $14), expires_at),
       remind_at = coalesce(coalesce($11, now()) + make_interval(secs => $14 / 2), remind_at),
       escalate_to = $15,
       escalate_at = CASE WHEN $14 IS NULL THEN escalate_at ELSE coalesce($11, now()) + make_interval(secs => $16) END,
       escalated_at = CASE WHEN $14 IS NULL THEN escalated_at END
 WHERE id = $1
RETURNING *, announce('approval.edited', approval, coalesce($11, now()))::text AS announced;

-- name: resolve_approval
-- moves: approval requested -approve|reject|expire|cancel-> *
UPDATE approval SET status = $3, resolved_at = coalesce($1, now()) WHERE id = $2
RETURNING *, announce('approval.resolved', approval, coalesce($1, now()))::text AS announced;

-- name: withdraw_runs
-- moves: approval requested -cancel-> canceled
-- For runs that go no further: withdraw the open approvals of their steps and delete their event subscriptions.
WITH waits AS (
  DELETE FROM outside_wait WHERE run_id = ANY($2::uuid[])
)
UPDATE approval SET status = 'canceled', resolved_at = coalesce($1, now())
 WHERE run_id = ANY($2::uuid[]) AND status = 'requested'
RETURNING status, requested_at, resolved_at, announce('approval.resolved', approval, coalesce($1, now()))::text;
