"""Effects: receipts of what was done, and reversals."""
