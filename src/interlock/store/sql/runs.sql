-- Starting runs and reading them.

-- name: start_run
-- moves: run -create-> pending, run pending -start-> running, idempotency -> processing, idempotency processing -complete-> completed
-- params: run interlock.new_run, if_newest boolean, key text?, source text?, digest bytea?, keep_seconds float8?,
--   answer bytea
-- returns: timestamptz?
-- Start one run in the common case, with the record of the request and its answer, as a transaction of its own. Return
-- the time of creation, or None if nothing was started.
SELECT interlock.start_run(@run, @if_newest, @key, @source, @digest, @keep_seconds, @answer);

-- name: start_runs
-- moves: run -create-> pending
-- params: runs interlock.new_run[]
-- returns: StartedRuns
-- Start one or many runs whose first step needs a worker. A run of a workflow with a cap is blocked until it has room.
SELECT interlock.now() AS now, interlock.start_runs(@runs) AS last_place;

-- name: insert_run
-- moves: run -create-> pending
-- params: run interlock.new_run
-- returns: RunRecord?
-- A run that does not go straight to the queue: its first step is a gate or a wait, or it continues another run. It takes
-- the next free place in a minute like any other run; `resume_at` is set if that is in a later minute. No row if an
-- earlier attempt of the same call inserted it.
SELECT inserted.*
  FROM unnest(ARRAY[@run]) AS new
 CROSS JOIN LATERAL interlock.insert_runs(ARRAY[@run], interlock.take_start_places(new.tenant_id, 1), NULL) AS inserted
 WHERE NOT EXISTS (SELECT FROM interlock.run WHERE run.id = new.run_id);

-- name: get_run
-- params: tenant_id uuid, run_id uuid
-- returns: RunDetails?
-- A run's heartbeat is that of the worker that holds it; its update time is that of its last entry.
SELECT run.*, worker.heartbeat_at AS last_heartbeat_at,
       (SELECT at FROM interlock.journal_entry WHERE run_id = run.id ORDER BY seq DESC LIMIT 1) AS updated_at
  FROM interlock.run LEFT JOIN interlock.worker ON worker.id = run.lease_worker
 WHERE run.tenant_id = @tenant_id AND run.id = @run_id;

-- name: get_run_to_show
-- params: tenant_id uuid, run_id uuid, with_journal boolean, or_if_waiting boolean
-- returns: RunToShow?
-- With its journal if `with_journal` is set, if the run has ended, or if `or_if_waiting` is set and it waits for an
-- approval.
SELECT run.*, (SELECT heartbeat_at FROM interlock.worker WHERE worker.id = run.lease_worker) AS last_heartbeat_at,
       NULL::timestamptz AS updated_at,
       CASE WHEN @with_journal OR completed_at IS NOT NULL OR (@or_if_waiting AND status = 'waiting_approval')
            THEN ARRAY(SELECT journal_entry FROM interlock.journal_entry WHERE run_id = run.id ORDER BY seq) END AS entries
  FROM interlock.run WHERE tenant_id = @tenant_id AND id = @run_id;

-- name: list_runs
-- params: tenant_id uuid, before uuid?, status text?, workflow text?, session_id uuid?, job_id uuid?, parent_run_id uuid?,
--   workspace_id text?, repository text?, most int
-- returns: RunDetails*
-- Newest first. The cursor is the id of the last run seen.
SELECT run.*, worker.heartbeat_at AS last_heartbeat_at,
       (SELECT at FROM interlock.journal_entry WHERE run_id = run.id ORDER BY seq DESC LIMIT 1) AS updated_at
  FROM interlock.run LEFT JOIN interlock.worker ON worker.id = run.lease_worker
 WHERE run.tenant_id = @tenant_id
   AND (@before IS NULL OR run.id < @before)
   AND (@status IS NULL OR run.status = @status)
   AND (@workflow IS NULL OR run.workflow = @workflow)
   AND (@session_id IS NULL OR run.session_id = @session_id)
   AND (@job_id IS NULL OR run.job_id = @job_id)
   AND (@workspace_id IS NULL OR run.workspace_id = @workspace_id)
   AND (@parent_run_id IS NULL OR run.parent_run_id = @parent_run_id)
   AND (@repository IS NULL OR run.trigger #>> '{metadata,repository}' = @repository)
 ORDER BY run.id DESC
 LIMIT @most;

-- name: count_runs_by_status
-- returns: StatusCount*
SELECT status, count(*) FROM interlock.run WHERE completed_at IS NULL GROUP BY status;

-- name: watch_run
-- params: run_id uuid, seconds float8
-- returns: nothing
-- A client follows the run: appends notify until then. An ended run needs no watching.
UPDATE interlock.run SET watched_until = interlock.now() + make_interval(secs => @seconds)
 WHERE id = @run_id AND completed_at IS NULL;

-- name: journal_of
-- params: run_ids uuid[]
-- returns: EntryRecord*
SELECT run_id, seq, at, type, step, from_state, event, to_state, attempt, token, actor, data, output
  FROM interlock.journal_entry WHERE run_id = ANY(@run_ids) ORDER BY run_id, seq;

-- name: entries_after
-- params: run_id uuid, seq int, most int
-- returns: EntryRecord*
SELECT run_id, seq, at, type, step, from_state, event, to_state, attempt, token, actor, data, output
  FROM interlock.journal_entry WHERE run_id = @run_id AND seq > @seq ORDER BY seq LIMIT @most;
