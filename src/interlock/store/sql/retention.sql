-- Retention: which months of the journal are removed, and when. The server's own clock decides, never a parameter.

-- name: months_to_detach
SELECT child.relname AS name
  FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid
  LEFT JOIN journal_month AS known ON known.name = child.relname
 WHERE inhparent = 'entry'::regclass AND child.relname ~ '^entry_\d{6}$' AND known.kept_at IS NULL
   AND CASE WHEN child.relname ~ '^entry_\d{6}$' THEN month_end(child.relname) <= now() - make_interval(days => $1) END
 ORDER BY 1;

-- name: months_to_drop
SELECT name FROM journal_month
 WHERE dropped_at IS NULL AND detached_at <= now() - make_interval(days => $1)
 ORDER BY name;

-- name: detach_month
SELECT detach_month($1, $2);

-- name: drop_month
SELECT drop_month($1, $2);

-- name: keep_month
SELECT keep_month($1, $2, $3);

-- name: release_month
DELETE FROM journal_month WHERE name = $1 AND kept_at IS NOT NULL RETURNING name;

-- name: journal_months
-- The months in the journal, and the months that retention has detached but not dropped.
SELECT coalesce(child.relname, known.name) AS name, known.detached_at, known.kept_at,
       known.detached_at + make_interval(days => $1) AS drops_at
  FROM (SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
         WHERE inhparent = 'entry'::regclass AND relname ~ '^entry_\d{6}$') AS child
  FULL JOIN journal_month AS known ON known.name = child.relname
 WHERE known.dropped_at IS NULL
 ORDER BY 1;

-- name: open_runs_below
SELECT count(*) FROM run WHERE id < $1 AND completed_at IS NULL;
