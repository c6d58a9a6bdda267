-- External events: each is delivered to one step, once.

-- Two pairs exclude each other: looking for a wait and keeping an event; looking for an event and starting to wait.
-- Without this lock both sides could look, find nothing, and miss each other forever.
CREATE OR REPLACE FUNCTION interlock.lock_event(tenant uuid, wanted text, about text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('interlock.event ' || tenant || ' ' || wanted || ' ' || about, 0));
END $$;

-- The caller has locked the run's row or holds its lease. Returns and consumes the event that came before, or returns
-- nothing: then the step waits. Each statement here has a separate snapshot, taken after the lock.
CREATE OR REPLACE FUNCTION interlock.await_event(
  tenant uuid, waiting uuid, waiting_step text, wanted text, about text, times_out_at timestamptz
) RETURNS SETOF interlock.external_event LANGUAGE plpgsql AS $$
DECLARE
  place text;
BEGIN
  PERFORM interlock.lock_event(tenant, wanted, about);
  SELECT workspace_id INTO place FROM interlock.run WHERE id = waiting;
  RETURN QUERY
    UPDATE interlock.external_event SET run_id = waiting, step = waiting_step, consumed_at = interlock.now()
     WHERE tenant_id = tenant AND number = (
       SELECT kept.number FROM interlock.external_event AS kept
        WHERE kept.tenant_id = tenant AND kept.type = wanted AND kept.correlation = about
          AND kept.consumed_at IS NULL AND kept.expires_at > interlock.now()
          AND (kept.workspace_id IS NULL OR kept.workspace_id = place)
        ORDER BY kept.number LIMIT 1)
    RETURNING *;
  IF NOT FOUND THEN
    INSERT INTO interlock.event_subscription (run_id, step, tenant_id, workspace_id, type, correlation, timeout_at)
    VALUES (waiting, waiting_step, tenant, place, wanted, about, times_out_at);
  END IF;
END $$;
