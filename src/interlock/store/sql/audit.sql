-- The audit chain: sealing appended entries, and reading them back for verification. The migration that creates these
-- tables explains why no entry is missed and none is sealed twice.

-- name: lock_sealer
-- One sealer at a time in all processes: each tenant's chain has a single end to append to.
SELECT pg_try_advisory_xact_lock(hashtextextended('interlock_sealer', 42));

-- name: take_unsealed
-- About $1 entries, by whole notes, oldest first. Each entry is looked up by its key, regardless of the planner's
-- estimate of the journal's size. A deleted entry is returned without its columns: its position is sealed anyway.
WITH oldest AS MATERIALIZED (
  SELECT id, sum(cardinality(run_ids)) OVER (ORDER BY id) - cardinality(run_ids) AS earlier
    FROM (SELECT id, run_ids FROM unsealed ORDER BY id LIMIT $1) AS top
), taken AS (
  DELETE FROM unsealed USING oldest
   WHERE unsealed.id = oldest.id AND oldest.earlier < $1
  RETURNING unsealed.id, unsealed.tenant_id, unsealed.run_ids, unsealed.seqs
)
SELECT taken.tenant_id, noted.run_id, noted.seq, e.*
  FROM taken
 CROSS JOIN LATERAL unnest(taken.run_ids, taken.seqs) AS noted (run_id, seq)
  LEFT JOIN LATERAL (
    SELECT at, type, step, from_state, event, to_state, attempt, token, actor,
           encode(sha256(convert_to(data::text, 'UTF8')), 'hex') AS data_sha256,
           encode(sha256(convert_to(output::text, 'UTF8')), 'hex') AS output_sha256
      FROM entry WHERE entry.run_id = noted.run_id AND entry.seq = noted.seq
     LIMIT 1
  ) AS e ON true
 ORDER BY taken.id, noted.run_id, noted.seq;

-- name: came_before
-- For entries that leave a state: the entry that led to that state.
SELECT asked.run_id, asked.seq, came.at, came.to_state
  FROM unnest($1::uuid[], $2::int[], $3::text[]) AS asked (run_id, seq, step)
 CROSS JOIN LATERAL (
   SELECT at, to_state FROM entry
    WHERE entry.run_id = asked.run_id AND entry.seq < asked.seq AND entry.step IS NOT DISTINCT FROM asked.step
      AND entry.to_state IS NOT NULL
    ORDER BY entry.seq DESC LIMIT 1
 ) AS came;

-- name: last_checkpoints
SELECT asked.tenant_id AS chain, coalesce($1, now()) AS now, last.*
  FROM unnest($2::uuid[]) AS asked (tenant_id)
  LEFT JOIN LATERAL (
    SELECT * FROM checkpoint WHERE checkpoint.tenant_id = asked.tenant_id ORDER BY number DESC LIMIT 1
  ) AS last ON true;

-- name: add_seals
INSERT INTO seal (tenant_id, position, run_id, seq, link)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::int[], $5::bytea[]);

-- name: add_checkpoints
INSERT INTO checkpoint (tenant_id, number, position, head, at, previous, released, key_id, signature)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bytea[], $5::timestamptz[], $6::bytea[], $7::uuid[],
                     $8::text[], $9::bytea[]);

-- name: is_chain_begun
SELECT EXISTS (SELECT FROM checkpoint);

-- name: chained_tenants
SELECT id FROM tenant ORDER BY id;

-- name: sealed_after
-- A part of a tenant's chain, and the current contents of the journal for it.
SELECT seal.position, seal.run_id AS sealed_run, seal.seq AS sealed_seq, seal.link, e.*
  FROM (SELECT * FROM seal WHERE tenant_id = $1 AND position > $2 ORDER BY position LIMIT $3) AS seal
  LEFT JOIN LATERAL (
    SELECT run_id, seq, tenant_id, at, type, step, from_state, event, to_state, attempt, token, actor,
           encode(sha256(convert_to(data::text, 'UTF8')), 'hex') AS data_sha256,
           encode(sha256(convert_to(output::text, 'UTF8')), 'hex') AS output_sha256
      FROM entry WHERE entry.run_id = seal.run_id AND entry.seq = seal.seq
     LIMIT 1
  ) AS e ON true
 ORDER BY seal.position;

-- name: checkpoints_after
SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
  FROM checkpoint WHERE tenant_id = $1 AND number > $2 ORDER BY number LIMIT $3;

