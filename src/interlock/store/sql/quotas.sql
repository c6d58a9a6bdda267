-- Quotas: whether a tenant already has as many rows of a kind as it may. Counting ends there.

-- name: keeps_so_many_events
SELECT EXISTS (SELECT FROM interlock.external_event WHERE tenant_id = $1 AND consumed_at IS NULL OFFSET $2::int - 1);

-- name: has_so_many_schedules
SELECT EXISTS (SELECT FROM interlock.schedule WHERE tenant_id = $1 OFFSET $2::int - 1);

-- name: has_so_many_made_plans
SELECT EXISTS (SELECT FROM interlock.workflow WHERE tenant_id = $1 AND starts_with(name, $2) OFFSET $3::int - 1);
