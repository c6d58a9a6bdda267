-- The console: its sessions, and the data for its charts of the last hours.

-- A cookie's digest, and the key that it belongs to.
CREATE TABLE interlock.console_session (
  digest      bytea PRIMARY KEY CHECK (length(digest) = 32),
  key_id      uuid NOT NULL REFERENCES interlock.api_key (id) ON DELETE CASCADE,
  created_at  timestamptz NOT NULL,
  expires_at  timestamptz NOT NULL CHECK (expires_at > created_at)
);
CREATE INDEX console_session_expiry ON interlock.console_session (expires_at);

-- How many runs ended in a minute, by final state and duration: bucket n holds those of 2^(n-1) to 2^n ms. The sealer
-- handles every ended run exactly once, off the hot path, and counts it here in the same transaction.
CREATE TABLE interlock.run_stats_minute (
  tenant_id  uuid NOT NULL,
  minute     timestamptz NOT NULL,
  workspace  text NOT NULL DEFAULT '',
  status     text NOT NULL,
  bucket     int NOT NULL CHECK (bucket BETWEEN 0 AND 40),
  runs       bigint NOT NULL CHECK (runs > 0),
  PRIMARY KEY (tenant_id, minute, workspace, status, bucket)
);
CREATE INDEX run_stats_minute_age ON interlock.run_stats_minute (minute);