-- name: count_unsealed
SELECT coalesce(sum(cardinality(run_ids)), 0) FROM unsealed WHERE tenant_id = $1;

-- name: count_unproven
-- Of all tenants: entries that wait for the sealer, and ended runs that wait for their evidence.
SELECT (SELECT coalesce(sum(cardinality(run_ids)), 0) FROM unsealed) AS unsealed,
       (SELECT count(*) FROM evidence_due) AS evidence_due;

-- name: runs_to_compare
SELECT id FROM run WHERE tenant_id = $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: strays
-- What the chain cannot detect: entries that are neither in the chain nor in a note, and runs whose rows count more
-- entries than the journal holds. Runs whose entries were deleted by retention ($3) have none left to compare.
WITH looked_at AS MATERIALIZED (
  SELECT id, seq FROM run WHERE id = ANY($2::uuid[]) AND tenant_id = $1 AND ($3::uuid IS NULL OR id >= $3)
), stray AS (
  SELECT entry.run_id, entry.seq, 'the entry was put in past the sealer: the chain does not know it' AS why
    FROM looked_at
    JOIN entry ON entry.run_id = looked_at.id
   WHERE NOT EXISTS (SELECT FROM seal WHERE seal.run_id = entry.run_id AND seal.seq = entry.seq)
     AND NOT EXISTS (
       SELECT FROM unsealed, unnest(unsealed.run_ids, unsealed.seqs) AS noted (run_id, seq)
        WHERE unsealed.tenant_id = $1 AND noted.run_id = entry.run_id AND noted.seq = entry.seq
     )
), cut AS (
  SELECT looked_at.id, held.seq + 1,
         'the run''s last entries are missing: it counts ' || looked_at.seq || ', the journal has ' || held.seq AS why
    FROM looked_at
   CROSS JOIN LATERAL (SELECT coalesce(max(entry.seq), 0) AS seq FROM entry WHERE entry.run_id = looked_at.id) AS held
   WHERE held.seq < looked_at.seq
)
SELECT * FROM stray UNION ALL SELECT * FROM cut ORDER BY 1, 2 LIMIT 1;

-- name: list_sealed
-- Oldest first; the cursor is the last position seen.
SELECT seal.position, encode(seal.link, 'hex') AS link, entry.run_id, entry.seq, entry.at, entry.type, entry.step,
       entry.from_state, entry.event, entry.to_state, entry.attempt, entry.actor, entry.data,
       (SELECT session_id FROM run WHERE run.id = seal.run_id) AS session_id
  FROM seal
  JOIN entry ON entry.run_id = seal.run_id AND entry.seq = seal.seq
 WHERE seal.tenant_id = $1
   AND seal.position > $2
   AND ($3::uuid IS NULL OR seal.run_id = $3)
 ORDER BY seal.position
 LIMIT $4;

-- name: leaves_of_run
-- A run's journal as it is hashed, with each entry's position in the chain (NULL until it is sealed).
SELECT entry.run_id, entry.seq, entry.tenant_id, entry.at, entry.type, entry.step, entry.from_state, entry.event,
       entry.to_state, entry.attempt, entry.token, entry.actor,
       encode(sha256(convert_to(entry.data::text, 'UTF8')), 'hex') AS data_sha256,
       encode(sha256(convert_to(entry.output::text, 'UTF8')), 'hex') AS output_sha256,
       seal.position
  FROM entry
  LEFT JOIN seal ON seal.run_id = entry.run_id AND seal.seq = entry.seq
 WHERE entry.tenant_id = $1 AND entry.run_id = $2
 ORDER BY entry.seq;

-- name: checkpoints_around
-- The two checkpoints that enclose positions $2 to $3: the last one before, and the first that covers them all.
(SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
   FROM checkpoint WHERE tenant_id = $1 AND position < $2 ORDER BY position DESC, number DESC LIMIT 1)
UNION ALL
(SELECT tenant_id, number, position, head, at, previous, released, key_id, signature
   FROM checkpoint WHERE tenant_id = $1 AND position >= $3 ORDER BY position, number LIMIT 1);

-- name: unsealed_below
-- Retention checks this before it deletes the runs below an id: entries that are not sealed yet must stay.
SELECT EXISTS (SELECT FROM unsealed, unnest(run_ids) AS noted (run_id) WHERE noted.run_id < $1);
