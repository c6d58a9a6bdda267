"""Flows: Python functions whose every step is journaled, so that they go on where they were after any crash."""

from interlock.flows.context import FlowContext
from interlock.flows.faults import EventMissed, FlowChanged, FlowMisused, Rejected, StepFailed
from interlock.flows.registry import Flow, Flows, make_flow
from interlock.flows.replay import Replay

__all__ = [
    "EventMissed",
    "Flow",
    "FlowChanged",
    "FlowContext",
    "FlowMisused",
    "Flows",
    "Rejected",
    "Replay",
    "StepFailed",
    "make_flow",
]
