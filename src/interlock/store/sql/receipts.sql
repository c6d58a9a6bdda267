-- Receipts: the record of each effect.

-- name: attempt_effects
-- moves: receipt failed|attempted -retry-> attempted
-- The intent. An idempotency key that was used before is taken over only if that attempt failed, or belonged to this
-- very step. Returns the previous receipt: a conflict, or the attempt that is retried. A reversed effect is no
-- conflict; one that is being reversed is.
WITH wanted AS (
  SELECT w.*, run.workspace_id, coalesce(latest.nth + latest.is_undone::int, 1) AS nth FROM unnest(
    $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::text[], $7::text[], $8::text[], $9::int[], $10::text[],
    $11::text[]
  ) AS w (id, tenant_id, run_id, step, tool, idempotency_key, action_digest, attempt, request_metadata, undo)
  LEFT JOIN run ON run.id = w.run_id
  LEFT JOIN LATERAL (
    SELECT nth, EXISTS (
             SELECT FROM reversal WHERE reversal.receipt_id = receipt.id AND undoing(reversal) = 'done'
           ) AS is_undone
      FROM receipt
     WHERE receipt.tenant_id = w.tenant_id AND receipt.workspace_id IS NOT DISTINCT FROM run.workspace_id
       AND receipt.idempotency_key = w.idempotency_key
     ORDER BY nth DESC LIMIT 1
  ) AS latest ON true
), attempted AS (
  INSERT INTO receipt (id, tenant_id, workspace_id, run_id, step, tool, idempotency_key, action_digest, status, attempt,
                       request_metadata, undo, nth, created_at)
  SELECT id, tenant_id, workspace_id, run_id, step, tool, idempotency_key, action_digest, 'attempted', attempt,
         request_metadata::jsonb, undo, nth, coalesce($1, now())
    FROM wanted
  ON CONFLICT (tenant_id, idempotency_key, workspace_id, nth) DO UPDATE
     SET id = excluded.id, run_id = excluded.run_id, step = excluded.step, tool = excluded.tool, status = 'attempted',
         attempt = excluded.attempt, request_metadata = excluded.request_metadata, response_metadata = NULL,
         error = NULL, undo = excluded.undo, completed_at = NULL
   WHERE receipt.action_digest = excluded.action_digest
     AND (receipt.status = 'failed'
          OR (receipt.status = 'attempted' AND receipt.run_id = excluded.run_id AND receipt.step = excluded.step))
  RETURNING id, xmax <> 0 AS again
)
SELECT wanted.id AS intent_id, attempted.id IS NOT NULL AS goes_ahead, wanted.idempotency_key, prior.id, prior.run_id,
       prior.step, prior.status, prior.action_digest, prior.output, reversal.run_id AS undone_by,
       reversal.step AS undone_in
  FROM wanted
  LEFT JOIN attempted ON attempted.id = wanted.id
  LEFT JOIN receipt AS prior
    ON prior.tenant_id = wanted.tenant_id AND prior.workspace_id IS NOT DISTINCT FROM wanted.workspace_id
   AND prior.idempotency_key = wanted.idempotency_key AND prior.nth = wanted.nth
  LEFT JOIN reversal ON reversal.receipt_id = prior.id AND undoing(reversal) = 'under_way'
 WHERE attempted.id IS NULL OR attempted.again;

-- name: consume_approvals
-- An approval is used once. An existing row belongs to an earlier attempt at the same effect.
INSERT INTO consumption (approval_id, receipt_id, at)
SELECT approval_id, receipt_id, coalesce($1, now()) FROM unnest($2::uuid[], $3::uuid[]) AS c (approval_id, receipt_id)
ON CONFLICT (approval_id) DO NOTHING;

-- name: claim_reversals
-- An effect is reversed once, by the run that made it or by a separate reversal run that a user requested. A reversal
-- that its run gave up is taken over.
INSERT INTO reversal (receipt_id, tenant_id, run_id, step, reason, asked_by, asked_at)
SELECT DISTINCT ON (receipt_id) receipt_id, tenant_id, run_id, step, 'compensation', 'system:engine', coalesce($1, now())
  FROM unnest($2::uuid[], $3::uuid[], $4::uuid[], $5::text[]) AS r (receipt_id, tenant_id, run_id, step)
ON CONFLICT (receipt_id) DO UPDATE
   SET run_id = excluded.run_id, step = excluded.step, reason = excluded.reason, asked_by = excluded.asked_by,
       asked_at = excluded.asked_at
 WHERE undoing(reversal) = 'given_up';

-- name: reversed_by_others
-- A separate statement, so that its snapshot has a reversal that another run was claiming at that moment.
SELECT mine.receipt_id, reversal.run_id, reversal.step, undoing(reversal)
  FROM unnest($1::uuid[], $2::uuid[]) AS mine (receipt_id, run_id)
  JOIN reversal ON reversal.receipt_id = mine.receipt_id AND reversal.run_id <> mine.run_id;

