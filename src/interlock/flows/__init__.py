"""Flows: Python functions whose every step is journaled, so that they continue where they were after any crash."""

from interlock.flows.context import FlowContext
from interlock.flows.errors import EventTimeout, FlowUsageError, NonDeterminismError, Rejected, StepFailed
from interlock.flows.registry import Flows, RegisteredFlow, make_flow
from interlock.flows.replay import Replay

__all__ = [
    "EventTimeout",
    "FlowContext",
    "FlowUsageError",
    "Flows",
    "NonDeterminismError",
    "RegisteredFlow",
    "Rejected",
    "Replay",
    "StepFailed",
    "make_flow",
]
