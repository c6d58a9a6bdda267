"""Proof: the audit log, evidence, retention and what is measured."""
