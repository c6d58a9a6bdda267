-- The audit chain: sealing appended entries, and reading them back for verification. The migration that creates these
-- tables explains why no entry is missed and none is sealed twice.

-- name: lock_sealer
-- One sealer at a time in all processes: each tenant's chain has a single end to append to.
SELECT pg_try_advisory_xact_lock(hashtextextended('interlock.sealer', 42));

-- name: take_unsealed
-- About $1 entries, by whole notes, oldest first. Each entry is looked up by its key, regardless of the planner's
-- estimate of the journal's size. A deleted entry is returned without its columns: its position is sealed anyway.
WITH oldest AS MATERIALIZED (
  SELECT id, sum(cardinality(run_ids)) OVER (ORDER BY id) - cardinality(run_ids) AS earlier
    FROM (SELECT id, run_ids FROM interlock.audit_pending ORDER BY id LIMIT $1) AS top
), taken AS (
  DELETE FROM interlock.audit_pending USING oldest
   WHERE audit_pending.id = oldest.id AND oldest.earlier < $1
  RETURNING audit_pending.id, audit_pending.tenant_id, audit_pending.run_ids, audit_pending.seqs
)
SELECT taken.tenant_id, noted.run_id, noted.seq, e.*
  FROM taken
 CROSS JOIN LATERAL unnest(taken.run_ids, taken.seqs) AS noted (run_id, seq)
  LEFT JOIN LATERAL (
    SELECT at, type, step, from_state, event, to_state, attempt, token, actor,
           encode(sha256(convert_to(data::text, 'UTF8')), 'hex') AS data_sha256,
           encode(sha256(convert_to(output::text, 'UTF8')), 'hex') AS output_sha256
      FROM interlock.journal_entry WHERE journal_entry.run_id = noted.run_id AND journal_entry.seq = noted.seq
     LIMIT 1
  ) AS e ON true
 ORDER BY taken.id, noted.run_id, noted.seq;

-- name: came_before
-- For entries that leave a state: the entry that led to that state.
SELECT asked.run_id, asked.seq, came.at, came.to_state
  FROM unnest($1::uuid[], $2::int[], $3::text[]) AS asked (run_id, seq, step)
 CROSS JOIN LATERAL (
   SELECT at, to_state FROM interlock.journal_entry
    WHERE journal_entry.run_id = asked.run_id AND journal_entry.seq < asked.seq AND journal_entry.step IS NOT DISTINCT FROM asked.step
      AND journal_entry.to_state IS NOT NULL
    ORDER BY journal_entry.seq DESC LIMIT 1
 ) AS came;

-- name: last_checkpoints
SELECT asked.tenant_id AS chain, interlock.now() AS now, last.*
  FROM unnest($1::uuid[]) AS asked (tenant_id)
  LEFT JOIN LATERAL (
    SELECT * FROM interlock.checkpoint WHERE checkpoint.tenant_id = asked.tenant_id ORDER BY number DESC LIMIT 1
  ) AS last ON true;

-- name: add_seals
INSERT INTO interlock.audit_link (tenant_id, position, run_id, seq, link)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::int[], $5::bytea[]);

-- name: add_checkpoints
INSERT INTO interlock.checkpoint (tenant_id, number, position, head, at, previous, released, key_id, signature)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bytea[], $5::timestamptz[], $6::bytea[], $7::uuid[],
                     $8::text[], $9::bytea[]);

-- name: is_chain_begun
SELECT EXISTS (SELECT FROM interlock.checkpoint);

-- name: chained_tenants
SELECT id FROM interlock.tenant ORDER BY id;

-- name: sealed_after
-- A part of a tenant's chain, and the current contents of the journal for it.
SELECT audit_link.position, audit_link.run_id AS sealed_run, audit_link.seq AS sealed_seq, audit_link.link, e.*
  FROM (SELECT * FROM interlock.audit_link WHERE tenant_id = $1 AND position > $2 ORDER BY position LIMIT $3) AS audit_link
  LEFT JOIN LATERAL (
    SELECT run_id, seq, tenant_id, at, type, step, from_state, event, to_state, attempt, token, actor,
           encode(sha256(convert_to(data::text, 'UTF8')), 'hex') AS data_sha256,
           encode(sha256(convert_to(output::text, 'UTF8')), 'hex') AS output_sha256
      FROM interlock.journal_entry WHERE journal_entry.run_id = audit_link.run_id AND journal_entry.seq = audit_link.seq
     LIMIT 1
  ) AS e ON true
 ORDER BY audit_link.position;

-- name: checkpoints_after
SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
  FROM interlock.checkpoint WHERE tenant_id = $1 AND number > $2 ORDER BY number LIMIT $3;

-- name: count_unsealed
SELECT coalesce(sum(cardinality(run_ids)), 0) FROM interlock.audit_pending WHERE tenant_id = $1;

