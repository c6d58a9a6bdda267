-- Caps of workflows: at most so many runs of a workflow in flight, whatever its tenant may have.
--
-- A claim knows nothing of them. A run of a workflow with a cap first stands in `held_back`; only with a place does it go
-- into `ready`, and it keeps the place for as long as it is queued or leased. So what is claimed has a place already, and
-- workflows without a cap pay nothing. Places are counted where they are, in `ready` and among the leases, and under the
-- lane's row lock, which every change of either takes: there is no number that could be wrong.

-- Of the newest version; null if that one has no cap, while runs of earlier ones may still be there.
CREATE TABLE workflow_cap (
  tenant_id        uuid NOT NULL REFERENCES tenant,
  workflow         text NOT NULL,
  max_concurrency  int CHECK (max_concurrency > 0),
  PRIMARY KEY (tenant_id, workflow)
);

CREATE TABLE held_back (
  tenant_id  uuid NOT NULL,
  workflow   text NOT NULL,
  run_id     uuid NOT NULL,
  turn       bigint NOT NULL,
  fresh      boolean NOT NULL,
  lost       boolean NOT NULL,
  PRIMARY KEY (tenant_id, run_id)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX held_back_by_turn ON held_back (tenant_id, workflow, turn);

-- Whether the version it runs has a cap.
ALTER TABLE run ADD COLUMN capped boolean NOT NULL DEFAULT false;
CREATE INDEX run_capped ON run (tenant_id, workflow) WHERE capped AND lease_worker IS NOT NULL;

-- Named only for runs of a workflow with a cap.
ALTER TABLE ready ADD COLUMN workflow text;
CREATE INDEX ready_capped ON ready (tenant_id, workflow) WHERE workflow IS NOT NULL;

-- Called in the transaction of whatever holds a run back or frees a place. The lock that keeps the lane awake comes
-- before the lane's row, as in wake_lane. Answers how many were let in.
CREATE FUNCTION let_in(tenant uuid, name text) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  room bigint;
  moved int;
BEGIN
  PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant::text, 42));
  PERFORM FROM lane WHERE tenant_id = tenant FOR NO KEY UPDATE;
  room := coalesce((SELECT max_concurrency FROM workflow_cap WHERE tenant_id = tenant AND workflow = name), 2147483647)
    - (SELECT count(*) FROM run WHERE capped AND lease_worker IS NOT NULL AND tenant_id = tenant AND workflow = name)
    - (SELECT count(*) FROM ready WHERE tenant_id = tenant AND workflow = name);
  IF room <= 0 THEN
    RETURN 0;
  END IF;
  WITH following AS (
    SELECT run_id FROM held_back WHERE tenant_id = tenant AND workflow = name ORDER BY turn LIMIT room
  ), gone AS (
    DELETE FROM held_back USING following
     WHERE held_back.tenant_id = tenant AND held_back.run_id = following.run_id
    RETURNING held_back.*
  )
  INSERT INTO ready (tenant_id, run_id, turn, fresh, lost, workflow)
  SELECT tenant_id, run_id, turn, fresh, lost, workflow FROM gone;
  GET DIAGNOSTICS moved = ROW_COUNT;
  IF moved > 0 THEN
    PERFORM wake_lane(tenant);
  END IF;
  RETURN moved;
END $$;
