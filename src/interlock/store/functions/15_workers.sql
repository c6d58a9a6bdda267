-- Workers and jobs: the numbers of their events.

-- The next history number of a worker or job whose row the caller has locked. The function reads with a separate
-- snapshot: the calling statement's may be older than the lock, and would return a number that another session has
-- used.
CREATE OR REPLACE FUNCTION interlock.next_resource_event(subject uuid) RETURNS int LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  RETURN 1 + coalesce((SELECT max(seq) FROM interlock.resource_event WHERE subject_id = subject), 0);
END $$;
