-- What only the console asks: who is signed in, and lists that stay quick however many runs there are.

-- name: begin_signin
-- Whoever signs in takes the sign-ins that ran out with them.
WITH over AS (
  DELETE FROM signin WHERE expires_at <= coalesce($1, now())
)
INSERT INTO signin (digest, key_id, created_at, expires_at)
VALUES ($2, $3, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $4));

-- name: signed_in
SELECT api_key.*, tenant.name AS tenant
  FROM signin
  JOIN api_key ON api_key.id = signin.key_id
  JOIN tenant ON tenant.id = api_key.tenant_id
 WHERE signin.digest = $2 AND signin.expires_at > coalesce($1, now()) AND api_key.revoked_at IS NULL;

-- name: end_signin
DELETE FROM signin WHERE digest = $1;

-- name: count_requested
-- Up to a hundred: a badge says no more than 99+.
SELECT count(*) FROM (
  SELECT FROM approval
   WHERE tenant_id = $1 AND status = 'requested'
     AND ($2::text IS NULL OR EXISTS (SELECT FROM run WHERE run.id = approval.run_id AND run.workspace_id = $2))
   LIMIT 100
) AS open;

-- name: inbox
-- What is open and closest to its end, first; then what was decided last.
SELECT approval.*, run.workflow, run.workspace_id, coalesce($1, now()) AS now
  FROM approval JOIN run ON run.id = approval.run_id
 WHERE approval.tenant_id = $2 AND approval.status = 'requested'
   AND ($3::text IS NULL OR run.workspace_id = $3)
 ORDER BY approval.expires_at, approval.id DESC
 LIMIT $4;

-- name: decided_lately
SELECT approval.*, run.workflow, run.workspace_id, coalesce($1, now()) AS now
  FROM unnest(ARRAY['approved', 'rejected', 'expired', 'canceled']) AS ended (status)
 CROSS JOIN LATERAL (
   SELECT * FROM approval WHERE tenant_id = $2 AND approval.status = ended.status ORDER BY id DESC LIMIT $4
 ) AS approval
  JOIN run ON run.id = approval.run_id
 WHERE $3::text IS NULL OR run.workspace_id = $3
 ORDER BY approval.resolved_at DESC
 LIMIT $4;

-- name: pulse_of_inbox
SELECT md5(string_agg(concat_ws(' ', id, digest, escalated_at, votes), ',' ORDER BY id)) FROM (
  SELECT id, digest, escalated_at,
         (SELECT count(*) FROM vote WHERE vote.approval_id = approval.id) AS votes
    FROM approval WHERE tenant_id = $1 AND status = 'requested'
   ORDER BY id DESC LIMIT 200
) AS open;

-- name: pulse_of_runs
SELECT md5(concat_ws(' ', (SELECT max(id::text) FROM (SELECT id FROM run WHERE tenant_id = $1 ORDER BY id DESC LIMIT 1) AS last),
                     (SELECT string_agg(counted.status || counted.runs, ' ')
                        FROM (SELECT status, (SELECT count(*) FROM (
                                SELECT FROM run WHERE run.tenant_id = $1 AND run.status = states.status LIMIT 1000
                              ) AS few) AS runs FROM unnest($2::text[]) AS states (status)) AS counted)));

-- name: count_runs_by_state
-- Up to a thousand of each: beyond that people want to know that there are many.
SELECT states.status, (
         SELECT count(*) FROM (
           SELECT FROM run
            WHERE run.tenant_id = $1 AND run.status = states.status AND ($3::text IS NULL OR workspace_id = $3)
            LIMIT 1000
         ) AS few
       ) AS runs
  FROM unnest($2::text[]) AS states (status);

-- name: pulse_of_run
-- The row of a run stands still while its worker appends; the journal does not.
SELECT (SELECT seq FROM entry WHERE entry.run_id = run.id ORDER BY seq DESC LIMIT 1) AS seq, (SELECT count(*) FROM vote JOIN approval ON approval.id = vote.approval_id
              WHERE approval.run_id = run.id) AS asked
  FROM run WHERE id = $1;

-- name: find_runs
-- Newest first, among at most $12 that the index gives.
SELECT id, workflow, workflow_version, status, reason, created_at, started_at, completed_at, duration_ms, cost_usd,
       requested_by, trigger ->> 'source' AS source, trigger ->> 'ref' AS ref, session_id, job_id, parent_run_id
  FROM (
    SELECT * FROM run
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
-- The last of those $8 that were looked at for a page that is not full, if there are so many: the next page begins there.
SELECT id FROM run
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
-- For this transaction: what is looked for decides which index is the right one.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true);

-- name: workflow_names
SELECT DISTINCT name FROM workflow WHERE tenant_id = $1 ORDER BY name LIMIT 500;

-- name: children_to_show
SELECT id, workflow, status, created_at, duration_ms FROM run
 WHERE parent_run_id = $2 AND tenant_id = $1 ORDER BY id LIMIT 100;

-- name: policy_texts
SELECT digest, text FROM policy WHERE tenant_id = $1 AND digest = ANY($2::text[]);

-- name: asked_in_runs
SELECT approval.*, run.workflow, run.workspace_id
  FROM approval JOIN run ON run.id = approval.run_id
 WHERE approval.tenant_id = $1 AND approval.run_id = ANY($2::uuid[]) ORDER BY approval.id;

-- name: pulse_of_sessions
SELECT md5(string_agg(concat_ws(' ', id, messages, runs, (
         SELECT status FROM run WHERE run.session_id = session.id AND run.completed_at IS NULL)), ',')) FROM (
  SELECT id, messages, runs FROM session WHERE tenant_id = $1 ORDER BY id DESC LIMIT 50
) AS session;

-- name: pulse_of_session
SELECT messages, runs, active.id AS run_id, active.status,
       (SELECT seq FROM entry WHERE entry.run_id = active.id ORDER BY seq DESC LIMIT 1) AS seq,
       (SELECT count(*) FROM vote JOIN approval ON approval.id = vote.approval_id
         WHERE approval.run_id = active.id) AS votes
  FROM session LEFT JOIN run AS active ON active.session_id = session.id AND active.completed_at IS NULL
 WHERE session.id = $1;

-- name: held_by
SELECT id, workflow, status, created_at FROM run
 WHERE lease_worker = $1 AND tenant_id = $2 AND ($3::text IS NULL OR workspace_id = $3) ORDER BY id LIMIT 100;

-- name: pulse_of_workers
SELECT md5(string_agg(concat_ws(' ', id, status, job_id, (SELECT count(*) FROM run WHERE lease_worker = worker.id)), ',')) FROM (
  SELECT id, status, job_id FROM worker
   WHERE stopped_at IS NULL OR stopped_at > now() - interval '1 hour' ORDER BY id DESC LIMIT 500
) AS worker;

-- name: pulse_of_jobs
SELECT md5(string_agg(concat_ws(' ', id, status, (SELECT max(seq) FROM history WHERE subject_id = job.id)), ',')) FROM (
  SELECT id, status FROM job WHERE tenant_id = $1 ORDER BY id DESC LIMIT 100
) AS job;
