-- Restore: a new epoch after the database was restored to an earlier moment, and the facts that reveal a restore.

-- name: last_known_moment
-- The latest moment that the database knows. If the database was restored, everything after it was lost.
SELECT coalesce(greatest(
         (SELECT max(heartbeat_at) FROM interlock.worker), (SELECT max(at) FROM interlock.checkpoint), (SELECT max(at) FROM interlock.resource_event),
         (SELECT max(restored_to) FROM interlock.epoch), (SELECT created_at FROM interlock.run ORDER BY id DESC LIMIT 1)
       ), interlock.now());

-- name: begin_epoch
INSERT INTO interlock.epoch (number, began_at, restored_to) SELECT max(number) + 1, interlock.now(), $1 FROM interlock.epoch RETURNING number;

-- name: disown_workers
-- Their processes, if they still run, belong to the discarded timeline: their workers count as silent from now on.
UPDATE interlock.worker SET heartbeat_at = least(heartbeat_at, interlock.now() - make_interval(secs => lease_seconds + 1))
 WHERE stopped_at IS NULL;

-- name: mark_restored
-- Every run that has not ended. Tokens of the discarded timeline are lower than any token issued from now on.
WITH open AS (
  UPDATE interlock.run
     SET seq = (SELECT max(journal_entry.seq) FROM interlock.journal_entry WHERE journal_entry.run_id = run.id) + 1,
         lease_token = lease_token + (1::bigint << 32)
   WHERE completed_at IS NULL
  RETURNING id, tenant_id, seq
)
INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, token, actor, data)
SELECT id, seq, tenant_id, interlock.now(), 'run_restored', 0, 'system:restore',
       jsonb_build_object('to', $1::text, 'epoch', $2::int)
  FROM open
RETURNING run_id;

-- name: pause_all_schedules
UPDATE interlock.schedule SET next_at = NULL, paused_at = interlock.now(), paused_why = $1
 WHERE paused_at IS NULL
RETURNING tenant_id, name;

-- name: newest_checkpoint
-- With the database's identity. If several checkpoints have the same time, any of them serves.
SELECT first.id AS database, (SELECT max(number) FROM interlock.epoch) AS epoch, newest.tenant_id, newest.number, newest.head
  FROM interlock.epoch AS first
  LEFT JOIN LATERAL (SELECT tenant_id, number, head FROM interlock.checkpoint ORDER BY at DESC LIMIT 1) AS newest ON true
 WHERE first.number = 1;

-- name: has_checkpoint
SELECT EXISTS (SELECT FROM interlock.checkpoint WHERE tenant_id = $1 AND number = $2 AND head = $3);
