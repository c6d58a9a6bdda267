-- External events and event subscriptions. Each event is delivered to one step, once.

-- name: first_wait
-- params: tenant_id uuid, type text, correlation text, workspace_id text?
-- returns: WaitingStep?
-- The step that has waited longest for such an event. An event for a workspace goes only to runs of that workspace.
SELECT run_id, step FROM interlock.event_subscription
 WHERE tenant_id = @tenant_id AND type = @type AND correlation = @correlation
   AND (@workspace_id IS NULL OR workspace_id = @workspace_id)
 ORDER BY number LIMIT 1;

-- name: lock_event
-- params: tenant_id uuid, type text, correlation text
-- returns: nothing
SELECT interlock.lock_event(@tenant_id, @type, @correlation);

-- name: get_event
-- params: tenant_id uuid, workspace_id text?, id text
-- returns: ExternalEvent?
-- Only from this workspace, or only without one: event ids are chosen by the senders of one workspace.
SELECT * FROM interlock.external_event WHERE tenant_id = @tenant_id AND workspace_id IS NOT DISTINCT FROM @workspace_id AND id = @id;

-- name: keep_event
-- params: tenant_id uuid, id text, workspace_id text?, type text, correlation text, payload jsonb, sent_by text,
--   keep_seconds float8, run_id uuid?, step text?
-- returns: ExternalEvent
-- With the step that receives it, if one waited for it.
INSERT INTO interlock.external_event (tenant_id, id, workspace_id, type, correlation, payload, sent_by, received_at,
                                      expires_at, run_id, step, consumed_at)
VALUES (@tenant_id, @id, @workspace_id, @type, @correlation, @payload, @sent_by, interlock.now(),
        interlock.now() + make_interval(secs => @keep_seconds), @run_id, @step,
        CASE WHEN @run_id IS NOT NULL THEN interlock.now() END)
RETURNING *;

-- name: list_events
-- params: tenant_id uuid, before bigint?, type text?, correlation text?, matched boolean?, workspace_id text?, most int
-- returns: ExternalEvent*
-- Newest first.
SELECT * FROM interlock.external_event
 WHERE tenant_id = @tenant_id
   AND (@before IS NULL OR number < @before)
   AND (@type IS NULL OR type = @type)
   AND (@correlation IS NULL OR correlation = @correlation)
   AND (@matched IS NULL OR (consumed_at IS NOT NULL) = @matched)
   AND (@workspace_id IS NULL OR workspace_id = @workspace_id)
 ORDER BY number DESC LIMIT @most;

-- name: await_events
-- params: subscriptions interlock.new_subscription[]
-- returns: ArrivedEvent*
-- Subscribe the steps, or return the events that had already arrived. In one order for all callers, so that two callers
-- that subscribe to the same events cannot deadlock.
SELECT wanted.run_id, wanted.step, came.id, came.type, came.correlation, came.payload, came.sent_by, came.received_at
  FROM (SELECT * FROM unnest(@subscriptions) ORDER BY tenant_id, type, correlation) AS wanted
 CROSS JOIN LATERAL interlock.await_event(
   wanted.tenant_id, wanted.run_id, wanted.step, wanted.type, wanted.correlation, wanted.timeout_at
 ) AS came;

-- name: end_wait
-- params: run_id uuid, step text
-- returns: text?
DELETE FROM interlock.event_subscription WHERE run_id = @run_id AND step = @step RETURNING step;

-- name: time_out_wait
-- params: run_id uuid, step text
-- returns: text?
DELETE FROM interlock.event_subscription
 WHERE run_id = @run_id AND step = @step AND timeout_at <= interlock.now() RETURNING step;

-- name: overdue_waits
-- params: most int
-- returns: OverdueWait*
SELECT tenant_id, run_id, step FROM interlock.event_subscription
 WHERE timeout_at <= interlock.now()
 ORDER BY timeout_at LIMIT @most;

-- name: forget_expired_events
-- params: most int
-- returns: ForgottenEvents
WITH gone AS (
  DELETE FROM interlock.external_event
   WHERE (tenant_id, number) IN (
     SELECT tenant_id, number FROM interlock.external_event WHERE expires_at <= interlock.now() LIMIT @most
        FOR UPDATE SKIP LOCKED
   )
  RETURNING consumed_at
)
SELECT count(*) AS gone, count(*) FILTER (WHERE consumed_at IS NULL) AS unmatched FROM gone;
