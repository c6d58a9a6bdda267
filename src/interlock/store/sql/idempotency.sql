-- Idempotency records of every call that changes state.

-- name: begin_requests
-- moves: idempotency -> processing
-- Returns the keys that this request now owns. A second request with the same key waits here until the first has
-- committed or rolled back.
INSERT INTO interlock.idempotency_record (tenant_id, key, source, status, request_hash, created_at, updated_at, expires_at,
                         forget_at, lock_expires_at)
SELECT $1, asked.key, $3, 'processing', asked.hash, interlock.now(), interlock.now(),
       interlock.now() + make_interval(secs => $5),
       interlock.now() + make_interval(secs => $5) + make_interval(secs => $6),
       interlock.now() + make_interval(secs => $7)
  FROM unnest($2::text[], $4::bytea[]) AS asked (key, hash)
ON CONFLICT (tenant_id, key) DO NOTHING
RETURNING key;

-- name: retake_request
-- moves: idempotency failed -retry-> processing
-- An expired record counts as absent, unless its key may be used only once ($5: for how long that is remembered) and
-- was used. A failed attempt may be repeated, and so may one whose lock expired, because its process is gone; both only
-- for the same request.
UPDATE interlock.idempotency_record
   SET status = 'processing', request_hash = $3, response_status = NULL, response_body = NULL, run_id = NULL,
       error = NULL, updated_at = interlock.now(),
       created_at = CASE WHEN expires_at <= interlock.now() THEN interlock.now() ELSE created_at END,
       expires_at = interlock.now() + make_interval(secs => $4),
       forget_at = interlock.now() + make_interval(secs => $4) + make_interval(secs => $5::float8),
       lock_expires_at = interlock.now() + make_interval(secs => $6),
       attempts = CASE WHEN expires_at <= interlock.now() THEN 1 ELSE attempts + 1 END
 WHERE tenant_id = $1 AND key = $2
   AND CASE
       WHEN expires_at <= interlock.now() THEN $5::float8 IS NULL OR status <> 'completed'
       ELSE request_hash = $3 AND attempts < $7
            AND (status = 'failed' OR (status = 'processing' AND lock_expires_at <= interlock.now()))
       END
RETURNING attempts;

-- name: request_seen
SELECT *, expires_at <= interlock.now() AS is_over FROM interlock.idempotency_record WHERE tenant_id = $1 AND key = $2;

-- name: complete_request
-- moves: idempotency processing -complete-> completed
-- In the transaction that began the attempt; `updated_at` already has its time.
UPDATE interlock.idempotency_record
   SET status = 'completed', response_status = $3, response_body = $4, run_id = $5, lock_expires_at = NULL
 WHERE tenant_id = $1 AND key = $2;

-- name: complete_requests
-- moves: idempotency processing -complete-> completed
UPDATE interlock.idempotency_record
   SET status = 'completed', response_status = $3, response_body = answered.body, run_id = answered.run_id,
       lock_expires_at = NULL
  FROM unnest($2::text[], $4::bytea[], $5::uuid[]) AS answered (key, body, run_id)
 WHERE tenant_id = $1 AND idempotency_record.key = answered.key;

-- name: fail_request
-- moves: idempotency processing -fail-> failed
-- In a separate transaction, after the attempt and its record were rolled back. A record that another request wrote
-- with the key in between stays.
INSERT INTO interlock.idempotency_record (tenant_id, key, source, status, request_hash, error, created_at, updated_at, expires_at)
VALUES ($1, $2, $3, 'failed', $4, $5, interlock.now(), interlock.now(),
        interlock.now() + make_interval(secs => $6))
ON CONFLICT (tenant_id, key) DO UPDATE
   SET status = 'failed', request_hash = excluded.request_hash, error = excluded.error, lock_expires_at = NULL,
       response_status = NULL, response_body = NULL, run_id = NULL, forget_at = NULL,
       created_at = CASE WHEN idempotency_record.expires_at <= interlock.now() THEN excluded.created_at
                         ELSE idempotency_record.created_at END,
       updated_at = excluded.updated_at, expires_at = excluded.expires_at,
       attempts = CASE WHEN idempotency_record.expires_at <= interlock.now() THEN 1 ELSE idempotency_record.attempts + 1 END
 WHERE idempotency_record.expires_at <= interlock.now() OR idempotency_record.status = 'failed'
RETURNING attempts;

-- name: wait_at_most
-- Limits how long the caller's transaction waits for a lock, for a caller with a shorter timeout than ours.
SELECT set_config('lock_timeout', $1, true);
