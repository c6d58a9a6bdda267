-- Sessions: conversations with an agent. Each message is a run; a session has at most one that has not ended.

-- `runs` counts the runs that were begun, `messages` what was said. Locked before anything else: before the lane.
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

ALTER TABLE run
  -- Which run of its session it is: the events of a session are in the order of this and of their own number.
  ADD COLUMN session_run int,
  -- Whoever sent the message lets pass what would ask one person and is not high.
  ADD COLUMN auto_approve boolean NOT NULL DEFAULT false,
  ADD CONSTRAINT run_in_session CHECK ((session_id IS NULL) = (session_run IS NULL)),
  ADD CONSTRAINT run_auto_approve CHECK (NOT auto_approve OR session_id IS NOT NULL);
CREATE UNIQUE INDEX run_of_session ON run (session_id, session_run) WHERE session_id IS NOT NULL;
CREATE UNIQUE INDEX run_active_in_session ON run (session_id) WHERE session_id IS NOT NULL AND completed_at IS NULL;
