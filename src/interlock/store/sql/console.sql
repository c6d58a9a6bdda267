-- Queries for the console only: console sessions, and lists that stay fast however many runs there are.

-- name: begin_signin
-- Also deletes expired console sessions, and the oldest ones of a key that already has $4 of them.
WITH over AS (
  DELETE FROM interlock.console_session WHERE expires_at <= interlock.now()
), too_many AS (
  DELETE FROM interlock.console_session WHERE digest IN (SELECT digest FROM interlock.console_session WHERE key_id = $2 ORDER BY created_at DESC OFFSET $4 - 1)
)
INSERT INTO interlock.console_session (digest, key_id, created_at, expires_at)
VALUES ($1, $2, interlock.now(), interlock.now() + make_interval(secs => $3));

-- name: signed_in
SELECT api_key.*, tenant.name AS tenant
  FROM interlock.console_session
  JOIN interlock.api_key ON api_key.id = console_session.key_id
  JOIN interlock.tenant ON tenant.id = api_key.tenant_id
 WHERE console_session.digest = $1 AND console_session.expires_at > interlock.now() AND api_key.revoked_at IS NULL;

-- name: end_signin
DELETE FROM interlock.console_session WHERE digest = $1
RETURNING pg_notify('interlock.keys', '')::text AS announced;

-- name: open_questions
-- Like `inbox`, but only the columns that determine the allowed approvers: every page counts these rows for its badge.
SELECT id, digest, status, kind, tier, two_person, session_id, requested_by, asked_by, edited_by, approvers, escalate_to,
       escalated_at, reason_required, expires_at
  FROM interlock.approval
 WHERE tenant_id = $1 AND status = 'requested'
   AND ($2::text IS NULL OR EXISTS (SELECT FROM interlock.run WHERE run.id = approval.run_id AND run.workspace_id = $2))
   AND ($4::timestamptz IS NULL OR expires_at > $4 OR (expires_at = $4 AND id < $5::uuid))
 ORDER BY expires_at, id DESC
 LIMIT $3;

-- name: count_open
SELECT count(*) FROM interlock.approval
 WHERE tenant_id = $1 AND status = 'requested'
   AND ($2::text IS NULL OR EXISTS (SELECT FROM interlock.run WHERE run.id = approval.run_id AND run.workspace_id = $2));

-- name: inbox
-- Open approvals, the next to expire first; continues after the last one seen.
SELECT approval.*, run.workflow, run.workspace_id, interlock.now() AS now
  FROM interlock.approval JOIN interlock.run ON run.id = approval.run_id
 WHERE approval.tenant_id = $1 AND approval.status = 'requested'
   AND ($2::text IS NULL OR run.workspace_id = $2)
   AND ($4::timestamptz IS NULL OR approval.expires_at > $4 OR (approval.expires_at = $4 AND approval.id < $5::uuid))
 ORDER BY approval.expires_at, approval.id DESC
 LIMIT $3;

-- name: approvals_by_id
SELECT approval.*, run.workflow, run.workspace_id, interlock.now() AS now
  FROM interlock.approval JOIN interlock.run ON run.id = approval.run_id
 WHERE approval.tenant_id = $1 AND ($2::text IS NULL OR run.workspace_id = $2) AND approval.id = ANY($3::uuid[]);

-- name: decided_lately
-- The most recent approvals of each final state ($4), so that an index serves each state.
SELECT approval.*, run.workflow, run.workspace_id, interlock.now() AS now
  FROM unnest($4::text[]) AS ended (status)
 CROSS JOIN LATERAL (
   SELECT * FROM interlock.approval WHERE tenant_id = $1 AND approval.status = ended.status ORDER BY id DESC LIMIT $3
 ) AS approval
  JOIN interlock.run ON run.id = approval.run_id
 WHERE $2::text IS NULL OR run.workspace_id = $2
 ORDER BY approval.resolved_at DESC
 LIMIT $3;

-- A pulse is a cheap digest of what a page shows. The console redraws the page when the pulse changes.

