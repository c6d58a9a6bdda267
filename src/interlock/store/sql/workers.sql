-- Workers: who is there, and that they still are.

-- name: register_worker
INSERT INTO worker (id, name, host, pid, status, capacity, lease_seconds, heartbeat_at, started_at)
VALUES ($2, $3, $4, $5, 'idle', $6, $7, coalesce($1, now()), coalesce($1, now()))
ON CONFLICT (id) DO NOTHING;

-- name: move_worker
-- moves: worker * -> *
UPDATE worker
   SET status = $3, reason = $4, stopped_at = CASE WHEN $5 THEN coalesce($1, now()) END
 WHERE id = $2
RETURNING *;

-- name: lock_worker
SELECT * FROM worker WHERE id = $1 FOR NO KEY UPDATE;

-- name: beat
-- One row per worker, however many runs it holds. A lost worker's beat changes nothing.
UPDATE worker SET heartbeat_at = coalesce($1, now())
 WHERE id = $2 AND stopped_at IS NULL
RETURNING status;

-- name: list_workers
SELECT worker.*, (SELECT count(*) FROM run WHERE lease_worker = worker.id) AS holds
  FROM worker
 WHERE $2 OR stopped_at IS NULL OR stopped_at > coalesce($1, now()) - interval '1 hour'
 ORDER BY id DESC LIMIT 500;
