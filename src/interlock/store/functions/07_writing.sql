-- Writing runs: the entries of many runs, and the runs that their writers give back, in one transaction.

-- Gives back runs: sets the new values of their rows, if the writer still holds them and no command waits for them. The
-- writer is a worker, by its lease, or a command, which has locked the row of a run without a lease.
CREATE OR REPLACE FUNCTION interlock.release_runs(holder uuid, releases interlock.run_release[])
RETURNS interlock.written_run[] LANGUAGE plpgsql AS $$
DECLARE
  released interlock.written_run[];
BEGIN
  WITH changed AS (
    UPDATE interlock.run
       SET status = new.to_status, reason = new.reason, result = new.result, error = new.error,
           completed_at = CASE WHEN new.reason IS NOT NULL THEN interlock.now() END,
           resume_at = new.resume_at, awaits_flow = new.awaits_flow, seq = new.seq,
           -- The journal may have costs of a lost worker that the row lacks.
           cost_usd = greatest(run.cost_usd, new.cost_usd), queue_id = new.queue_id, lease_worker = NULL
      FROM unnest(releases) AS new
     WHERE run.id = new.run_id
       -- Said twice: with the join alone the planner may read all runs.
       AND run.id = ANY(ARRAY(SELECT run_id FROM unnest(releases)))
       AND run.lease_token = new.token AND run.lease_worker IS NOT DISTINCT FROM holder
       AND run.status = new.from_status AND (holder IS NULL OR run.pending_commands = 0)
    RETURNING ROW(
      run.id, run.tenant_id, run.workspace_id, run.completed_at, run.watched_until > interlock.now(), false,
      ROW(run.tenant_id, run.id, new.left_queue_id, CASE WHEN new.priority IS NOT NULL THEN new.queue_id END,
          CASE WHEN run.has_concurrency_limit THEN run.workflow END, new.priority, new.is_new, new.reclaimed
      )::interlock.queue_move
    )::interlock.written_run AS run
  )
  SELECT array_agg(changed.run) INTO released FROM changed;
  RETURN released;
END $$;

-- The runs that the worker only adds entries to, and whose lease it still holds. Their rows do not change. One look-up by
-- primary key for each: with a join, or with `lease_worker = holder`, the planner may scan all leased runs.
CREATE OR REPLACE FUNCTION interlock.held_runs(holder uuid, entries interlock.new_entry[], releases interlock.run_release[])
RETURNS interlock.written_run[] LANGUAGE plpgsql AS $$
DECLARE
  held interlock.written_run[];
BEGIN
  SELECT array_agg(ROW(
           run.id, run.tenant_id, NULL, NULL, run.watched_until > interlock.now(), run.pending_commands > 0, NULL
         )::interlock.written_run) INTO held
    FROM (SELECT DISTINCT run_id, token FROM unnest(entries)) AS writing
   CROSS JOIN LATERAL (
     SELECT * FROM interlock.run
      WHERE run.id = writing.run_id AND run.lease_token = writing.token
        AND run.lease_worker IS NOT DISTINCT FROM holder
      LIMIT 1
   ) AS run
   WHERE holder IS NOT NULL AND run.id <> ALL(ARRAY(SELECT run_id FROM unnest(releases)));
  RETURN held;
END $$;

-- A message for each webhook that subscribes to ended runs. Most tenants have none: then this is one look-up in an empty
-- index.
CREATE OR REPLACE FUNCTION interlock.announce_ends(released interlock.written_run[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO interlock.outbox_message (tenant_id, target_id, channel, event, subject_id, created_at, due_at)
  SELECT ended.tenant_id, target.id, target.channel, 'run.completed', ended.run_id, ended.completed_at, ended.completed_at
    FROM unnest(released) AS ended
    JOIN interlock.notification_target AS target ON target.tenant_id = ended.tenant_id AND target.disabled_at IS NULL
   WHERE ended.completed_at IS NOT NULL
     AND 'run.completed' = ANY(target.events)
     AND (target.workspace_id IS NULL OR target.workspace_id = ended.workspace_id);
END $$;

-- Writes entries and gives back runs. Only the holder of a run's current lease may write. Two conditions enforce it: the
-- token must be the run's current one, and the worker must be alive. The worker's row is locked FOR KEY SHARE, so it
-- cannot be declared lost meanwhile, and every later write of a lost worker is refused: the next holder of its runs reads
-- a journal that can no longer grow. KEY SHARE conflicts with the statements that end the worker (FOR UPDATE), but not
-- with its heartbeat or a reservation. A command passes no worker: it has locked the run's row.
--
-- Returns each run whose entries were kept. A run that is given back is kept only if no command waits for it.
CREATE OR REPLACE FUNCTION interlock.write_runs(
  holder uuid, entries interlock.new_entry[], releases interlock.run_release[], slot interlock.dispatch_slot
) RETURNS TABLE (kept_run uuid, has_pending_commands boolean) LANGUAGE plpgsql AS $$
DECLARE
  released interlock.written_run[];
  kept interlock.written_run[];
BEGIN
  IF holder IS NOT NULL THEN
    PERFORM FROM interlock.worker WHERE id = holder AND status IN ('running', 'paused') FOR KEY SHARE;
    IF NOT FOUND THEN
      RETURN;
    END IF;
  END IF;
  IF cardinality(releases) > 0 THEN
    released := interlock.release_runs(holder, releases);
  END IF;
  kept := released || interlock.held_runs(holder, entries, releases);
  -- The primary key refuses a second writer of the same number.
  INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, step, from_state, event, to_state, attempt, token,
                                       actor, data, output)
  SELECT new.run_id, new.seq, run.tenant_id, interlock.now(), new.type, new.step, new.from_state, new.event, new.to_state,
         new.attempt, new.token, new.actor, new.data, new.output
    FROM unnest(entries) AS new JOIN unnest(kept) AS run ON run.run_id = new.run_id;
  IF released IS NOT NULL THEN
    PERFORM interlock.requeue_runs(ARRAY(SELECT move FROM unnest(released)));
    PERFORM interlock.announce_ends(released);
  END IF;
  IF slot.channel IS NOT NULL AND cardinality(released) = cardinality(releases) THEN
    -- The worker has a free place now, and opens a slot with it. If a run must stay, it has none.
    INSERT INTO interlock.dispatch_slot SELECT slot.* ON CONFLICT (worker_id) DO NOTHING;
  END IF;
  PERFORM pg_notify('interlock.run', run_id::text) FROM unnest(kept) WHERE is_watched;
  RETURN QUERY SELECT run.run_id, run.has_pending_commands FROM unnest(kept) AS run;
END $$;
