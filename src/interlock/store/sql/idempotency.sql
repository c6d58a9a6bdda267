-- Idempotency: one memory for every call that changes state.

-- name: begin_requests
-- moves: idempotency -> processing
-- Answers the keys that are ours now. A second request with the same key waits here until the first has committed or is
-- gone.
INSERT INTO idempotency (tenant_id, key, source, status, request_hash, created_at, expires_at, forget_at,
                         lock_expires_at)
SELECT $2, asked.key, $4, 'processing', asked.hash, coalesce($1, now()),
       coalesce($1, now()) + make_interval(secs => $6),
       coalesce($1, now()) + make_interval(secs => $6) + make_interval(secs => $7),
       coalesce($1, now()) + make_interval(secs => $8)
  FROM unnest($3::text[], $5::bytea[]) AS asked (key, hash)
ON CONFLICT (tenant_id, key) DO NOTHING
RETURNING key;

-- name: retake_request
-- moves: idempotency failed -retry-> processing
-- A record whose time is over is as good as none, unless its key may be used only once ($6: for how long that is
-- remembered) and was. An attempt that failed may be made again, and one whose lock ran out was made by a process that
-- is gone; both only for the same request.
UPDATE idempotency
   SET status = 'processing', request_hash = $4, response_status = NULL, response_body = NULL, run_id = NULL,
       error = NULL, created_at = coalesce($1, now()),
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
-- In a transaction of its own, after that of the attempt was undone and its record with it. What somebody else did with
-- the key meanwhile stays.
INSERT INTO idempotency (tenant_id, key, source, status, request_hash, error, created_at, expires_at)
VALUES ($2, $3, $4, 'failed', $5, $6, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $7))
ON CONFLICT (tenant_id, key) DO UPDATE
   SET status = 'failed', request_hash = excluded.request_hash, error = excluded.error, lock_expires_at = NULL,
       response_status = NULL, response_body = NULL, run_id = NULL, forget_at = NULL,
       created_at = excluded.created_at, expires_at = excluded.expires_at,
       attempts = CASE WHEN idempotency.expires_at <= coalesce($1, now()) THEN 1 ELSE idempotency.attempts + 1 END
 WHERE idempotency.expires_at <= coalesce($1, now()) OR idempotency.status = 'failed'
RETURNING attempts;

-- name: wait_at_most
-- For a caller whose own patience is shorter than ours: how long its transaction waits for a lock.
SELECT set_config('lock_timeout', $1, true);
