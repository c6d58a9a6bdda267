-- Claiming: which runs a worker gets next.

-- name: claim_runs
-- moves: run pending -start-> running
-- The fairest lanes, then the top of each. SKIP LOCKED lets workers pass each other. The lane's row is locked, so its
-- cap holds however many workers claim at once. A lane that gave less than its share comes back too, with no run if it
-- gave none: it is dry.
WITH me AS MATERIALIZED (
  SELECT id FROM worker WHERE id = $2 AND status = 'running' FOR SHARE
), turn AS MATERIALIZED (
  SELECT tenant_id, weight, vtime, max_writes_per_run, policy_version,
         coalesce(max_concurrency, 2147483647) - in_flight AS room
    FROM lane
   WHERE active AND NOT full_up AND (SELECT count(*) FROM me) = 1
   ORDER BY vtime
   LIMIT $3
     FOR NO KEY UPDATE SKIP LOCKED
), pull AS (
  -- By weight; half of it for a lane that got ahead because others were locked when it was served, until they are level.
  SELECT tenant_id, room, vtime,
         weight * CASE WHEN vtime > min(vtime) OVER () + $3 / sum(weight) OVER () THEN 0.5 ELSE 1 END AS pull
    FROM turn
), whole AS (
  SELECT tenant_id, room, vtime, floor($3 * pull / sum(pull) OVER ())::int AS runs FROM pull
), rounded AS (
  -- What rounding down leaves over goes to those whose turn is next, so that small batches add up to the weights too.
  SELECT tenant_id, room, runs + (row_number() OVER (ORDER BY vtime) <= $3 - sum(runs) OVER ())::int AS runs FROM whole
), share AS (
  SELECT tenant_id, least(room, runs) AS share, turn.max_writes_per_run, turn.policy_version
    FROM rounded JOIN turn USING (tenant_id, room) WHERE runs > 0
), picked AS MATERIALIZED (
  SELECT top.tenant_id, top.run_id, top.fresh, top.lost
    FROM share
   CROSS JOIN LATERAL (
     SELECT tenant_id, run_id, fresh, lost FROM ready
      WHERE ready.tenant_id = share.tenant_id
      ORDER BY turn
      LIMIT share.share
        FOR UPDATE SKIP LOCKED
   ) AS top
   LIMIT $3
), taken AS (
  DELETE FROM ready USING picked
   WHERE ready.tenant_id = picked.tenant_id AND ready.run_id = picked.run_id
     AND ready.run_id = ANY(ARRAY(SELECT run_id FROM picked))
), leased AS (
  UPDATE run
     SET status = CASE WHEN picked.fresh THEN 'running' ELSE run.status END,
         started_at = coalesce(run.started_at, $1, now()),
         seq = run.seq + picked.fresh::int,
         lease_token = run.lease_token + 1,
         lease_worker = $2,
         wake_at = NULL
    FROM picked
   WHERE run.id = picked.run_id AND run.lease_worker IS NULL
     -- Said twice, for a join alone may be made by reading all runs; and not IS NULL, which invites to read all open ones.
     AND run.id = ANY(ARRAY(SELECT run_id FROM picked))
     AND coalesce(run.completed_at, 'infinity') = 'infinity'
  RETURNING run.id, run.tenant_id, run.workflow, run.workflow_version, run.status, run.input, run.trigger, run.seq,
            run.lease_token, run.inbox, run.created_at, run.deadline_at, run.requested_by, run.requester, run.workspace_id,
            run.started_at, run.parent_run_id, run.session_id, run.session_run, run.auto_approve, picked.fresh, picked.lost
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor)
  SELECT id, seq, tenant_id, coalesce($1, now()), 'run_transition', 'pending', 'start', 'running', lease_token, $4
    FROM leased WHERE fresh
), charged AS (
  UPDATE lane SET in_flight = in_flight + got.runs, vtime = vtime + got.runs / weight
    FROM (SELECT tenant_id, count(*)::int AS runs FROM leased GROUP BY tenant_id) AS got
   WHERE lane.tenant_id = got.tenant_id
)
SELECT leased.*, share.tenant_id AS lane, share.share, share.max_writes_per_run, share.policy_version,
       coalesce($1, now()) AS now
  FROM share LEFT JOIN leased ON leased.tenant_id = share.tenant_id;

-- name: rest_lanes
-- In the order of all who lock several lanes.
SELECT tenant_id, rest_lane(tenant_id) FROM (SELECT t FROM unnest($1::uuid[]) AS t ORDER BY t) AS lanes (tenant_id);

-- name: work_is_waiting
SELECT EXISTS (SELECT FROM lane WHERE active AND NOT full_up);

-- name: count_leases
SELECT count(*) FROM run WHERE lease_worker = $1;

-- name: leases_of
-- What the database thinks that this worker holds: asked after an answer to a claim was lost on its way.
SELECT id, tenant_id, workflow, workflow_version, status, input, trigger, seq, lease_token, inbox, created_at,
       deadline_at, requested_by, requester, workspace_id, started_at, parent_run_id, session_id, session_run,
       auto_approve, false AS fresh, false AS lost,
       tenant_id AS lane, 0 AS share, lane.max_writes_per_run, lane.policy_version, coalesce($1, now()) AS now
  FROM run JOIN lane USING (tenant_id) WHERE lease_worker = $2;
