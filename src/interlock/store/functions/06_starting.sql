-- Starting runs.

-- Inserts the rows of new runs and their first entries. `places`: the later minutes in which the rate limit lets them go
-- on, in the order of the runs. `slot`: the worker that gets the run at once.
CREATE OR REPLACE FUNCTION interlock.insert_runs(
  news interlock.new_run[], places timestamptz[], slot interlock.dispatch_slot
) RETURNS SETOF interlock.run LANGUAGE plpgsql AS $$
BEGIN
  RETURN QUERY
  WITH inserted AS (
    INSERT INTO interlock.run (
      id, tenant_id, workspace_id, workflow, workflow_version, has_concurrency_limit, status, input, trigger, requested_by,
      requester, session_id, session_run, auto_approve, job_id, parent_run_id, parent_step, resumed_from, root_id,
      resume_count, seq, lease_token, lease_worker, queue_id, resume_at, deadline_at, watched_until, created_at, started_at
    )
    SELECT new.run_id, new.tenant_id, new.workspace_id, new.workflow, new.workflow_version, new.has_concurrency_limit,
           CASE WHEN slot.worker_id IS NULL THEN 'pending' ELSE 'running' END, new.input, new.trigger, new.requested_by,
           new.requester, new.session_id, new.session_run, coalesce(new.auto_approve, false), new.job_id,
           new.parent_run_id, new.parent_step, new.resumed_from, new.root_id, coalesce(new.resume_count, 0),
           CASE WHEN slot.worker_id IS NULL THEN 1 ELSE 2 END, (slot.worker_id IS NOT NULL)::int, slot.worker_id,
           coalesce(new.job_id, new.tenant_id),
           CASE WHEN places[new.ordinality] > interlock.now() THEN places[new.ordinality] END,
           interlock.now() + make_interval(secs => new.deadline_seconds),
           interlock.now() + make_interval(secs => new.watch_seconds), interlock.now(),
           CASE WHEN slot.worker_id IS NOT NULL THEN interlock.now() END
      FROM unnest(news) WITH ORDINALITY AS new
    RETURNING *
  ), entries AS (
    INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor, data)
    SELECT id, 1, tenant_id, created_at, 'run_created', 'create', 'pending', 0, requested_by,
           jsonb_strip_nulls(jsonb_build_object('workflow', workflow, 'version', workflow_version, 'resumed_from', resumed_from))
             || jsonb_build_object('trigger', trigger)
      FROM inserted
  )
  SELECT * FROM inserted;
END $$;

-- Takes the next free places of the tenant's `max_runs_per_min` and returns the minute of each; NULL without a limit.
CREATE OR REPLACE FUNCTION interlock.take_start_places(tenant uuid, wanted int) RETURNS timestamptz[] LANGUAGE plpgsql AS $$
DECLARE
  most int := (SELECT max_runs_per_min FROM interlock.tenant_limits WHERE tenant_id = tenant);
  this_minute timestamptz := date_trunc('minute', interlock.now());
  first timestamptz;
  taken int;
BEGIN
  IF most IS NULL THEN
    RETURN NULL;
  END IF;
  SELECT minute, used INTO first, taken FROM interlock.start_rate WHERE tenant_id = tenant FOR NO KEY UPDATE;
  IF first IS NULL OR first < this_minute THEN
    first := this_minute;
    taken := 0;
  END IF;
  UPDATE interlock.start_rate
     SET minute = first + ((taken + wanted - 1) / most) * interval '1 minute', used = (taken + wanted - 1) % most + 1
   WHERE tenant_id = tenant;
  RETURN ARRAY(
    SELECT first + ((taken + number - 1) / most) * interval '1 minute' FROM generate_series(1, wanted) AS number
  );
END $$;

-- The places of many runs, in their order, tenant by tenant.
CREATE OR REPLACE FUNCTION interlock.places_of(news interlock.new_run[]) RETURNS timestamptz[] LANGUAGE plpgsql AS $$
DECLARE
  limited record;
  given timestamptz[];
  places timestamptz[];
BEGIN
  FOR limited IN
    SELECT new.tenant_id, array_agg(new.ordinality) AS numbers
      FROM unnest(news) WITH ORDINALITY AS new JOIN interlock.tenant_limits ON tenant_limits.tenant_id = new.tenant_id
     WHERE max_runs_per_min IS NOT NULL GROUP BY new.tenant_id ORDER BY new.tenant_id
  LOOP
    given := interlock.take_start_places(limited.tenant_id, cardinality(limited.numbers));
    FOR i IN 1 .. cardinality(limited.numbers) LOOP
      places[limited.numbers[i]] := given[i];
    END LOOP;
  END LOOP;
  RETURN places;
END $$;

-- Starts runs whose first step needs a worker. An id that exists already was started by an earlier attempt of the same
-- call. A tenant with a rate limit gives each run the next free place in a minute; runs of later minutes wait for theirs,
-- in order. Returns the latest of these places.
CREATE OR REPLACE FUNCTION interlock.start_runs(news interlock.new_run[]) RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
  started interlock.run[];
