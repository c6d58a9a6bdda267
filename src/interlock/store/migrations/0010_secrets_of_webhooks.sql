-- Secrets of webhooks: encrypted like those of tools, with a key that is not in the database.
--
-- SQL cannot encrypt what stands here in the clear, since it does not have the key: the first server that starts does.
-- From now on no row can be written with a secret in the clear, nor changed and keep one.

ALTER TABLE destination
  ADD COLUMN nonce bytea CHECK (length(nonce) = 12),
  ADD COLUMN ciphertext bytea,
  DROP CONSTRAINT destination_check,
  ADD CONSTRAINT destination_sealed CHECK ((nonce IS NULL) = (ciphertext IS NULL)),
  ADD CONSTRAINT destination_secret CHECK (num_nonnulls(secret, ciphertext) = (channel = 'webhook')::int);
ALTER TABLE destination ADD CONSTRAINT destination_no_plain_secret CHECK (secret IS NULL) NOT VALID;
