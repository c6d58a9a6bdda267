-- Claiming: which runs a worker gets next.

-- name: claim_runs
-- moves: run pending -start-> running
-- Picks the lanes of a pool in fair order, then the first runs of each. SKIP LOCKED lets workers pass each other. The
-- lane's row is locked, so its cap holds however many workers claim at once. A lane that gave less than its share is
-- returned too, without a run if it gave none: it is dry. A worker that is reserved for a job claims only from that
-- job's pool.
WITH me AS MATERIALIZED (
  SELECT id FROM worker
   WHERE id = $2 AND status = 'running' AND CASE WHEN job_id IS NULL THEN $5 = ANY(labels) ELSE $5 = job_id::text END
     FOR KEY SHARE
), turn AS MATERIALIZED (
  SELECT id, home_id, weight, vtime, max_writes_per_run, policy_version,
         coalesce(max_concurrency, 2147483647) - in_flight AS room
    FROM lane
   WHERE pool = $5 AND active AND NOT full_up AND (SELECT count(*) FROM me) = 1
     AND ($6::uuid[] IS NULL OR home_id = ANY($6))
     AND (home_id = id OR NOT (SELECT full_up FROM lane AS home WHERE home.id = lane.home_id))
   ORDER BY vtime
   LIMIT $3
     FOR NO KEY UPDATE SKIP LOCKED
), home AS MATERIALIZED (
  -- A run from a side lane also counts in its tenant's own lane. If that lane is locked now, it gives nothing.
  SELECT id, max_writes_per_run, policy_version, coalesce(max_concurrency, 2147483647) - in_flight AS room
    FROM lane
   WHERE id IN (SELECT home_id FROM turn WHERE home_id <> id)
     FOR NO KEY UPDATE SKIP LOCKED
), hidden AS MATERIALIZED (
  -- The next lane by turn, if another worker has it locked and the unlocked lanes are ahead of it: reserve its share.
  SELECT next.weight
    FROM (
      SELECT id, weight, vtime FROM lane
       WHERE pool = $5 AND active AND NOT full_up AND ($6::uuid[] IS NULL OR home_id = ANY($6))
         AND (home_id = id OR NOT (SELECT full_up FROM lane AS home WHERE home.id = lane.home_id))
       ORDER BY vtime LIMIT 1
    ) AS next, (SELECT sum(weight) AS weight, min(vtime) AS vtime FROM turn) AS free
   WHERE next.id NOT IN (SELECT id FROM turn) AND free.vtime > next.vtime + $3 / (free.weight + next.weight)
), pull AS (
  -- By weight. A lane that got ahead because others were locked when it was served gets little until they are level,
  -- but not nothing: the lane behind may have a cap and never catch up.
  SELECT id, home_id, room, vtime, max_writes_per_run, policy_version,
         weight * CASE WHEN vtime > min(vtime) OVER () + $3 / sum(weight) OVER () THEN 0.1 ELSE 1 END AS pull,
         coalesce((SELECT weight FROM hidden), 0) AS hidden
    FROM turn
), whole AS (
  SELECT id, home_id, room, vtime, max_writes_per_run, policy_version,
         floor($3 * pull / (sum(pull) OVER () + hidden))::int AS runs,
         ceil($3 * hidden / (sum(pull) OVER () + hidden))::int AS hidden
    FROM pull
), rounded AS (
  -- The remainder of rounding down goes to the lanes next in turn, so that small batches add up to the weights too.
  SELECT id, home_id, room, max_writes_per_run, policy_version,
         runs + (row_number() OVER (ORDER BY vtime) <= $3 - hidden - sum(runs) OVER ())::int AS runs
    FROM whole
), shared AS (
  SELECT id, least(room, runs) AS share, max_writes_per_run, policy_version FROM rounded
   WHERE runs > 0 AND NOT EXISTS (SELECT FROM turn WHERE home_id <> id)
  UNION ALL
  -- Lanes of one tenant share its cap: each lane gets only what the lanes before it leave.
  SELECT rounded.id,
         least(rounded.room, runs, coalesce(home.room, CASE WHEN rounded.id = home_id THEN rounded.room ELSE 0 END)
               - coalesce(sum(runs) OVER (PARTITION BY home_id ORDER BY rounded.id
                                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)),
         CASE WHEN rounded.id = home_id THEN rounded.max_writes_per_run ELSE home.max_writes_per_run END,
         CASE WHEN rounded.id = home_id THEN rounded.policy_version ELSE home.policy_version END
    FROM rounded LEFT JOIN home ON home.id = home_id
   WHERE runs > 0 AND EXISTS (SELECT FROM turn WHERE home_id <> id)
), share AS (
  SELECT id, share, max_writes_per_run, policy_version FROM shared WHERE share > 0
), picked AS MATERIALIZED (
  SELECT top.lane_id, top.tenant_id, top.run_id, top.fresh, top.lost
    FROM share
   CROSS JOIN LATERAL (
     SELECT lane_id, tenant_id, run_id, fresh, lost FROM ready
      WHERE ready.lane_id = share.id
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
     -- Stated twice, because with the join alone the planner may scan all runs. Not IS NULL, which makes it scan all
     -- open runs. Not `=`, of which it expects almost no rows: it would compare each run with each picked run.
     AND run.id = ANY(ARRAY(SELECT run_id FROM picked))
     AND coalesce(run.completed_at, 'infinity') >= 'infinity'
  RETURNING run.id, run.tenant_id, run.workflow, run.workflow_version, run.status, run.input, run.trigger, run.seq,
            run.lease_token, run.inbox, run.created_at, run.deadline_at, run.requested_by, run.requester, run.workspace_id,
            run.started_at, run.parent_run_id, run.session_id, run.session_run, run.auto_approve, run.side_id, run.job_id,
            run.root_id, run.cost_usd, picked.lane_id, picked.fresh, picked.lost
), journaled AS (
  INSERT INTO entry (run_id, seq, tenant_id, at, type, from_state, event, to_state, token, actor)
  SELECT id, seq, tenant_id, coalesce($1, now()), 'run_transition', 'pending', 'start', 'running', lease_token, $4
    FROM leased WHERE fresh
), charged AS (
  UPDATE lane SET in_flight = in_flight + got.runs, vtime = vtime + got.turns / weight
    FROM (
      SELECT id, count(*)::int AS runs, sum(turn) AS turns
        FROM (SELECT lane_id AS id, 1 AS turn FROM leased
              UNION ALL
              SELECT tenant_id, 0 FROM leased WHERE tenant_id <> lane_id) AS counted
       GROUP BY id
    ) AS got
   WHERE lane.id = got.id
)
SELECT leased.*, share.id AS lane, share.share, share.max_writes_per_run, share.policy_version,
       coalesce($1, now()) AS now, false AS seated
  FROM share LEFT JOIN leased ON leased.lane_id = share.id;

-- name: rest_lanes
-- In the order in which every statement locks several lanes.
SELECT id, rest_lane(id)
  FROM (SELECT id FROM lane WHERE id = ANY($1::uuid[]) ORDER BY side_id NULLS FIRST, id) AS lanes;

-- name: work_is_waiting
SELECT EXISTS (SELECT FROM lane WHERE pool = 'default' AND active AND NOT full_up);

-- name: work_is_waiting_in
-- For a worker that serves these pools and tenants. A side lane has room only if its tenant has.
SELECT EXISTS (
  SELECT FROM lane
   WHERE pool = ANY($1::text[]) AND active AND NOT full_up AND ($2::uuid[] IS NULL OR home_id = ANY($2))
     AND (home_id = id OR EXISTS (SELECT FROM lane AS home WHERE home.id = lane.home_id AND NOT home.full_up))
);

-- name: leases_of
-- The runs that this worker holds according to the database, for use after the answer to a claim was lost. Returns no
-- row once the worker was declared lost, even before its runs are reclaimed: it may not write, so it may not run them.
SELECT run.id, run.tenant_id, workflow, workflow_version, status, input, trigger, seq, lease_token, inbox, created_at,
       deadline_at, requested_by, requester, workspace_id, started_at, parent_run_id, session_id, session_run,
       auto_approve, run.side_id, job_id, root_id, cost_usd, false AS fresh, false AS lost, false AS seated,
       coalesce(run.side_id, run.tenant_id) AS lane, 0 AS share, lane.max_writes_per_run, lane.policy_version, coalesce($1, now()) AS now
  FROM run JOIN lane ON lane.id = run.tenant_id
 WHERE lease_worker = $2 AND EXISTS (SELECT FROM worker WHERE worker.id = $2 AND stopped_at IS NULL);

-- name: hand_back
-- Requeues a run that its holder cannot continue, with the commands in its inbox, behind all other ready runs.
WITH mine AS MATERIALIZED (
  SELECT id, tenant_id, side_id FROM run WHERE id = $2 AND lease_worker = $1 AND lease_token = $3
), lanes AS MATERIALIZED (
  SELECT id, pg_advisory_xact_lock_shared(hashtextextended(home_id::text, 42)) FROM lane
   WHERE id = ANY(ARRAY(SELECT tenant_id FROM mine UNION SELECT side_id FROM mine))
   ORDER BY side_id NULLS FIRST, id
     FOR NO KEY UPDATE
), freed AS (
  UPDATE run SET lease_worker = NULL
    FROM mine
   WHERE (SELECT count(*) FROM lanes) > 0 AND run.id = mine.id AND run.lease_worker = $1 AND run.lease_token = $3
  RETURNING run.id, run.tenant_id, run.side_id, CASE WHEN run.capped THEN run.workflow END AS capped
), queued AS (
  INSERT INTO ready (tenant_id, run_id, side_id, turn, fresh, lost, workflow)
  SELECT tenant_id, id, side_id, nextval('ready_turn'), false, false, capped FROM freed
), returned AS (
  UPDATE lane
     SET in_flight = in_flight - 1, active = true,
         vtime = CASE WHEN active THEN vtime ELSE coalesce(turn_in(pool), vtime) END
    FROM freed WHERE lane.id IN (freed.tenant_id, freed.side_id)
)
SELECT id, pg_notify('interlock_ready', '')::text FROM freed;

-- name: claims_in_vain
-- How often a run was claimed since the last write under a lease.
SELECT $2::bigint - coalesce(max(token), 0) FROM entry WHERE run_id = $1;

-- name: add_label_lane
-- A tenant's lane for a label that its steps require; the lane's id is derived from the two.
INSERT INTO lane (side_id, side_of, pool, weight)
SELECT $1, tenant_id, $3, weight FROM lane WHERE tenant_id = $2
ON CONFLICT DO NOTHING;
