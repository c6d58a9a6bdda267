-- Writing runs: what workers and commands add to journals. The functions are in functions/07_writing.sql.

-- name: write_runs
-- moves: step * -> *, run * -> *
-- params: worker_id uuid?, entries interlock.new_entry[], releases interlock.run_release[],
--   slot interlock.dispatch_slot?
-- returns: WrittenRun*
-- Write entries and give back runs; the writer is a worker, or a command that locked the run's row. Return the runs
-- whose entries were kept. A run that is missing from the answer was refused.
SELECT kept_run AS run_id, has_pending_commands FROM interlock.write_runs(@worker_id, @entries, @releases, @slot);

-- name: drain_commands
-- params: command_ids bigint[], worker_id uuid
-- returns: nothing
-- In the transaction of the write that carries the results of the commands; only for runs that this worker still holds.
WITH applied AS (
  DELETE FROM interlock.run_command USING interlock.run
   WHERE run_command.id = ANY(@command_ids) AND run.id = run_command.run_id AND run.lease_worker = @worker_id
  RETURNING run_command.run_id
)
UPDATE interlock.run SET pending_commands = pending_commands - drained.commands
  FROM (SELECT run_id, count(*)::int AS commands FROM applied GROUP BY run_id) AS drained
 WHERE run.id = drained.run_id;

-- name: stop_runs
-- moves: run running|canceling -compensate-> canceling
-- params: run_ids uuid[], worker_id uuid
-- returns: nothing
-- In the transaction of the write whose entry starts the compensation. The lease stays: its holder runs the steps.
UPDATE interlock.run SET status = 'canceling' WHERE id = ANY(@run_ids) AND lease_worker = @worker_id;

-- name: written_before
-- params: run_ids uuid[], seqs int[], tokens bigint[]
-- returns: RunId*
-- After a connection broke during a write, return the runs whose first entry was committed. The entry that records the
-- lost lease does not count: it carries the holder's token and perhaps the sequence number that we wrote, but another
-- process wrote it.
SELECT run_id FROM interlock.journal_entry
 WHERE (run_id, seq, token) IN (SELECT * FROM unnest(@run_ids, @seqs, @tokens))
   AND type <> 'orphan_detected';

-- name: still_held
-- params: worker_id uuid, run_ids uuid[], tokens bigint[]
-- returns: RunId*
-- After a connection broke, return the runs that the worker still holds. If the write had no entries, the lease is the
-- only evidence.
SELECT id FROM interlock.run
 WHERE lease_worker = @worker_id AND (id, lease_token) IN (SELECT * FROM unnest(@run_ids, @tokens));