-- name: pulse_of_inbox
SELECT md5(string_agg(concat_ws(' ', id, digest, escalated_at, votes), ',' ORDER BY id)) FROM (
  SELECT id, digest, escalated_at,
         (SELECT count(*) FROM interlock.vote WHERE vote.approval_id = approval.id AND interlock.key_holds(voter)) AS votes
    FROM interlock.approval
   WHERE tenant_id = $1 AND status = 'requested'
     AND ($2::text IS NULL OR EXISTS (SELECT FROM interlock.run WHERE run.id = approval.run_id AND run.workspace_id = $2))
   ORDER BY id DESC LIMIT 200
) AS open;

-- name: pulse_of_runs
WITH newest AS (
  SELECT id FROM (SELECT id, workspace_id FROM interlock.run WHERE tenant_id = $1 ORDER BY id DESC LIMIT 1000) AS looked_at
   WHERE $3::text IS NULL OR workspace_id = $3
   ORDER BY id DESC LIMIT 1
), counted AS (
  SELECT states.status, (
           SELECT count(*) FROM (
             SELECT workspace_id FROM interlock.run WHERE run.tenant_id = $1 AND run.status = states.status
              ORDER BY id DESC LIMIT 1000
           ) AS few
            WHERE $3::text IS NULL OR workspace_id = $3
         ) AS runs
    FROM unnest($2::text[]) AS states (status)
)
SELECT md5(concat_ws(' ', (SELECT id FROM newest), (SELECT string_agg(status || runs, ' ') FROM counted)));

-- name: count_runs_by_state
-- Counts up to a thousand for each state: beyond that, "many" is enough.
SELECT states.status, (
         SELECT count(*) FROM (
           SELECT FROM interlock.run
            WHERE run.tenant_id = $1 AND run.status = states.status AND ($3::text IS NULL OR workspace_id = $3)
            LIMIT 1000
         ) AS few
       ) AS runs
  FROM unnest($2::text[]) AS states (status);

-- name: pulse_of_run
-- The row of a run does not change while its worker appends; the journal does.
SELECT (SELECT seq FROM interlock.journal_entry WHERE journal_entry.run_id = run.id ORDER BY seq DESC LIMIT 1) AS seq,
       (SELECT count(*) FROM interlock.vote JOIN interlock.approval ON approval.id = vote.approval_id WHERE approval.run_id = run.id) AS asked
  FROM interlock.run WHERE id = $1;

-- name: find_runs
-- Newest first, among at most $12 rows that the index returns.
SELECT id, workflow, workflow_version, status, reason, created_at, started_at, completed_at, duration_ms, cost_usd,
       requested_by, trigger ->> 'source' AS source, trigger ->> 'ref' AS ref, session_id, job_id, parent_run_id
  FROM (
    SELECT * FROM interlock.run
     WHERE tenant_id = $1
       AND ($3::uuid IS NULL OR id < $3)
       AND ($4::uuid IS NULL OR id >= $4)
       AND ($5::text IS NULL OR status = $5)
       AND ($6::text IS NULL OR workflow = $6)
       AND ($8::uuid IS NULL OR session_id = $8)
       AND ($9::uuid IS NULL OR job_id = $9)
     ORDER BY id DESC
     LIMIT $12
  ) AS looked_at
 WHERE ($2::text IS NULL OR workspace_id = $2)
   AND ($7::text IS NULL OR trigger ->> 'source' = $7)
   AND ($10::text IS NULL OR id::text ILIKE $10 OR workflow ILIKE $10 OR requested_by ILIKE $10
        OR trigger ->> 'ref' ILIKE $10 OR reason ILIKE $10 OR input::text ILIKE $10 OR error::text ILIKE $10)
 ORDER BY id DESC
 LIMIT $11;

-- name: last_looked_at
-- The last of the $8 rows examined for a page that is not full, if there were that many: the next page starts there.
SELECT id FROM interlock.run
 WHERE tenant_id = $1
   AND ($2::uuid IS NULL OR id < $2)
   AND ($3::uuid IS NULL OR id >= $3)
   AND ($4::text IS NULL OR status = $4)
   AND ($5::text IS NULL OR workflow = $5)
   AND ($6::uuid IS NULL OR session_id = $6)
   AND ($7::uuid IS NULL OR job_id = $7)
 ORDER BY id DESC
OFFSET $8 - 1 LIMIT 1;

-- name: plan_afresh
-- For this transaction only: the filters decide which index is the right one.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true);

-- name: workflow_names
SELECT DISTINCT name FROM interlock.workflow WHERE tenant_id = $1 ORDER BY name LIMIT 500;

