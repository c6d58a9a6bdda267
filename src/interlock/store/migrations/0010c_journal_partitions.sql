-- TRUNCATE of a partition asks its own triggers and not the journal's: each gets one. Later ones get it when they are made.

DO $$
DECLARE
  part regclass;
BEGIN
  FOR part IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'entry'::regclass LOOP
    EXECUTE format(
      'CREATE OR REPLACE TRIGGER entry_keep BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION refuse_rewrite()', part
    );
  END LOOP;
END $$;
