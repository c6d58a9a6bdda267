-- Idempotency: one memory for every call that changes state.

-- name: begin_requests
-- moves: idempotency -> processing, idempotency failed -retry-> processing
-- Answers the keys that are ours now. A second request with the same key waits here until the first has committed or is
-- gone. A record whose time is over is as good as none, unless its key may be used only once ($9: for how long that is
-- remembered) and was. An attempt that failed may be made again, and one whose lock ran out was made by a process that
-- is gone; both only for the same request.
INSERT INTO idempotency (tenant_id, key, source, status, request_hash, created_at, expires_at, forget_at,
                         lock_expires_at)
SELECT $2, asked.key, $4, 'processing', asked.hash, coalesce($1, now()),
       coalesce($1, now()) + make_interval(secs => $6),
       coalesce($1, now()) + make_interval(secs => $6) + make_interval(secs => $9),
       coalesce($1, now()) + make_interval(secs => $7)
  FROM unnest($3::text[], $5::bytea[]) AS asked (key, hash)
 ORDER BY asked.key
ON CONFLICT (tenant_id, key) DO UPDATE
   SET status = 'processing', request_hash = excluded.request_hash, response_status = NULL, response_body = NULL,
       run_id = NULL, error = NULL, lock_expires_at = excluded.lock_expires_at, created_at = excluded.created_at,
       expires_at = excluded.expires_at, forget_at = excluded.forget_at,
       attempts = CASE WHEN idempotency.expires_at <= coalesce($1, now()) THEN 1 ELSE idempotency.attempts + 1 END
 WHERE CASE
       WHEN idempotency.expires_at <= coalesce($1, now()) THEN $9 IS NULL OR idempotency.status <> 'completed'
       ELSE idempotency.request_hash = excluded.request_hash AND idempotency.attempts < $8
            AND (idempotency.status = 'failed'
                 OR (idempotency.status = 'processing' AND idempotency.lock_expires_at <= coalesce($1, now())))
       END
RETURNING key, attempts;

-- name: request_seen
SELECT *, expires_at <= coalesce($1, now()) AS is_over FROM idempotency WHERE tenant_id = $2 AND key = $3;

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
