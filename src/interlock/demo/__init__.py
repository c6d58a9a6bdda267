"""A small shop whose books are a JSON file, and the workflow that refunds its customers."""
