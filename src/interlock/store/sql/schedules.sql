-- Schedules: runs at fixed times. Any number of processes may look for due schedules; a slot's idempotency key makes it
-- fire once, and the row lock keeps the other processes from useless attempts.

-- name: time_is
SELECT interlock.now();

-- name: add_schedule
INSERT INTO interlock.schedule (tenant_id, name, key_id, workspace_id, cron, timezone, workflow, input, missed, next_at,
                      created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9, $10, interlock.now())
ON CONFLICT (tenant_id, name) DO NOTHING
RETURNING *;

-- name: schedule_named
SELECT schedule.*, api_key.name AS key_name, interlock.now() AS now
  FROM interlock.schedule JOIN interlock.api_key ON api_key.id = key_id
 WHERE schedule.tenant_id = $1 AND schedule.name = $2 AND ($3::text IS NULL OR schedule.workspace_id = $3);

-- name: list_schedules
SELECT schedule.*, api_key.name AS key_name FROM interlock.schedule JOIN interlock.api_key ON api_key.id = key_id
 WHERE schedule.tenant_id = $1 AND ($2::text IS NULL OR schedule.name > $2)
   AND ($4::text IS NULL OR schedule.workspace_id = $4)
 ORDER BY schedule.name LIMIT $3;

-- name: pause_schedule
-- Pausing a paused schedule changes nothing. With $4, only if that is still its next slot: the process that gives up on
-- a schedule may not know that a user has just fixed it.
UPDATE interlock.schedule
   SET next_at = NULL, paused_at = coalesce(paused_at, interlock.now()),
       paused_why = CASE WHEN paused_at IS NULL THEN $3 ELSE paused_why END
 WHERE tenant_id = $1 AND name = $2 AND ($4::timestamptz IS NULL OR next_at = $4);

-- name: resume_schedule
-- Slots that came due during the pause do not count as missed. If its key was revoked, the schedule gets the caller's.
UPDATE interlock.schedule
   SET next_at = $3, paused_at = NULL, paused_why = NULL,
       key_id = CASE WHEN api_key.revoked_at IS NULL THEN key_id ELSE $4 END
  FROM interlock.api_key
 WHERE api_key.id = schedule.key_id
   AND schedule.tenant_id = $1 AND schedule.name = $2 AND paused_at IS NOT NULL;

-- name: delete_schedule
DELETE FROM interlock.schedule WHERE tenant_id = $1 AND name = $2;

-- name: due_schedules
-- With the key that each acts with, revoked or not. The key may be for the whole tenant: `place` is the runs'
-- workspace.
SELECT schedule.name AS schedule, schedule.workspace_id AS place, cron, timezone, workflow, schedule.input, missed, next_at, interlock.now() AS now,
       api_key.*, tenant.name AS tenant
  FROM interlock.schedule
  JOIN interlock.api_key ON api_key.id = schedule.key_id
  JOIN interlock.tenant ON tenant.id = schedule.tenant_id
 WHERE next_at <= interlock.now()
 ORDER BY next_at
 LIMIT $1;

-- name: lock_due_schedule
-- Returns no row if another process holds the schedule or has advanced it already.
SELECT name FROM interlock.schedule WHERE tenant_id = $1 AND name = $2 AND next_at = $3 FOR NO KEY UPDATE SKIP LOCKED;

-- name: advance_schedule
UPDATE interlock.schedule SET next_at = $3, last_slot = coalesce($4, last_slot), last_run_id = coalesce($5, last_run_id)
 WHERE tenant_id = $1 AND name = $2;
