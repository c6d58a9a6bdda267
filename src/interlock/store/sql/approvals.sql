-- Approvals: the question, the votes, the decision.

-- name: open_approvals
INSERT INTO approval (id, tenant_id, run_id, step, session_id, status, tier, two_person, summary, action, digest,
                      requested_by, requested_at, expires_at)
SELECT a.id, a.tenant_id, a.run_id, a.step, NULL, 'requested', a.tier, a.two_person, a.summary, a.action::jsonb,
       a.digest, a.requested_by, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => a.expires_in)
  FROM unnest($2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::text[], $7::boolean[], $8::text[], $9::text[],
              $10::text[], $11::text[], $12::float8[])
    AS a (id, tenant_id, run_id, step, tier, two_person, summary, action, digest, requested_by, expires_in)
ON CONFLICT (id) DO NOTHING;

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
 ORDER BY approval.id DESC LIMIT $5;

-- name: votes_on
SELECT approval_id, voter, decision, reason, at FROM vote WHERE approval_id = ANY($1::uuid[]) ORDER BY at, voter;

-- name: cast_vote
-- Who said yes may still say no while it is open; what counts is their last word.
INSERT INTO vote (approval_id, voter, decision, reason, at) VALUES ($2, $3, $4, $5, coalesce($1, now()))
ON CONFLICT (approval_id, voter) DO UPDATE
   SET decision = excluded.decision, reason = excluded.reason, at = excluded.at
RETURNING voter;

-- name: resolve_approval
-- moves: approval requested -approve|reject|expire|cancel-> *
UPDATE approval SET status = $3, resolved_at = coalesce($1, now()) WHERE id = $2 RETURNING *;

-- name: cancel_approvals
-- moves: approval requested -cancel-> canceled
UPDATE approval SET status = 'canceled', resolved_at = coalesce($1, now())
 WHERE run_id = ANY($2::uuid[]) AND status = 'requested';
