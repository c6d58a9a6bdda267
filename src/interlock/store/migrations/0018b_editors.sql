-- Everybody who changed the action: each of them counts as having asked for it, not only the last.
ALTER TABLE approval ALTER COLUMN edited_by TYPE text[] USING array_remove(ARRAY[edited_by], NULL);
ALTER TABLE approval ALTER COLUMN edited_by SET DEFAULT '{}', ALTER COLUMN edited_by SET NOT NULL;
