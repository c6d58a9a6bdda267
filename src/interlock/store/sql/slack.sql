-- Slack: whose key a Slack user acts with, and which tenants a Slack team belongs to.

-- name: add_link_code
-- Each new code deletes the unused expired ones.
WITH expired AS (DELETE FROM interlock.slack_link_code WHERE expires_at <= interlock.now())
INSERT INTO interlock.slack_link_code (code_hash, key_id, expires_at)
VALUES ($1, $2, interlock.now() + make_interval(secs => $3))
RETURNING expires_at;

-- name: use_link_code
-- Return the key behind the code. This transaction deletes the code.
WITH used AS (
  DELETE FROM interlock.slack_link_code WHERE code_hash = $1 AND expires_at > interlock.now() RETURNING key_id
)
SELECT api_key.*, tenant.name AS tenant
  FROM used
  JOIN interlock.api_key ON api_key.id = used.key_id AND api_key.revoked_at IS NULL
  JOIN interlock.tenant ON tenant.id = api_key.tenant_id;

-- name: link_slack_user
INSERT INTO interlock.slack_user (tenant_id, team_id, user_id, key_id, created_at)
VALUES ($1, $2, $3, $4, interlock.now())
ON CONFLICT (team_id, user_id, tenant_id) DO UPDATE SET key_id = excluded.key_id, created_at = excluded.created_at;

-- name: list_slack_users
SELECT slack_user.*, api_key.name, api_key.role, api_key.revoked_at
  FROM interlock.slack_user JOIN interlock.api_key ON api_key.id = key_id
 WHERE slack_user.tenant_id = $1 AND ($2::text IS NULL OR api_key.workspace_id = $2)
 ORDER BY team_id, user_id LIMIT 1000;

-- name: unlink_slack_user
DELETE FROM interlock.slack_user USING interlock.api_key
 WHERE slack_user.tenant_id = $1 AND team_id = $2 AND user_id = $3
   AND api_key.id = key_id AND ($4::text IS NULL OR api_key.workspace_id = $4)
RETURNING slack_user.*, api_key.name, api_key.role, api_key.revoked_at;

-- name: keys_of_slack_user
-- A tenant that left the team is passed over.
SELECT api_key.*, tenant.name AS tenant
  FROM interlock.slack_user
  JOIN interlock.api_key ON api_key.id = slack_user.key_id AND api_key.revoked_at IS NULL
  JOIN interlock.tenant ON tenant.id = api_key.tenant_id
 WHERE team_id = $1 AND user_id = $2 AND interlock.is_in_slack_team(slack_user.tenant_id, team_id)
 ORDER BY tenant.name;

-- name: lock_slack_team
SELECT pg_advisory_xact_lock(hashtextextended($1::text, 47));

-- name: is_in_slack_team
SELECT interlock.is_in_slack_team($1, $2);

-- name: offer_slack_team
-- The first offer writes down that the offering tenant ($1) has the team too.
WITH own AS (
  INSERT INTO interlock.slack_team (team_id, tenant_id, offered_by, offered_at, accepted_by, accepted_at)
  VALUES ($3, $1, $4, interlock.now(), $4, interlock.now())
  ON CONFLICT (team_id, tenant_id) DO NOTHING
)
INSERT INTO interlock.slack_team (team_id, tenant_id, offered_by, offered_at)
VALUES ($3, $2, $4, interlock.now())
ON CONFLICT (team_id, tenant_id) DO NOTHING;

-- name: accept_slack_team
UPDATE interlock.slack_team SET accepted_by = $3, accepted_at = interlock.now()
 WHERE tenant_id = $1 AND team_id = $2 AND accepted_at IS NULL
RETURNING team_id;

-- name: leave_slack_team
DELETE FROM interlock.slack_team WHERE tenant_id = $1 AND team_id = $2
RETURNING team_id, accepted_at;

-- name: slack_teams
-- The teams that a tenant is in or was offered, and for those it is in the other tenants there.
SELECT mine.team_id, mine.accepted_at IS NOT NULL AS is_member,
       coalesce(array_agg(tenant.name ORDER BY tenant.name)
                FILTER (WHERE other.accepted_at IS NOT NULL AND mine.accepted_at IS NOT NULL), ARRAY[]::text[]) AS tenants
  FROM interlock.slack_team AS mine
  JOIN interlock.slack_team AS other ON other.team_id = mine.team_id
  JOIN interlock.tenant ON tenant.id = other.tenant_id
 WHERE mine.tenant_id = $1
 GROUP BY mine.team_id, mine.accepted_at
 ORDER BY mine.team_id LIMIT 1000;
