-- Receipts: the record of each effect.

-- name: declare_intents
-- moves: receipt failed|attempted -retry-> attempted
-- params: intents interlock.new_intent[]
-- returns: DeclaredIntent*
-- The intent. An idempotency key that was used before is taken over only if that attempt failed, or belonged to this
-- very step. Returns the previous receipt: a conflict, or the attempt that is retried. A reversed effect is no
-- conflict; one that is being reversed is.
WITH wanted AS (
  SELECT w.*, run.workspace_id, coalesce(latest.nth + latest.is_undone::int, 1) AS nth
    FROM unnest(@intents) AS w
  LEFT JOIN interlock.run ON run.id = w.run_id
  LEFT JOIN LATERAL (
    SELECT nth, EXISTS (
             SELECT FROM interlock.reversal WHERE reversal.receipt_id = receipt.id AND interlock.reversal_state(reversal) = 'done'
           ) AS is_undone
      FROM interlock.receipt
     WHERE receipt.tenant_id = w.tenant_id AND receipt.workspace_id IS NOT DISTINCT FROM run.workspace_id
       AND receipt.idempotency_key = w.idempotency_key
     ORDER BY nth DESC LIMIT 1
  ) AS latest ON true
), attempted AS (
  INSERT INTO interlock.receipt (id, tenant_id, workspace_id, run_id, step, tool, idempotency_key, action_digest, status, attempt,
                       request_metadata, undo, nth, created_at)
  SELECT id, tenant_id, workspace_id, run_id, step, tool, idempotency_key, action_digest, 'attempted', attempt,
         request_metadata, undo, nth, interlock.now()
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
  LEFT JOIN interlock.receipt AS prior
    ON prior.tenant_id = wanted.tenant_id AND prior.workspace_id IS NOT DISTINCT FROM wanted.workspace_id
   AND prior.idempotency_key = wanted.idempotency_key AND prior.nth = wanted.nth
  LEFT JOIN interlock.reversal ON reversal.receipt_id = prior.id AND interlock.reversal_state(reversal) = 'under_way'
 WHERE attempted.id IS NULL OR attempted.again;

-- name: use_approvals
-- params: approval_ids uuid[], receipt_ids uuid[]
-- returns: nothing
-- An approval is used once. An existing row belongs to an earlier attempt at the same effect.
INSERT INTO interlock.approval_use (approval_id, receipt_id, at)
SELECT approval_id, receipt_id, interlock.now() FROM unnest(@approval_ids, @receipt_ids) AS used (approval_id, receipt_id)
ON CONFLICT (approval_id) DO NOTHING;

-- name: claim_reversals
-- params: receipt_ids uuid[], tenant_ids uuid[], run_ids uuid[], steps text[]
-- returns: nothing
-- An effect is reversed once, by the run that made it or by a separate reversal run that a user requested. A reversal
-- that its run gave up is taken over.
INSERT INTO interlock.reversal (receipt_id, tenant_id, run_id, step, reason, asked_by, asked_at)
SELECT DISTINCT ON (receipt_id) receipt_id, tenant_id, run_id, step, 'compensation', 'system:engine', interlock.now()
  FROM unnest(@receipt_ids, @tenant_ids, @run_ids, @steps) AS r (receipt_id, tenant_id, run_id, step)
ON CONFLICT (receipt_id) DO UPDATE
   SET run_id = excluded.run_id, step = excluded.step, reason = excluded.reason, asked_by = excluded.asked_by,
       asked_at = excluded.asked_at
 WHERE interlock.reversal_state(reversal) = 'given_up';

-- name: reversed_by_others
-- params: receipt_ids uuid[], run_ids uuid[]
-- returns: OtherReversal*
-- A separate statement, so that its snapshot has a reversal that another run was claiming at that moment.
SELECT mine.receipt_id, reversal.run_id, reversal.step, interlock.reversal_state(reversal) AS state
  FROM unnest(@receipt_ids, @run_ids) AS mine (receipt_id, run_id)
  JOIN interlock.reversal ON reversal.receipt_id = mine.receipt_id AND reversal.run_id <> mine.run_id;

-- name: release_reversals
-- params: receipt_ids uuid[], run_ids uuid[]
-- returns: nothing
-- The reversal failed: another run may try.
DELETE FROM interlock.reversal USING unnest(@receipt_ids, @run_ids) AS mine (receipt_id, run_id)
 WHERE reversal.receipt_id = mine.receipt_id AND reversal.run_id = mine.run_id;

-- name: complete_receipts
-- moves: receipt attempted -seal|fail|doubt-> *
-- params: results interlock.receipt_result[]
-- returns: text*
-- Return the new state of each receipt that was not completed before.
UPDATE interlock.receipt
   SET status = result.status, output = result.output, response_metadata = result.response_metadata,
       completed_at = CASE WHEN result.status <> 'in_doubt' THEN interlock.now() END,
       acting_worker = result.acting_worker, error = result.error
  FROM unnest(@results) AS result
 WHERE receipt.id = result.receipt_id AND receipt.status = 'attempted'
RETURNING receipt.status;

-- name: acting_worker
-- The worker that still executes a call whose receipt is in doubt, and until when it may, if that is known.
SELECT worker.id, worker.name, worker.may_act_until
  FROM interlock.receipt JOIN interlock.worker ON worker.id = receipt.acting_worker
 WHERE receipt.id = $1 AND coalesce(worker.may_act_until, 'infinity') > interlock.now();

-- name: note_ended_calls
-- Clears the worker of all its earlier receipts, except for these calls, which still run.
UPDATE interlock.receipt SET acting_worker = NULL
 WHERE acting_worker = $1 AND (run_id, step) NOT IN (SELECT * FROM unnest($2::uuid[], $3::text[]));

-- name: doubt_receipts
-- moves: receipt attempted -doubt-> in_doubt
-- params: run_ids uuid[]
-- returns: text*
-- For runs that ended. An effect that they attempted without a recorded result may have happened.
UPDATE interlock.receipt SET status = 'in_doubt' WHERE run_id = ANY(@run_ids) AND status = 'attempted'
RETURNING status;

-- name: requesters_of
SELECT interlock.requesters_of($1);

-- name: resolve_doubt
-- moves: receipt in_doubt -confirm-> succeeded, receipt in_doubt -fail-> failed
UPDATE interlock.receipt SET status = $2, output = $3::text::jsonb, completed_at = interlock.now()
 WHERE id = $1 AND status = 'in_doubt'
RETURNING *;

-- name: receipts_of
SELECT receipt.*, reversal.run_id AS reversal_run_id, reversal.reason AS reversal_reason, reversal.asked_by AS reversed_by,
       reversal.asked_at AS reversed_at
  FROM interlock.receipt LEFT JOIN interlock.reversal ON reversal.receipt_id = receipt.id
 WHERE receipt.tenant_id = $1 AND receipt.run_id = $2 ORDER BY receipt.id;

-- name: receipts_behind
-- The receipts of a run and of the runs that it continues, and the state of their reversals.
WITH RECURSIVE continued AS (
  SELECT id, resumed_from FROM interlock.run WHERE tenant_id = $1 AND id = $2
  UNION ALL
  SELECT run.id, run.resumed_from FROM interlock.run JOIN continued ON run.id = continued.resumed_from
)
SELECT receipt.id, receipt.step, receipt.status, receipt.output, reversal.run_id AS reversal_run_id,
       CASE WHEN reversal.run_id IS NOT NULL THEN interlock.reversal_state(reversal) END AS reversal_state
  FROM continued
  JOIN interlock.receipt ON receipt.run_id = continued.id
  LEFT JOIN interlock.reversal ON reversal.receipt_id = receipt.id
 ORDER BY receipt.id;

-- name: get_receipt
SELECT receipt.*, reversal.run_id AS reversal_run_id, reversal.reason AS reversal_reason, reversal.asked_by AS reversed_by,
       reversal.asked_at AS reversed_at
  FROM interlock.receipt LEFT JOIN interlock.reversal ON reversal.receipt_id = receipt.id
 WHERE receipt.tenant_id = $1 AND receipt.id = $2 AND ($3::text IS NULL OR receipt.workspace_id = $3);

-- name: reverse_receipt
-- As in claim_reversals. Returns no row if the effect is already reversed or a reversal is in progress.
INSERT INTO interlock.reversal (receipt_id, tenant_id, run_id, step, reason, asked_by, asked_at)
VALUES ($1, $2, $3, 'undo', $4, $5, interlock.now())
ON CONFLICT (receipt_id) DO UPDATE
   SET run_id = excluded.run_id, step = excluded.step, reason = excluded.reason, asked_by = excluded.asked_by,
       asked_at = excluded.asked_at
 WHERE interlock.reversal_state(reversal) = 'given_up'
RETURNING receipt_id;

-- name: hand_over_reversal
-- To the run that continues the run which gave up the reversal.
UPDATE interlock.reversal SET run_id = $3 WHERE tenant_id = $1 AND run_id = $2 AND interlock.reversal_state(reversal) = 'given_up';

-- name: reversed_since
-- The other run that has reversed an effect or is reversing it, in place of this one.
SELECT run_id FROM interlock.reversal WHERE tenant_id = $1 AND receipt_id = $2 AND run_id <> $3;

-- name: undone_since
-- The first of these effects that is reversed or being reversed.
SELECT receipt_id, run_id FROM interlock.reversal
 WHERE tenant_id = $1 AND receipt_id = ANY($2::uuid[]) AND interlock.reversal_state(reversal) <> 'given_up'
 ORDER BY receipt_id LIMIT 1;
