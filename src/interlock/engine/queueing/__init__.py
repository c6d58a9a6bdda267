"""Queueing: who gets which run, and what happens if a worker is lost."""
