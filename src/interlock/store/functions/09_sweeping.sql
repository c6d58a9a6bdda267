-- Sweeping: runs whose time has come, and runs whose worker was lost, go back into the queue.

-- Resumes waiting runs, whose rows the caller has locked: they go on, in order of their times. A run that waited for an
-- approval or an event gets the timer's entry that every transition after a wait has.
CREATE OR REPLACE FUNCTION interlock.resume_runs(ids uuid[], actor_name text)
RETURNS TABLE (resumed_id uuid, status_before interlock.run_state) LANGUAGE plpgsql AS $$
DECLARE
  resumed record;
BEGIN
  WITH before AS (
    SELECT id, status, resume_at, status IN ('waiting_approval', 'waiting_external') AS was_waiting
      FROM interlock.run WHERE id = ANY(ids)
  ), changed AS (
    UPDATE interlock.run
       SET resume_at = NULL, awaits_flow = NULL, status = CASE WHEN was_waiting THEN 'running' ELSE run.status END,
           seq = run.seq + was_waiting::int
      FROM before WHERE run.id = before.id
    RETURNING run.*, before.status AS status_before, before.resume_at AS was_due_at, was_waiting
  ), entries AS (
    INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor, data)
    SELECT id, seq, tenant_id, interlock.now(), 'run_transition', changed.status_before, 'resume', 'running', 0, actor_name,
           CASE WHEN was_due_at IS NOT NULL THEN jsonb_build_object('cause', jsonb_build_object(
             'by', actor_name, 'external_event', jsonb_build_object('event_type', 'timer', 'expected_at', was_due_at)
           )) END
      FROM changed WHERE was_waiting
  )
  SELECT array_agg(id) AS ids, array_agg(changed.status_before) AS statuses,
         array_agg(
           ROW(tenant_id, id, NULL, queue_id, CASE WHEN has_concurrency_limit THEN workflow END, 0,
               changed.status_before = 'pending', false)::interlock.queue_move
           ORDER BY was_due_at, id
         ) AS moves,
         array_agg(id) FILTER (WHERE watched_until > interlock.now()) AS watched
    INTO resumed FROM changed;
  PERFORM interlock.requeue_runs(resumed.moves);
  PERFORM pg_notify('interlock.run', id::text) FROM unnest(resumed.watched) AS id;
  RETURN QUERY SELECT * FROM unnest(resumed.ids, resumed.statuses);
END $$;

-- Takes runs back from workers that ended. Their end was committed before, so that this reads every entry they wrote.
CREATE OR REPLACE FUNCTION interlock.reclaim_runs(lost_workers uuid[], most int)
RETURNS TABLE (reclaimed_id uuid, lost_worker uuid, times_resumed int) LANGUAGE plpgsql AS $$
DECLARE
  taken record;
BEGIN
  WITH lost AS MATERIALIZED (
    SELECT id, lease_worker FROM interlock.run WHERE lease_worker = ANY(lost_workers) LIMIT most
  ), freed AS (
    UPDATE interlock.run
       SET lease_worker = NULL, resume_count = resume_count + 1,
           seq = (SELECT max(journal_entry.seq) FROM interlock.journal_entry WHERE run_id = run.id) + 1
      FROM lost WHERE run.id = lost.id AND run.lease_worker = lost.lease_worker
    RETURNING run.*, lost.lease_worker AS lost_worker
  ), entries AS (
    INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, token, actor, data)
    SELECT freed.id, freed.seq, freed.tenant_id, interlock.now(), 'orphan_detected', freed.lease_token, 'system:sweep',
           jsonb_build_object('worker', worker.name, 'last_heartbeat', worker.heartbeat_at)
      FROM freed JOIN interlock.worker ON worker.id = freed.lost_worker
  )
  SELECT array_agg(id) AS ids, array_agg(freed.lost_worker) AS workers, array_agg(resume_count) AS counts,
         array_agg(ROW(
           tenant_id, id, queue_id, queue_id, CASE WHEN has_concurrency_limit THEN workflow END, 0, false, true
         )::interlock.queue_move) AS moves,
         array_agg(id) FILTER (WHERE watched_until > interlock.now()) AS watched
    INTO taken FROM freed;
  PERFORM interlock.requeue_runs(taken.moves);
  PERFORM pg_notify('interlock.run', id::text) FROM unnest(taken.watched) AS id;
  RETURN QUERY SELECT * FROM unnest(taken.ids, taken.workers, taken.counts);
END $$;
