-- The short way of one run: a worker with nothing to do keeps a seat open, and whoever starts a run may put it there.

-- A hint that nothing depends on: a worker looks for work all the same, and a seat that is lost in a crash is opened
-- again. Nobody waits for one that is locked. `channel` is where the worker hears of the run that was put on it.
CREATE UNLOGGED TABLE seat (
  worker_id  uuid PRIMARY KEY,
  actor      text NOT NULL,
  channel    text NOT NULL,
  tenants    uuid[]
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- One run whose first step is for a worker, of a workflow without a cap, as its own transaction: with the record of the
-- request and its answer, in whose middle the time of creation is written. `at` is NULL if nothing was started: the
-- request was made before, the version is not the newest any more, or the tenant's runs have to be paced.
--
-- The run goes to a seat if nothing of its tenant waits before it and there is room for it, else into the queue. Several
-- small statements, and only those that are needed: one that could do either is prepared for both every time.
CREATE FUNCTION start_run(
  clock timestamptz, new_id uuid, tenant uuid, workspace text, named text, numbered int, if_newest boolean,
  given text, cause text, starter text, deadline_seconds float8, watch_seconds float8, facts text,
  request_key text, request_source text, request_digest bytea, keep_seconds float8, answer_before text, answer_after text,
  OUT at timestamptz, OUT answer bytea
) LANGUAGE plpgsql AS $$
DECLARE
  home record;
  free seat;
  held record;
  made record;
  handed text;
BEGIN
  SELECT max_runs_per_min, EXISTS (SELECT FROM seat) AS seats,
         EXISTS (SELECT FROM workflow WHERE tenant_id = tenant AND name = named AND version > numbered) AS newer
    INTO home
    FROM lane WHERE tenant_id = tenant;
  IF home.max_runs_per_min IS NOT NULL OR (if_newest AND home.newer) THEN
    RETURN;
  END IF;
  answer := convert_to(
    answer_before || to_char(coalesce(clock, now()) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
    || answer_after, 'UTF8'
  );
  IF request_key IS NOT NULL THEN
    INSERT INTO idempotency (tenant_id, key, source, status, request_hash, response_status, response_body, run_id,
                             created_at, expires_at)
    VALUES (tenant, request_key, request_source, 'completed', request_digest, 201, answer, new_id,
            coalesce(clock, now()), coalesce(clock, now()) + make_interval(secs => keep_seconds))
    ON CONFLICT (tenant_id, key) DO UPDATE
       SET status = 'completed', request_hash = excluded.request_hash, response_status = excluded.response_status,
           response_body = excluded.response_body, run_id = excluded.run_id, created_at = excluded.created_at,
           expires_at = excluded.expires_at, attempts = 1, error = NULL, lock_expires_at = NULL
     WHERE idempotency.expires_at <= excluded.created_at;
    IF NOT FOUND THEN
      RETURN;
    END IF;
  END IF;
  at := coalesce(clock, now());

  IF home.seats THEN
    UPDATE lane SET in_flight = in_flight + 1 WHERE tenant_id = tenant AND NOT active AND NOT full_up
    RETURNING max_writes_per_run, policy_version INTO held;
    IF FOUND THEN
      DELETE FROM seat WHERE worker_id = (
        SELECT seat.worker_id
          FROM seat JOIN worker ON worker.id = seat.worker_id
         WHERE worker.status = 'running' AND worker.job_id IS NULL
           AND (seat.tenants IS NULL OR tenant = ANY(seat.tenants))
         LIMIT 1
           FOR UPDATE OF seat SKIP LOCKED
           FOR SHARE OF worker SKIP LOCKED
      ) RETURNING * INTO free;
      IF NOT FOUND THEN
        UPDATE lane SET in_flight = in_flight - 1 WHERE tenant_id = tenant;
      END IF;
    END IF;
  END IF;
  IF free.worker_id IS NOT NULL THEN
    INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                     created_at, deadline_at, watched_until, requester, started_at, lease_token, lease_worker)
    VALUES (new_id, tenant, workspace, named, numbered, 'running', given::jsonb, cause::jsonb, starter, 2,
            at, at + make_interval(secs => deadline_seconds), at + make_interval(secs => watch_seconds), facts::jsonb,
            at, 1, free.worker_id)
    RETURNING input::text, trigger::text, requester::text, deadline_at INTO made;
    INSERT INTO entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor, data)
    VALUES (new_id, 1, tenant, at, 'run_created', NULL, 'create', 'pending', 0, starter,
            jsonb_build_object('workflow', named, 'version', numbered, 'trigger', cause::jsonb)),
           (new_id, 2, tenant, at, 'run_transition', 'pending', 'start', 'running', 1, free.actor, NULL);
    handed := json_build_object(
      'id', new_id, 'tenant_id', tenant, 'workspace_id', workspace, 'workflow', named, 'workflow_version', numbered,
      'input', made.input, 'trigger', made.trigger, 'requested_by', starter, 'requester', made.requester, 'at', at,
      'deadline_at', made.deadline_at, 'lease_worker', free.worker_id, 'max_writes_per_run', held.max_writes_per_run,
      'policy_version', held.policy_version
    );
    PERFORM pg_notify(free.channel, CASE WHEN octet_length(handed) < 7900 THEN handed ELSE '' END);
    RETURN;
  END IF;

  INSERT INTO run (id, tenant_id, workspace_id, workflow, workflow_version, status, input, trigger, requested_by, seq,
                   created_at, deadline_at, watched_until, requester)
  VALUES (new_id, tenant, workspace, named, numbered, 'pending', given::jsonb, cause::jsonb, starter, 1,
          at, at + make_interval(secs => deadline_seconds), at + make_interval(secs => watch_seconds), facts::jsonb);
  INSERT INTO entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor, data)
  VALUES (new_id, 1, tenant, at, 'run_created', 'create', 'pending', 0, starter,
          jsonb_build_object('workflow', named, 'version', numbered, 'trigger', cause::jsonb));
  INSERT INTO ready (tenant_id, run_id, fresh, lost) VALUES (tenant, new_id, true, false);
  PERFORM wake_lane(tenant, NULL);
END $$;