-- name: release_reversals
-- The reversal failed: another run may try.
DELETE FROM reversal USING unnest($1::uuid[], $2::uuid[]) AS mine (receipt_id, run_id)
 WHERE reversal.receipt_id = mine.receipt_id AND reversal.run_id = mine.run_id;

-- name: seal_receipts
-- moves: receipt attempted -seal|fail|doubt-> *
UPDATE receipt
   SET status = seal.status, output = seal.output::jsonb, response_metadata = seal.response_metadata::jsonb,
       completed_at = CASE WHEN seal.status <> 'in_doubt' THEN coalesce($1, now()) END,
       acting_worker = seal.acting_worker, error = seal.error
  FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::uuid[], $7::text[])
    AS seal (id, status, output, response_metadata, acting_worker, error)
 WHERE receipt.id = seal.id AND receipt.status = 'attempted'
RETURNING receipt.status;

-- name: acting_worker
-- The worker that still executes a call whose receipt is in doubt, and until when it may, if that is known.
SELECT worker.id, worker.name, worker.may_act_until
  FROM receipt JOIN worker ON worker.id = receipt.acting_worker
 WHERE receipt.id = $2 AND coalesce(worker.may_act_until, 'infinity') > coalesce($1, now());

-- name: note_ended_calls
-- Clears the worker of all its earlier receipts, except for these calls, which still run.
UPDATE receipt SET acting_worker = NULL
 WHERE acting_worker = $1 AND (run_id, step) NOT IN (SELECT * FROM unnest($2::uuid[], $3::text[]));

-- name: doubt_receipts
-- moves: receipt attempted -doubt-> in_doubt
-- For runs that ended. An effect that they attempted without a recorded result may have happened.
UPDATE receipt SET status = 'in_doubt' WHERE run_id = ANY($1::uuid[]) AND status = 'attempted'
RETURNING status;

-- name: askers_of
SELECT askers_of($1);

-- name: resolve_doubt
-- moves: receipt in_doubt -confirm-> succeeded, receipt in_doubt -fail-> failed
UPDATE receipt SET status = $3, output = $4::text::jsonb, completed_at = coalesce($1, now())
 WHERE id = $2 AND status = 'in_doubt'
RETURNING *;

-- name: receipts_of
SELECT receipt.*, reversal.run_id AS reversal_run_id, reversal.reason AS reversal_reason, reversal.asked_by AS reversed_by,
       reversal.asked_at AS reversed_at
  FROM receipt LEFT JOIN reversal ON reversal.receipt_id = receipt.id
 WHERE receipt.tenant_id = $1 AND receipt.run_id = $2 ORDER BY receipt.id;

-- name: receipts_behind
-- The receipts of a run and of the runs that it continues, and the state of their reversals.
WITH RECURSIVE continued AS (
  SELECT id, resumed_from FROM run WHERE tenant_id = $1 AND id = $2
  UNION ALL
  SELECT run.id, run.resumed_from FROM run JOIN continued ON run.id = continued.resumed_from
)
SELECT receipt.id, receipt.step, receipt.status, receipt.output, reversal.run_id AS reversal_run_id,
       CASE WHEN reversal.run_id IS NOT NULL THEN undoing(reversal) END AS undoing
  FROM continued
  JOIN receipt ON receipt.run_id = continued.id
  LEFT JOIN reversal ON reversal.receipt_id = receipt.id
 ORDER BY receipt.id;

-- name: get_receipt
SELECT receipt.*, reversal.run_id AS reversal_run_id, reversal.reason AS reversal_reason, reversal.asked_by AS reversed_by,
       reversal.asked_at AS reversed_at
  FROM receipt LEFT JOIN reversal ON reversal.receipt_id = receipt.id
 WHERE receipt.tenant_id = $1 AND receipt.id = $2 AND ($3::text IS NULL OR receipt.workspace_id = $3);

-- name: reverse_receipt
-- As in claim_reversals. Returns no row if the effect is already reversed or a reversal is in progress.
INSERT INTO reversal (receipt_id, tenant_id, run_id, step, reason, asked_by, asked_at)
VALUES ($2, $3, $4, 'undo', $5, $6, coalesce($1, now()))
ON CONFLICT (receipt_id) DO UPDATE
   SET run_id = excluded.run_id, step = excluded.step, reason = excluded.reason, asked_by = excluded.asked_by,
       asked_at = excluded.asked_at
 WHERE undoing(reversal) = 'given_up'
RETURNING receipt_id;

-- name: hand_over_reversal
-- To the run that continues the run which gave up the reversal.
UPDATE reversal SET run_id = $3 WHERE tenant_id = $1 AND run_id = $2 AND undoing(reversal) = 'given_up';

-- name: reversed_since
-- The other run that has reversed an effect or is reversing it, in place of this one.
SELECT run_id FROM reversal WHERE tenant_id = $1 AND receipt_id = $2 AND run_id <> $3;

-- name: undone_since
-- The first of these effects that is reversed or being reversed.
SELECT receipt_id, run_id FROM reversal
 WHERE tenant_id = $1 AND receipt_id = ANY($2::uuid[]) AND undoing(reversal) <> 'given_up'
 ORDER BY receipt_id LIMIT 1;
