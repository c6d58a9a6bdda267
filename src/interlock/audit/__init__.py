"""The proof: canonical form, chain, keys, evidence and redaction. Pure."""
