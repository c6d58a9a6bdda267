-- Grants: standing approvals.

-- name: give_grant
INSERT INTO interlock.standing_grant (id, tenant_id, tool, arguments, tier, reason, created_by, created_at, expires_at,
                            workspace_id)
VALUES ($1, $2, $3, $4::text::jsonb, $5, $6, $7, interlock.now(), interlock.now() + make_interval(secs => $8),
        $9)
ON CONFLICT (id) DO UPDATE SET id = excluded.id
RETURNING *;

-- name: revoke_grant
UPDATE interlock.standing_grant SET revoked_at = coalesce(revoked_at, interlock.now()), revoked_by = coalesce(revoked_by, $3)
 WHERE tenant_id = $1 AND id = $2 AND ($4::text IS NULL OR workspace_id = $4)
RETURNING *;

-- name: list_grants
SELECT * FROM interlock.standing_grant
 WHERE tenant_id = $1 AND ($2 OR (revoked_at IS NULL AND expires_at > interlock.now() AND interlock.key_holds(created_by)))
   AND ($4::text IS NULL OR workspace_id = $4)
 ORDER BY id DESC LIMIT $3;

-- name: key_holds
SELECT interlock.key_holds($1);

-- name: use_grant
-- A grant fixes some arguments; all others are free. A grant for tier med covers low, not the reverse.
UPDATE interlock.standing_grant SET uses = uses + 1
 WHERE id = (
   SELECT id FROM interlock.standing_grant
    WHERE tenant_id = $1 AND tool = $2 AND expires_at > interlock.now() AND revoked_at IS NULL
      -- Not @>, because a list of two recipients contains the granted list of one.
      AND NOT EXISTS (SELECT FROM jsonb_each(arguments) AS meant WHERE meant.value IS DISTINCT FROM $3::text::jsonb -> meant.key)
      AND (tier = 'med' OR $4 = 'low')
      AND (workspace_id IS NULL OR workspace_id = $8)
      AND created_by <> ALL(ARRAY(SELECT unnest(interlock.requesters_of($5)))) AND interlock.key_holds(created_by)
      AND (cardinality($6::text[]) = 0
           OR EXISTS (SELECT FROM interlock.api_key WHERE api_key.id = interlock.key_of(created_by) AND api_key.groups && $6))
      AND (reason IS NOT NULL OR NOT $7::boolean)
    ORDER BY expires_at DESC LIMIT 1
 )
RETURNING id, created_by;