-- name: children_to_show
SELECT id, workflow, status, created_at, duration_ms FROM interlock.run
 WHERE parent_run_id = $2 AND tenant_id = $1 ORDER BY id LIMIT 100;

-- name: retries_of
SELECT id, status FROM interlock.run WHERE resumed_from = $2 AND tenant_id = $1 ORDER BY id DESC LIMIT 10;

-- name: policy_texts
SELECT digest, text FROM interlock.policy WHERE tenant_id = $1 AND digest = ANY($2::text[]);

-- name: asked_in_runs
SELECT approval.*, run.workflow, run.workspace_id
  FROM interlock.approval JOIN interlock.run ON run.id = approval.run_id
 WHERE approval.tenant_id = $1 AND approval.run_id = ANY($2::uuid[]) ORDER BY approval.id;

-- name: pulse_of_sessions
SELECT md5(string_agg(concat_ws(' ', id, messages, runs, (
         SELECT status FROM interlock.run WHERE run.session_id = session.id AND run.completed_at IS NULL)), ',')) FROM (
  SELECT id, messages, runs FROM interlock.session
   WHERE tenant_id = $1 AND ($2::text IS NULL OR workspace_id = $2) ORDER BY id DESC LIMIT 50
) AS session;

-- name: pulse_of_session
SELECT messages, runs, active.id AS run_id, active.status,
       (SELECT seq FROM interlock.journal_entry WHERE journal_entry.run_id = active.id ORDER BY seq DESC LIMIT 1) AS seq,
       (SELECT count(*) FROM interlock.vote JOIN interlock.approval ON approval.id = vote.approval_id
         WHERE approval.run_id = active.id) AS votes
  FROM interlock.session LEFT JOIN interlock.run AS active ON active.session_id = session.id AND active.completed_at IS NULL
 WHERE session.id = $1;

-- name: held_by
SELECT id, workflow, status, created_at FROM interlock.run
 WHERE lease_worker = $1 AND tenant_id = $2 AND ($3::text IS NULL OR workspace_id = $3) ORDER BY id LIMIT 100;

-- name: pulse_of_workers
-- A tenant ($1) sees changes of its own runs, not those of other tenants. NULL: sees everything.
SELECT md5(string_agg(concat_ws(' ', id, status, (SELECT job.id FROM interlock.job WHERE job.id = job_id AND ($1::uuid IS NULL OR job.tenant_id = $1)), (
         SELECT count(*) FROM interlock.run
          WHERE lease_worker = worker.id AND ($1::uuid IS NULL OR tenant_id = $1) AND ($2::text IS NULL OR workspace_id = $2)
       )), ',')) FROM (
  SELECT id, status, job_id FROM interlock.worker
   WHERE stopped_at IS NULL OR stopped_at > interlock.now() - interval '1 hour' ORDER BY id DESC LIMIT 500
) AS worker;

-- name: pulse_of_jobs
SELECT md5(string_agg(concat_ws(' ', id, status, (SELECT max(seq) FROM interlock.resource_event WHERE subject_id = job.id)), ',')) FROM (
  SELECT id, status FROM interlock.job WHERE tenant_id = $1 AND ($2::text IS NULL OR workspace_id = $2) ORDER BY id DESC LIMIT 100
) AS job;

-- ---------------------------------------------------------------- workflows, policies, schedules

-- name: workflows_to_show
-- The newest version of each workflow, the room under its cap, and its last run. For a key of one workspace, only the
-- last few runs of a workflow are examined: other workspaces may have a million.
SELECT newest.*, cap.max_concurrency,
       CASE WHEN cap.max_concurrency IS NOT NULL THEN (
         SELECT count(*) FROM interlock.run
          WHERE has_concurrency_limit AND lease_worker IS NOT NULL AND tenant_id = $1 AND workflow = newest.name
       ) END AS in_flight,
       last.id AS last_run_id, last.status AS last_status, last.created_at AS last_at
  FROM (
    SELECT DISTINCT ON (name) name, version, created_at, created_by, source ->> 'description' AS description,
           source ->> 'flow' AS flow
      FROM interlock.workflow
     WHERE tenant_id = $1 AND ($2::text IS NULL OR name > $2)
     ORDER BY name, version DESC
     LIMIT $3
  ) AS newest
  LEFT JOIN interlock.workflow_cap AS cap ON cap.tenant_id = $1 AND cap.workflow = newest.name
  LEFT JOIN LATERAL (
    SELECT id, status, created_at
      FROM (
        SELECT id, status, created_at, workspace_id FROM interlock.run
         WHERE tenant_id = $1 AND workflow = newest.name ORDER BY id DESC LIMIT 100
      ) AS few
     WHERE $4::text IS NULL OR workspace_id = $4
     ORDER BY id DESC LIMIT 1
  ) AS last ON true
 ORDER BY newest.name;

