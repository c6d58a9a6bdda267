-- Idempotency records of every call that changes state.

-- name: begin_requests
-- moves: idempotency -> processing
-- Returns the keys that this request now owns. A second request with the same key waits here until the first has
-- committed or rolled back.
INSERT INTO idempotency (tenant_id, key, source, status, request_hash, created_at, updated_at, expires_at,
                         forget_at, lock_expires_at)
SELECT $2, asked.key, $4, 'processing', asked.hash, coalesce($1, now()), coalesce($1, now()),
       coalesce($1, now()) + make_interval(secs => $6),
       coalesce($1, now()) + make_interval(secs => $6) + make_interval(secs => $7),
       coalesce($1, now()) + make_interval(secs => $8)
  FROM unnest($3::text[], $5::bytea[]) AS asked (key, hash)
ON CONFLICT (tenant_id, key) DO NOTHING
RETURNING key;

-- name: retake_request
-- moves: idempotency failed -retry-> processing
-- An expired record counts as absent, unless its key may be used only once ($6: for how long that is remembered) and
-- was used. A failed attempt may be repeated, and so may one whose lock expired, because its process is gone; both only
-- for the same request.
UPDATE idempotency
   SET status = 'processing', request_hash = $4, response_status = NULL, response_body = NULL, run_id = NULL,
       error = NULL, updated_at = coalesce($1, now()),
       created_at = CASE WHEN expires_at <= coalesce($1, now()) THEN coalesce($1, now()) ELSE created_at END,
       expires_at = coalesce($1, now()) + make_interval(secs => $5),
       forget_at = coalesce($1, now()) + make_interval(secs => $5) + make_interval(secs => $6::float8),
       lock_expires_at = coalesce($1, now()) + make_interval(secs => $7),
       attempts = CASE WHEN expires_at <= coalesce($1, now()) THEN 1 ELSE attempts + 1 END
 WHERE tenant_id = $2 AND key = $3
   AND CASE
       WHEN expires_at <= coalesce($1, now()) THEN $6::float8 IS NULL OR status <> 'completed'
       ELSE request_hash = $4 AND attempts < $8
            AND (status = 'failed' OR (status = 'processing' AND lock_expires_at <= coalesce($1, now())))
       END
RETURNING attempts;

-- name: request_seen
SELECT *, expires_at <= coalesce($1, now()) AS is_over FROM idempotency WHERE tenant_id = $2 AND key = $3;

-- name: complete_request
-- moves: idempotency processing -complete-> completed
-- In the transaction that began the attempt; `updated_at` already has its time.
UPDATE idempotency
   SET status = 'completed', response_status = $3, response_body = $4, run_id = $5, lock_expires_at = NULL
 WHERE tenant_id = $1 AND key = $2;

-- name: complete_requests
-- moves: idempotency processing -complete-> completed
UPDATE idempotency
   SET status = 'completed', response_status = $3, response_body = answered.body, run_id = answered.run_id,
       lock_expires_at = NULL
  FROM unnest($2::text[], $4::bytea[], $5::uuid[]) AS answered (key, body, run_id)
 WHERE tenant_id = $1 AND idempotency.key = answered.key;

-- name: fail_request
-- moves: idempotency processing -fail-> failed
-- In a separate transaction, after the attempt and its record were rolled back. A record that another request wrote
-- with the key in between stays.
INSERT INTO idempotency (tenant_id, key, source, status, request_hash, error, created_at, updated_at, expires_at)
VALUES ($2, $3, $4, 'failed', $5, $6, coalesce($1, now()), coalesce($1, now()),
        coalesce($1, now()) + make_interval(secs => $7))
ON CONFLICT (tenant_id, key) DO UPDATE
   SET status = 'failed', request_hash = excluded.request_hash, error = excluded.error, lock_expires_at = NULL,
       response_status = NULL, response_body = NULL, run_id = NULL, forget_at = NULL,
       created_at = CASE WHEN idempotency.expires_at <= coalesce($1, now()) THEN excluded.created_at
                         ELSE idempotency.created_at END,
       updated_at = excluded.updated_at, expires_at = excluded.expires_at,
       attempts = CASE WHEN idempotency.expires_at <= coalesce($1, now()) THEN 1 ELSE idempotency.attempts + 1 END
 WHERE idempotency.expires_at <= coalesce($1, now()) OR idempotency.status = 'failed'
RETURNING attempts;

-- name: wait_at_most
-- Limits how long the caller's transaction waits for a lock, for a caller with a shorter timeout than ours.
SELECT set_config('lock_timeout', $1, true);
