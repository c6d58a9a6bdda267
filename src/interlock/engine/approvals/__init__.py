"""Approvals: from the question to the use of its answer."""
