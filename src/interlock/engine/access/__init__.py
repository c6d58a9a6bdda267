"""Access: tenants, keys, secrets and limits."""
