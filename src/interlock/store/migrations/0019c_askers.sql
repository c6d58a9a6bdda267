-- Who asked for what a run does: not only who started it last.

-- Whoever started it, the runs that it continues, and those that started any of these for a step of theirs.
CREATE FUNCTION askers_of(asked uuid) RETURNS text[] LANGUAGE sql STABLE AS $$
  WITH RECURSIVE behind AS (
    SELECT id, requested_by, resumed_from, parent_run_id FROM run WHERE id = asked
    UNION
    SELECT run.id, run.requested_by, run.resumed_from, run.parent_run_id
      FROM behind JOIN run ON run.id = ANY(ARRAY[behind.resumed_from, behind.parent_run_id])
  )
  SELECT array_agg(DISTINCT requested_by) FROM behind
$$;

-- Each of them counts as having asked for the action: none of them approves it.
ALTER TABLE approval ADD COLUMN asked_by text[] NOT NULL DEFAULT '{}';
UPDATE approval SET asked_by = askers_of(run_id) WHERE status = 'requested' AND askers_of(run_id) IS NOT NULL;
