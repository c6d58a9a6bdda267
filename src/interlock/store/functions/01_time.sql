-- Time: every statement and function asks interlock.now(). Tests replace this function to move the clock.

CREATE OR REPLACE FUNCTION interlock.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT pg_catalog.now()
$$;