-- name: count_unproven
-- Of all tenants: entries that wait for the sealer, and ended runs that wait for their evidence.
SELECT (SELECT coalesce(sum(cardinality(run_ids)), 0) FROM interlock.audit_pending) AS unsealed,
       (SELECT count(*) FROM interlock.evidence_due) AS evidence_due;

-- name: runs_to_compare
SELECT id FROM interlock.run WHERE tenant_id = $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: strays
-- What the chain cannot detect: entries that are neither in the chain nor in a note, and runs whose rows count more
-- entries than the journal holds. Runs whose entries were deleted by retention ($3) have none left to compare.
WITH looked_at AS MATERIALIZED (
  SELECT id, seq FROM interlock.run WHERE id = ANY($2::uuid[]) AND tenant_id = $1 AND ($3::uuid IS NULL OR id >= $3)
), stray AS (
  SELECT journal_entry.run_id, journal_entry.seq, 'the entry was put in past the sealer: the chain does not know it' AS why
    FROM looked_at
    JOIN interlock.journal_entry ON journal_entry.run_id = looked_at.id
   WHERE NOT EXISTS (SELECT FROM interlock.audit_link WHERE audit_link.run_id = journal_entry.run_id AND audit_link.seq = journal_entry.seq)
     AND NOT EXISTS (
       SELECT FROM interlock.audit_pending, unnest(audit_pending.run_ids, audit_pending.seqs) AS noted (run_id, seq)
        WHERE audit_pending.tenant_id = $1 AND noted.run_id = journal_entry.run_id AND noted.seq = journal_entry.seq
     )
), cut AS (
  SELECT looked_at.id, held.seq + 1,
         'the run''s last entries are missing: it counts ' || looked_at.seq || ', the journal has ' || held.seq AS why
    FROM looked_at
   CROSS JOIN LATERAL (SELECT coalesce(max(journal_entry.seq), 0) AS seq FROM interlock.journal_entry WHERE journal_entry.run_id = looked_at.id) AS held
   WHERE held.seq < looked_at.seq
)
SELECT * FROM stray UNION ALL SELECT * FROM cut ORDER BY 1, 2 LIMIT 1;

-- name: list_sealed
-- Oldest first; the cursor is the last position seen.
SELECT audit_link.position, encode(audit_link.link, 'hex') AS link, journal_entry.run_id, journal_entry.seq, journal_entry.at, journal_entry.type, journal_entry.step,
       journal_entry.from_state, journal_entry.event, journal_entry.to_state, journal_entry.attempt, journal_entry.actor, journal_entry.data,
       (SELECT session_id FROM interlock.run WHERE run.id = audit_link.run_id) AS session_id
  FROM interlock.audit_link
  JOIN interlock.journal_entry ON journal_entry.run_id = audit_link.run_id AND journal_entry.seq = audit_link.seq
 WHERE audit_link.tenant_id = $1
   AND audit_link.position > $2
   AND ($3::uuid IS NULL OR audit_link.run_id = $3)
 ORDER BY audit_link.position
 LIMIT $4;

-- name: leaves_of_run
-- A run's journal as it is hashed, with each entry's position in the chain (NULL until it is sealed).
SELECT journal_entry.run_id, journal_entry.seq, journal_entry.tenant_id, journal_entry.at, journal_entry.type, journal_entry.step, journal_entry.from_state, journal_entry.event,
       journal_entry.to_state, journal_entry.attempt, journal_entry.token, journal_entry.actor,
       encode(sha256(convert_to(journal_entry.data::text, 'UTF8')), 'hex') AS data_sha256,
       encode(sha256(convert_to(journal_entry.output::text, 'UTF8')), 'hex') AS output_sha256,
       audit_link.position
  FROM interlock.journal_entry
  LEFT JOIN interlock.audit_link ON audit_link.run_id = journal_entry.run_id AND audit_link.seq = journal_entry.seq
 WHERE journal_entry.tenant_id = $1 AND journal_entry.run_id = $2
 ORDER BY journal_entry.seq;

-- name: checkpoints_around
-- The two checkpoints that enclose positions $2 to $3: the last one before, and the first that covers them all.
(SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
   FROM interlock.checkpoint WHERE tenant_id = $1 AND position < $2 ORDER BY position DESC, number DESC LIMIT 1)
UNION ALL
(SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
   FROM interlock.checkpoint WHERE tenant_id = $1 AND position >= $3 ORDER BY position, number LIMIT 1);

-- name: unsealed_below
-- Retention checks this before it deletes the runs below an id: entries that are not sealed yet must stay.
SELECT EXISTS (SELECT FROM interlock.audit_pending, unnest(run_ids) AS noted (run_id) WHERE noted.run_id < $1);
