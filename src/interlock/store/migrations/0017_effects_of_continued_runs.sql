-- Effects outlive the run that made them: in the runs that continue it.

-- The first of the runs that continue each other; NULL in that one itself. The keys of effects are made of it, so that
-- what a continued run does again has the key that it had before, and the system acted on can tell that it is the same.
ALTER TABLE run ADD COLUMN root_id uuid;
