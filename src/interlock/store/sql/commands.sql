-- Run commands from people, timers and events: applied directly if no worker holds the run, else left for its holder.

-- name: unqueue_run
-- params: tenant_id uuid, run_id uuid
-- returns: QueuedRun?
-- Before the run's row is locked, in the same order as a claim. If the command changes nothing, requeue_run puts the run
-- back.
WITH blocked AS (
  DELETE FROM interlock.blocked_run WHERE tenant_id = @tenant_id AND run_id = @run_id RETURNING is_new, reclaimed
), ready AS (
  DELETE FROM interlock.ready_run WHERE tenant_id = @tenant_id AND run_id = @run_id RETURNING is_new, reclaimed
)
SELECT is_new, reclaimed FROM ready UNION ALL SELECT is_new, reclaimed FROM blocked;

-- name: is_queued
-- params: tenant_id uuid, run_id uuid
-- returns: boolean
-- Valid only while the run's row is locked: every statement that queues a run holds that lock.
SELECT EXISTS (SELECT FROM interlock.ready_run WHERE tenant_id = @tenant_id AND run_id = @run_id)
    OR EXISTS (SELECT FROM interlock.blocked_run WHERE tenant_id = @tenant_id AND run_id = @run_id);

-- name: lock_run
-- params: tenant_id uuid, run_id uuid
-- returns: LockedRun?
SELECT *, interlock.now() AS now FROM interlock.run WHERE tenant_id = @tenant_id AND id = @run_id FOR NO KEY UPDATE;

-- name: requeue_run
-- params: move interlock.queue_move
-- returns: nothing
SELECT interlock.requeue_runs(ARRAY[@move])::text;

-- name: post_command
-- moves: run running -cancel-> canceling
-- params: run_id uuid, command text, step text?, actor text, data jsonb, status text
-- returns: RunRecord
-- Leave a command for the run's holder, whose next write checks the count on the run's row, even if that write already
-- waits for this lock.
WITH posted AS (
  INSERT INTO interlock.run_command (run_id, command, step, actor, data, at)
  VALUES (@run_id, @command, @step, @actor, @data, interlock.now())
)
UPDATE interlock.run SET pending_commands = pending_commands + 1, status = @status
 WHERE id = @run_id
RETURNING *, pg_notify('interlock.run_command', lease_worker::text)::text;

-- name: post_commands
-- params: run_ids uuid[], commands text[], steps text?[], actors text[], data jsonb[]
-- returns: nothing
-- Events that arrived before their steps began to wait, for runs that the calling worker holds.
WITH arrived AS (
  SELECT * FROM unnest(@run_ids, @commands, @steps, @actors, @data) AS a (run_id, command, step, actor, data)
), posted AS (
  INSERT INTO interlock.run_command (run_id, command, step, actor, data, at)
  SELECT run_id, command, step, actor, data, interlock.now() FROM arrived
)
UPDATE interlock.run SET pending_commands = pending_commands + counted.commands
  FROM (SELECT run_id, count(*)::int AS commands FROM arrived GROUP BY run_id) AS counted
 WHERE run.id = counted.run_id;

-- name: discard_commands
-- params: run_id uuid
-- returns: nothing
-- For a run that ends before a worker read its commands.
WITH discarded AS (DELETE FROM interlock.run_command WHERE run_id = @run_id)
UPDATE interlock.run SET pending_commands = 0 WHERE id = @run_id;

-- name: last_seq
-- params: run_id uuid
-- returns: int
-- From the journal itself: the row knows only the sequence number of its last change.
SELECT max(seq) FROM interlock.journal_entry WHERE run_id = @run_id;

-- name: pending_commands
-- params: run_ids uuid[]
-- returns: PendingCommand*
SELECT id, run_id, command, step, actor, data, at FROM interlock.run_command WHERE run_id = ANY(@run_ids) ORDER BY id;

-- name: runs_with_commands
-- params: worker_id uuid
-- returns: RunId*
SELECT id FROM interlock.run WHERE lease_worker = @worker_id AND pending_commands > 0;
