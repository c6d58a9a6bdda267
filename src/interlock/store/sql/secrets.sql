-- Secrets: stored as ciphertext, read before a tool call and before a webhook is signed.

-- name: set_secret
INSERT INTO interlock.secret (tenant_id, name, version, nonce, ciphertext, tools, workspaces, created_at, created_by)
VALUES ($1, $2, 1, $3, $4, $6, $7, interlock.now(), $5)
ON CONFLICT (tenant_id, name) DO UPDATE
   SET version = secret.version + 1, nonce = excluded.nonce, ciphertext = excluded.ciphertext,
       tools = excluded.tools, workspaces = excluded.workspaces,
       created_at = excluded.created_at, created_by = excluded.created_by
RETURNING name, version, tools, workspaces, created_at, created_by;

-- name: list_secrets
SELECT name, version, tools, workspaces, created_at, created_by FROM interlock.secret
 WHERE tenant_id = $1 AND ($2::text IS NULL OR name > $2) ORDER BY name LIMIT $3;

-- name: delete_secret
DELETE FROM interlock.secret WHERE tenant_id = $1 AND name = $2
RETURNING name, version, tools, workspaces, created_at, created_by;

-- name: sealed_secrets
-- One row for each stored secret, or one without a name if there are none: the caller always needs the tenant's name.
SELECT tenant.name AS tenant, secret.name, secret.nonce, secret.ciphertext, secret.tools, secret.workspaces
  FROM interlock.tenant LEFT JOIN interlock.secret ON secret.tenant_id = tenant.id AND secret.name = ANY($2::text[])
 WHERE tenant.id = $1;

-- name: all_secrets
SELECT tenant_id, name, nonce, ciphertext FROM interlock.secret ORDER BY tenant_id, name;

-- name: reseal_secret
-- The same value under another key. Skipped if the secret was set in between.
UPDATE interlock.secret SET nonce = $4, ciphertext = $5 WHERE tenant_id = $1 AND name = $2 AND nonce = $3;

-- name: all_webhook_secrets
SELECT id, tenant_id, nonce, ciphertext FROM interlock.notification_target WHERE ciphertext IS NOT NULL ORDER BY id FOR NO KEY UPDATE;

-- name: reseal_webhook
UPDATE interlock.notification_target SET nonce = $2, ciphertext = $3 WHERE id = $1;
