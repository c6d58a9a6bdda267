-- Child runs, and the commands that parents and children send each other.

-- name: adopt_runs
-- In the transaction that started the child runs.
UPDATE run SET parent_run_id = child.parent_id, parent_step = child.step, root_id = child.root_id
  FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[]) AS child (id, parent_id, step, root_id)
 WHERE run.id = child.id
RETURNING run.id, (SELECT name FROM tenant WHERE tenant.id = run.tenant_id) AS tenant;

-- name: tell_parents
-- In the transaction of the entry that ends a child.
INSERT INTO errand (tenant_id, from_run, to_run, command, step, at)
SELECT tenant_id, id, parent_run_id, 'child_ended', parent_step, coalesce($1, now())
  FROM run WHERE id = ANY($2::uuid[]) AND parent_step IS NOT NULL;

-- name: stop_children
-- In the transaction of the entry that ends the parent.
INSERT INTO errand (tenant_id, from_run, to_run, command, at)
SELECT tenant_id, parent_run_id, id, 'cancel', coalesce($1, now())
  FROM run WHERE parent_run_id = ANY($2::uuid[]) AND completed_at IS NULL;

-- name: waiting_errands
SELECT id FROM errand ORDER BY id LIMIT $1;

-- name: take_errand
-- Only one of the processes that saw the errand takes it. If the command that follows fails, the row is kept.
DELETE FROM errand WHERE id = (SELECT id FROM errand WHERE id = $1 FOR UPDATE SKIP LOCKED) RETURNING *;

-- name: await_flow
-- In the transaction that parks the run.
UPDATE run SET awaits_flow = awaited.flow
  FROM unnest($1::uuid[], $2::text[]) AS awaited (id, flow)
 WHERE run.id = awaited.id;
