-- Sessions: conversations with an agent. Each message is a run; a session has at most one that has not ended. What its
-- runs say of it is in their rows.

-- `runs` counts the runs that were begun, `messages` what was said.
CREATE TABLE session (
  id            uuid PRIMARY KEY,
  tenant_id     uuid NOT NULL REFERENCES tenant,
  workspace_id  text,
  agent         text NOT NULL,
  auto_approve  boolean NOT NULL DEFAULT false,
  created_by    text NOT NULL,
  created_at    timestamptz NOT NULL,
  runs          int NOT NULL DEFAULT 0 CHECK (runs >= 0),
  messages      int NOT NULL DEFAULT 0 CHECK (messages >= 0)
);
CREATE INDEX session_of_tenant ON session (tenant_id, id);

-- What people say. Without a run it waits for the one before it to end; who said it decides what its run may do.
CREATE TABLE message (
  session_id    uuid NOT NULL REFERENCES session,
  number        int NOT NULL CHECK (number > 0),
  id            uuid NOT NULL UNIQUE,
  tenant_id     uuid NOT NULL,
  content       text NOT NULL,
  auto_approve  boolean NOT NULL,
  sent_by       text NOT NULL,
  sender        jsonb NOT NULL,
  sent_at       timestamptz NOT NULL,
  run_id        uuid UNIQUE,
  PRIMARY KEY (session_id, number)
);
CREATE INDEX message_waiting ON message (session_id, number) WHERE run_id IS NULL;
