-- Sessions: conversations with an agent. Each message is a run; a session has at most one that has not ended. The
-- agent's answers are in the rows of the runs.

-- `runs` counts the runs that were started, `messages` the messages.
CREATE TABLE interlock.session (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL REFERENCES interlock.tenant,
  workspace_id  text,
  agent         text NOT NULL,
  auto_approve  boolean NOT NULL DEFAULT false,
  created_by    text NOT NULL,
  created_at    timestamptz NOT NULL,
  runs          int NOT NULL DEFAULT 0 CHECK (runs >= 0),
  messages      int NOT NULL DEFAULT 0 CHECK (messages >= 0)
);
CREATE INDEX session_of_tenant ON interlock.session (tenant_id, id);

-- Messages of people. A message without a run waits for the previous run to end; its sender's rights apply to its run.
CREATE TABLE interlock.message (
  session_id    uuid NOT NULL REFERENCES interlock.session,
  number        int NOT NULL CHECK (number > 0),
  id            uuid NOT NULL UNIQUE,
  tenant_id     uuid NOT NULL,
  content       text NOT NULL,
  auto_approve  boolean NOT NULL,
  sent_by       text NOT NULL,
  sender        jsonb NOT NULL,
  -- The key of the request that sent it: its run has the same key.
  idempotency_key text,
  sent_at       timestamptz NOT NULL,
  run_id        uuid UNIQUE,
  PRIMARY KEY (session_id, number)
);
CREATE INDEX message_waiting ON interlock.message (session_id, number) WHERE run_id IS NULL;
