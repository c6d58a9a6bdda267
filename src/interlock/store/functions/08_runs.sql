-- Runs.

-- Everyone who requested what a run does: the requesters of the run itself, of the runs that it continues, and of the
-- runs whose steps started any of these; not only the last requester.
CREATE OR REPLACE FUNCTION interlock.requesters_of(asked uuid) RETURNS text[] LANGUAGE sql STABLE AS $$
  WITH RECURSIVE behind AS (
    SELECT id, requested_by, resumed_from, parent_run_id FROM interlock.run WHERE id = asked
    UNION
    SELECT run.id, run.requested_by, run.resumed_from, run.parent_run_id
      FROM behind JOIN interlock.run ON run.id = ANY(ARRAY[behind.resumed_from, behind.parent_run_id])
  )
  SELECT array_agg(DISTINCT requested_by) FROM behind
$$;
