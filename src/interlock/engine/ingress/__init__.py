"""Ingress: what reaches the engine from other systems, each request and event once."""