-- name: pulse_of_schedules
SELECT md5(string_agg(concat_ws(' ', name, next_at, paused_at, last_run_id, workspace_id), ',' ORDER BY name))
  FROM interlock.schedule WHERE tenant_id = $1 AND ($2::text IS NULL OR workspace_id = $2);

-- ---------------------------------------------------------------- the chain

-- name: newest_sealed
-- From the end of the chain. An entry that left the journal has only its position and its link.
SELECT sealed.position, encode(sealed.link, 'hex') AS link, sealed.run_id, sealed.seq, e.*
  FROM (
    SELECT * FROM interlock.audit_link WHERE tenant_id = $1 AND ($2::bigint IS NULL OR position < $2) ORDER BY position DESC LIMIT $3
  ) AS sealed
  LEFT JOIN LATERAL (
    SELECT at, type, step, to_state, attempt, actor FROM interlock.journal_entry
     WHERE journal_entry.run_id = sealed.run_id AND journal_entry.seq = sealed.seq LIMIT 1
  ) AS e ON true
 ORDER BY sealed.position DESC;

-- name: newest_sealed_of_run
SELECT sealed.position, encode(sealed.link, 'hex') AS link, sealed.run_id, sealed.seq, e.*
  FROM (
    SELECT * FROM interlock.audit_link
     WHERE run_id = $4 AND tenant_id = $1 AND ($2::bigint IS NULL OR position < $2) ORDER BY seq DESC LIMIT $3
  ) AS sealed
  LEFT JOIN LATERAL (
    SELECT at, type, step, to_state, attempt, actor FROM interlock.journal_entry
     WHERE journal_entry.run_id = sealed.run_id AND journal_entry.seq = sealed.seq LIMIT 1
  ) AS e ON true
 ORDER BY sealed.position DESC;

-- name: pulse_of_audit
SELECT max(number) FROM interlock.checkpoint WHERE tenant_id = $1;

-- ---------------------------------------------------------------- charts

-- name: count_ended
-- In the sealer's transaction: each run's end is sealed once, so it is counted once. The bucket is the next power of
-- two in milliseconds.
INSERT INTO interlock.run_stats_minute (tenant_id, minute, workspace, status, bucket, runs)
SELECT tenant_id, date_trunc('minute', completed_at), coalesce(workspace_id, ''), status,
       CASE WHEN duration_ms > 1 THEN least(ceil(log(2, duration_ms)), 40) ELSE 0 END::int, count(*)
  FROM interlock.run WHERE id = ANY($1::uuid[]) AND completed_at IS NOT NULL
 GROUP BY 1, 2, 3, 4, 5
    ON CONFLICT (tenant_id, minute, workspace, status, bucket) DO UPDATE SET runs = run_stats_minute.runs + excluded.runs;

-- name: forget_ended
-- No chart goes further back.
DELETE FROM interlock.run_stats_minute WHERE minute < interlock.now() - interval '2 days';

-- name: ended_since
SELECT minute, status, bucket, sum(runs)::bigint AS runs FROM interlock.run_stats_minute
 WHERE tenant_id = $1 AND minute >= $2 AND ($3::text IS NULL OR workspace = $3)
 GROUP BY minute, status, bucket;

-- name: pulse_of_usage
SELECT concat_ws(' ', queue.in_flight, start_rate.used, start_rate.minute, date_trunc('minute', interlock.now()),
                 (SELECT sum(runs) FROM interlock.run_stats_minute
                   WHERE run_stats_minute.tenant_id = $1 AND run_stats_minute.minute >= interlock.now() - interval '1 hour'))
  FROM interlock.queue JOIN interlock.start_rate ON start_rate.tenant_id = queue.id WHERE queue.id = $1;
