-- External events and event subscriptions. Each event is delivered to one step, once.

-- name: first_wait
-- The step that has waited longest for such an event. An event for a workspace goes only to runs of that workspace.
SELECT run_id, step FROM outside_wait
 WHERE tenant_id = $1 AND type = $2 AND correlation = $3 AND ($4::text IS NULL OR workspace_id = $4)
 ORDER BY number LIMIT 1;

-- name: lock_event
SELECT lock_event($1, $2, $3);

-- name: get_event
-- Only from this workspace, or only without one: event ids are chosen by the senders of one workspace.
SELECT * FROM outside_event WHERE tenant_id = $1 AND workspace_id IS NOT DISTINCT FROM $2 AND id = $3;

-- name: keep_event
-- With the step that receives it, if one waited for it.
INSERT INTO outside_event (tenant_id, id, workspace_id, type, correlation, payload, sent_by, received_at, expires_at,
                           run_id, step, consumed_at)
VALUES ($2, $3, $4, $5, $6, $7::text::jsonb, $8, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $9),
        $10, $11, CASE WHEN $10::uuid IS NOT NULL THEN coalesce($1, now()) END)
RETURNING *;

-- name: list_events
-- Newest first.
SELECT * FROM outside_event
 WHERE tenant_id = $1
   AND ($2::bigint IS NULL OR number < $2)
   AND ($3::text IS NULL OR type = $3)
   AND ($4::text IS NULL OR correlation = $4)
   AND ($5::boolean IS NULL OR (consumed_at IS NOT NULL) = $5)
   AND ($6::text IS NULL OR workspace_id = $6)
 ORDER BY number DESC LIMIT $7;

-- name: await_events
-- In one order for all callers, so that two callers that subscribe to the same events cannot deadlock.
SELECT wanted.run_id AS waiting, wanted.step AS waiting_step, came.*
  FROM (
    SELECT * FROM unnest($2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::timestamptz[])
      AS w (tenant_id, run_id, step, type, correlation, timeout_at)
     ORDER BY tenant_id, type, correlation
  ) AS wanted
 CROSS JOIN LATERAL await_event(
   coalesce($1, now()), wanted.tenant_id, wanted.run_id, wanted.step, wanted.type, wanted.correlation, wanted.timeout_at
 ) AS came;

-- name: end_wait
DELETE FROM outside_wait WHERE run_id = $1 AND step = $2 RETURNING step;

-- name: time_out_wait
DELETE FROM outside_wait WHERE run_id = $2 AND step = $3 AND timeout_at <= coalesce($1, now()) RETURNING step;

-- name: overdue_waits
SELECT tenant_id, run_id, step FROM outside_wait
 WHERE timeout_at <= coalesce($1, now())
 ORDER BY timeout_at LIMIT $2;

-- name: forget_expired_events
WITH gone AS (
  DELETE FROM outside_event
   WHERE (tenant_id, number) IN (
     SELECT tenant_id, number FROM outside_event WHERE expires_at <= coalesce($1, now()) LIMIT $2 FOR UPDATE SKIP LOCKED
   )
  RETURNING consumed_at
)
SELECT count(*) AS gone, count(*) FILTER (WHERE consumed_at IS NULL) AS unmatched FROM gone;
