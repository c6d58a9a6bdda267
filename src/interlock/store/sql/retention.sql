-- Retention: which months of the journal are removed, and when. The server's own clock decides, never a parameter.

-- name: months_to_detach
SELECT child.relname AS name
  FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid
  LEFT JOIN interlock.journal_month AS known ON known.name = child.relname
 WHERE inhparent = 'interlock.journal_entry'::regclass AND child.relname ~ '^journal_entry_\d{6}$' AND known.kept_at IS NULL
   AND CASE WHEN child.relname ~ '^journal_entry_\d{6}$' THEN interlock.month_end(child.relname) <= interlock.now() - make_interval(days => $1) END
 ORDER BY 1;

-- name: months_to_drop
SELECT name FROM interlock.journal_month
 WHERE dropped_at IS NULL AND detached_at <= interlock.now() - make_interval(days => $1)
 ORDER BY name;

-- name: detach_month
SELECT interlock.detach_month($1, $2);

-- name: drop_month
SELECT interlock.drop_month($1, $2);

-- name: keep_month
SELECT interlock.keep_month($1, $2, $3);

-- name: release_month
DELETE FROM interlock.journal_month WHERE name = $1 AND kept_at IS NOT NULL RETURNING name;

-- name: journal_months
-- The months in the journal, and the months that retention has detached but not dropped.
SELECT coalesce(child.relname, known.name) AS name, known.detached_at, known.kept_at,
       known.detached_at + make_interval(days => $1) AS drops_at
  FROM (SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
         WHERE inhparent = 'interlock.journal_entry'::regclass AND relname ~ '^journal_entry_\d{6}$') AS child
  FULL JOIN interlock.journal_month AS known ON known.name = child.relname
 WHERE known.dropped_at IS NULL
 ORDER BY 1;

-- name: open_runs_below
SELECT count(*) FROM interlock.run WHERE id < $1 AND completed_at IS NULL;
