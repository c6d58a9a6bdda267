-- Runs that start runs, and what they tell each other.

-- name: adopt_runs
-- In the transaction that started them.
UPDATE run SET parent_run_id = child.parent_id, parent_step = child.step, root_id = child.root_id
  FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[]) AS child (id, parent_id, step, root_id)
 WHERE run.id = child.id;

-- name: tell_parents
-- With the entry that ends a child.
INSERT INTO errand (tenant_id, from_run, to_run, command, step, at)
SELECT tenant_id, id, parent_run_id, 'child_ended', parent_step, coalesce($1, now())
  FROM run WHERE id = ANY($2::uuid[]) AND parent_step IS NOT NULL;

-- name: stop_children
-- With the entry that ends their parent.
INSERT INTO errand (tenant_id, from_run, to_run, command, at)
SELECT tenant_id, parent_run_id, id, 'cancel', coalesce($1, now())
  FROM run WHERE parent_run_id = ANY($2::uuid[]) AND completed_at IS NULL;

-- name: waiting_errands
SELECT id FROM errand ORDER BY id LIMIT $1;

-- name: take_errand
-- By one of those who saw it. If the command that follows fails, it is there again.
DELETE FROM errand WHERE id = (SELECT id FROM errand WHERE id = $1 FOR UPDATE SKIP LOCKED) RETURNING *;

-- name: await_flow
-- In the transaction that parks the run.
UPDATE run SET awaits_flow = awaited.flow
  FROM unnest($1::uuid[], $2::text[]) AS awaited (id, flow)
 WHERE run.id = awaited.id;