BEGIN
  news := ARRAY(
    SELECT new FROM unnest(news) AS new WHERE NOT EXISTS (SELECT FROM interlock.run WHERE run.id = new.run_id)
  );
  SELECT array_agg(run) INTO started FROM interlock.insert_runs(news, interlock.places_of(news), NULL) AS run;
  PERFORM interlock.requeue_runs(ARRAY(
    SELECT ROW(
      tenant_id, id, NULL, queue_id, CASE WHEN has_concurrency_limit THEN workflow END, 1, true, false
    )::interlock.queue_move
      FROM unnest(started) WHERE resume_at IS NULL
  ));
  RETURN (SELECT max(resume_at) FROM unnest(started));
END $$;

-- Stores the answer to a request under its key. Returns false if the key was used before and is still remembered.
CREATE OR REPLACE FUNCTION interlock.record_answer(
  tenant uuid, started uuid, request_key text, request_source text, digest bytea, keep_seconds float8, answer bytea
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO interlock.idempotency_record (tenant_id, key, source, status, request_hash, response_status, response_body,
                                            run_id, created_at, updated_at, expires_at)
  VALUES (tenant, request_key, request_source, 'completed', digest, 201, answer, started, interlock.now(), interlock.now(),
          interlock.now() + make_interval(secs => keep_seconds))
  ON CONFLICT (tenant_id, key) DO UPDATE
     SET status = 'completed', request_hash = excluded.request_hash, response_status = excluded.response_status,
         response_body = excluded.response_body, run_id = excluded.run_id, created_at = excluded.created_at,
         updated_at = excluded.updated_at, expires_at = excluded.expires_at, attempts = 1, error = NULL,
         lock_expires_at = NULL
   WHERE idempotency_record.expires_at <= excluded.created_at;
  RETURN FOUND;
END $$;

-- Takes an open dispatch slot for a run of this tenant, if no run of the tenant waits before it and there is room.
CREATE OR REPLACE FUNCTION interlock.take_dispatch_slot(tenant uuid) RETURNS interlock.dispatch_slot LANGUAGE plpgsql AS $$
DECLARE
  slot interlock.dispatch_slot;
BEGIN
  IF NOT EXISTS (SELECT FROM interlock.dispatch_slot) THEN
    RETURN NULL;
  END IF;
  UPDATE interlock.queue SET in_flight = in_flight + 1 WHERE id = tenant AND NOT has_work AND NOT at_capacity;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  DELETE FROM interlock.dispatch_slot WHERE worker_id = (
    SELECT open.worker_id
      FROM interlock.dispatch_slot AS open JOIN interlock.worker ON worker.id = open.worker_id
     WHERE worker.status = 'running' AND worker.job_id IS NULL AND (open.tenants IS NULL OR tenant = ANY(open.tenants))
     LIMIT 1
       FOR UPDATE OF open SKIP LOCKED
       FOR KEY SHARE OF worker SKIP LOCKED
  ) RETURNING * INTO slot;
  IF NOT FOUND THEN
    UPDATE interlock.queue SET in_flight = in_flight - 1 WHERE id = tenant;
  END IF;
  RETURN slot;
END $$;

-- Starts one run whose first step needs a worker, of a workflow without a cap, as its own transaction, with the record of
-- the request and its answer. Returns the time of creation, or NULL if nothing was started: the request was made before,
-- the version is not the newest any more, or the tenant's runs must be paced. Several small statements, and only those
-- that are needed: one statement for both cases is prepared for both every time.
CREATE OR REPLACE FUNCTION interlock.start_run(
  given interlock.new_run, if_newest boolean, request_key text, request_source text, digest bytea, keep_seconds float8,
  answer bytea
) RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
  slot interlock.dispatch_slot;
  leased interlock.leased_run;
  message text;
BEGIN
  IF (SELECT max_runs_per_min IS NOT NULL FROM interlock.tenant_limits WHERE tenant_id = given.tenant_id)
     OR if_newest AND EXISTS (
       SELECT FROM interlock.workflow
        WHERE tenant_id = given.tenant_id AND name = given.workflow AND version > given.workflow_version
     ) THEN
    RETURN NULL;
  END IF;
  IF request_key IS NOT NULL AND NOT interlock.record_answer(
    given.tenant_id, given.run_id, request_key, request_source, digest, keep_seconds, answer
  ) THEN
    RETURN NULL;
  END IF;
  slot := interlock.take_dispatch_slot(given.tenant_id);
  PERFORM FROM interlock.insert_runs(ARRAY[given], NULL, slot);
  IF slot.worker_id IS NULL THEN
    INSERT INTO interlock.ready_run (tenant_id, run_id, queue_id, priority, is_new)
    VALUES (given.tenant_id, given.run_id, given.tenant_id, 1, true);
    PERFORM interlock.activate_queue(given.tenant_id, given.tenant_id);
    RETURN interlock.now();
  END IF;
  INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor)
  VALUES (given.run_id, 2, given.tenant_id, interlock.now(), 'run_transition', 'pending', 'start', 'running', 1,
          slot.actor);
  SELECT * INTO leased FROM interlock.leased_run WHERE id = given.run_id;
  leased.is_new := true;
  leased.is_dispatched := true;
  message := to_json(leased);
  PERFORM pg_notify(slot.channel, CASE WHEN octet_length(message) < 7900 THEN message ELSE '' END);
  RETURN interlock.now();
END $$;
