"""Runs: start, find, cancel, resume; child runs and single tool calls."""
