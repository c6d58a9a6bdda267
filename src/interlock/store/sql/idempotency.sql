-- Idempotency: one memory for every call that changes state.

-- name: begin_request
-- moves: idempotency -> processing
-- A second request with the same key waits here until the first has committed or is gone. A record whose time is over
-- is as good as none.
INSERT INTO idempotency (tenant_id, key, source, status, request_hash, created_at, expires_at)
VALUES ($2, $3, $4, 'processing', $5, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $6))
ON CONFLICT (tenant_id, key) DO UPDATE
   SET status = 'processing', request_hash = excluded.request_hash, response_status = NULL, response_body = NULL,
       run_id = NULL, created_at = excluded.created_at, expires_at = excluded.expires_at
 WHERE idempotency.expires_at <= coalesce($1, now())
RETURNING key;

-- name: request_seen
SELECT * FROM idempotency WHERE tenant_id = $1 AND key = $2;

-- name: complete_request
-- moves: idempotency processing -complete-> completed
UPDATE idempotency SET status = 'completed', response_status = $3, response_body = $4, run_id = $5
 WHERE tenant_id = $1 AND key = $2;
