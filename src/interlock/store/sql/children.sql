-- Child runs, and the commands that parents and children send each other.

-- name: tenant_names
-- params: tenant_ids uuid[]
-- returns: TenantName*
SELECT id, name FROM interlock.tenant WHERE id = ANY(@tenant_ids);

-- name: signal_parents
-- params: run_ids uuid[]
-- returns: nothing
-- In the transaction of the entry that ends a child.
INSERT INTO interlock.run_signal (tenant_id, from_run, to_run, command, step, at)
SELECT tenant_id, id, parent_run_id, 'child_ended', parent_step, interlock.now()
  FROM interlock.run WHERE id = ANY(@run_ids) AND parent_step IS NOT NULL;

-- name: signal_children
-- params: run_ids uuid[]
-- returns: nothing
-- In the transaction of the entry that ends the parent.
INSERT INTO interlock.run_signal (tenant_id, from_run, to_run, command, at)
SELECT tenant_id, parent_run_id, id, 'cancel', interlock.now()
  FROM interlock.run WHERE parent_run_id = ANY(@run_ids) AND completed_at IS NULL;

-- name: waiting_signals
-- params: most int
-- returns: bigint*
SELECT id FROM interlock.run_signal ORDER BY id LIMIT @most;

-- name: take_signal
-- params: signal_id bigint
-- returns: RunSignal?
-- Only one of the processes that saw the errand takes it. If the command that follows fails, the row is kept.
DELETE FROM interlock.run_signal WHERE id = (SELECT id FROM interlock.run_signal WHERE id = @signal_id FOR UPDATE SKIP LOCKED) RETURNING *;
