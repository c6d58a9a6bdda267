-- The months of the journal: retention detaches a month first and drops it after a grace time.

CREATE OR REPLACE FUNCTION interlock.month_end(month text) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
  SELECT (make_date(left(right(month, 6), 4)::int, right(month, 2)::int, 1) + interval '1 month') AT TIME ZONE 'UTC'
$$;

CREATE OR REPLACE FUNCTION interlock.is_journal_month(month text) RETURNS boolean LANGUAGE sql STABLE AS $$
  SELECT month ~ '^journal_entry_\d{6}$'
         AND EXISTS (SELECT FROM pg_inherits WHERE inhparent = 'interlock.journal_entry'::regclass AND inhrelid = to_regclass('interlock.' || month))
$$;

-- The three functions below use only the server's clock: a caller with a wrong clock or a stale result can destroy
-- nothing. They return whether they did it.
CREATE OR REPLACE FUNCTION interlock.detach_month(month text, keep_days int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('interlock.journal_month', 0));
  IF NOT interlock.is_journal_month(month) THEN
    RETURN false;
  END IF;
  IF interlock.month_end(month) > interlock.now() - make_interval(days => keep_days)
     OR EXISTS (SELECT FROM interlock.journal_month WHERE name = month AND kept_at IS NOT NULL) THEN
    RETURN false;
  END IF;
  EXECUTE format('ALTER TABLE interlock.journal_entry DETACH PARTITION interlock.%I', month);
  EXECUTE format('CREATE OR REPLACE TRIGGER journal_entry_detached BEFORE INSERT OR UPDATE OR DELETE ON interlock.%I FOR EACH ROW'
                 ' EXECUTE FUNCTION interlock.refuse_rewrite()', month);
  INSERT INTO interlock.journal_month (name, detached_at) VALUES (month, interlock.now())
  ON CONFLICT (name) DO UPDATE SET detached_at = interlock.now(), dropped_at = NULL;
  RETURN true;
END $$;

CREATE OR REPLACE FUNCTION interlock.drop_month(month text, grace_days int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('interlock.journal_month', 0));
  UPDATE interlock.journal_month SET dropped_at = interlock.now()
   WHERE name = month AND dropped_at IS NULL AND detached_at <= interlock.now() - make_interval(days => grace_days);
  IF NOT FOUND OR interlock.is_journal_month(month) THEN
    RETURN false;
  END IF;
  EXECUTE format('DROP TABLE IF EXISTS interlock.%I', month);
  RETURN true;
END $$;

-- `low` and `high` are the bounds that the month had.
CREATE OR REPLACE FUNCTION interlock.keep_month(month text, low uuid, high uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('interlock.journal_month', 0));
  IF to_regclass('interlock.' || month) IS NULL OR EXISTS (SELECT FROM interlock.journal_month WHERE name = month AND dropped_at IS NOT NULL) THEN
    RETURN false;
  END IF;
  IF NOT interlock.is_journal_month(month) THEN
    EXECUTE format('DROP TRIGGER journal_entry_detached ON interlock.%I', month);
    EXECUTE format('ALTER TABLE interlock.journal_entry ATTACH PARTITION interlock.%I FOR VALUES FROM (%L) TO (%L)', month, low, high);
  END IF;
  INSERT INTO interlock.journal_month (name, kept_at) VALUES (month, interlock.now())
  ON CONFLICT (name) DO UPDATE SET detached_at = NULL, kept_at = interlock.now();
  RETURN true;
END $$;
