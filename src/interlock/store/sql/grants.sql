-- Grants: standing approvals.

-- name: give_grant
INSERT INTO standing_grant (id, tenant_id, tool, arguments, tier, reason, created_by, created_at, expires_at,
                            workspace_id)
VALUES ($2, $3, $4, $5::text::jsonb, $6, $7, $8, coalesce($1, now()), coalesce($1, now()) + make_interval(secs => $9),
        $10)
ON CONFLICT (id) DO UPDATE SET id = excluded.id
RETURNING *;

-- name: revoke_grant
UPDATE standing_grant SET revoked_at = coalesce(revoked_at, $1, now()), revoked_by = coalesce(revoked_by, $4)
 WHERE tenant_id = $2 AND id = $3 AND ($5::text IS NULL OR workspace_id = $5)
RETURNING *;

-- name: list_grants
SELECT * FROM standing_grant
 WHERE tenant_id = $2 AND ($3 OR (revoked_at IS NULL AND expires_at > coalesce($1, now()) AND key_holds(created_by)))
   AND ($5::text IS NULL OR workspace_id = $5)
 ORDER BY id DESC LIMIT $4;

-- name: key_holds
SELECT key_holds($1);

-- name: use_grant
-- A grant fixes some arguments; all others are free. A grant for tier med covers low, not the reverse.
UPDATE standing_grant SET uses = uses + 1
 WHERE id = (
   SELECT id FROM standing_grant
    WHERE tenant_id = $2 AND tool = $3 AND expires_at > coalesce($1, now()) AND revoked_at IS NULL
      -- Not @>, because a list of two recipients contains the granted list of one.
      AND NOT EXISTS (SELECT FROM jsonb_each(arguments) AS meant WHERE meant.value IS DISTINCT FROM $4::text::jsonb -> meant.key)
      AND (tier = 'med' OR $5 = 'low')
      AND (workspace_id IS NULL OR workspace_id = $9)
      AND created_by <> ALL(ARRAY(SELECT unnest(askers_of($6)))) AND key_holds(created_by)
      AND (cardinality($7::text[]) = 0
           OR EXISTS (SELECT FROM api_key WHERE api_key.id = key_of(created_by) AND api_key.groups && $7))
      AND (reason IS NOT NULL OR NOT $8::boolean)
    ORDER BY expires_at DESC LIMIT 1
 )
RETURNING id, created_by;
