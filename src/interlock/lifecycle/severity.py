"""Tones: what a state demands of its reader, by its place in its machine. Terminal and console color by them."""

from typing import Any, Literal

from interlock.lifecycle.approval import APPROVAL, ApprovalState
from interlock.lifecycle.job import JobState
from interlock.lifecycle.machine import Machine
from interlock.lifecycle.receipt import ReceiptState
from interlock.lifecycle.run import RunState
from interlock.lifecycle.step import StepState
from interlock.lifecycle.worker import WorkerState

Tone = Literal["good", "bad", "ask", "wait", "warn", "busy", "quiet"]

_ENDED_WELL = {
    RunState.SUCCEEDED, StepState.SUCCEEDED, ReceiptState.SUCCEEDED, ApprovalState.APPROVED, WorkerState.COMPLETED,
    JobState.COMPLETED,
}  # fmt: skip
_WARN = {RunState.CANCELING, WorkerState.PAUSED, ReceiptState.IN_DOUBT, ApprovalState.EXPIRED}
_STOPPED = {"cancel", "stopped", "skip", "terminate"}


def tone_of(machine: Machine[Any, Any], state: Any) -> Tone:
    if state in _WARN:
        return "warn"
    if state in _ENDED_WELL:
        return "good"
    if state.startswith("waiting") or (machine is APPROVAL and state == machine.initial):
        return "wait" if state.endswith("external") else "ask"
    if state == machine.initial or any(t.target == state and t.event in _STOPPED for t in machine.transitions()):
        return "quiet"
    # A failed receipt is not final: it may be attempted again.
    return "bad" if state in machine.terminal or state == ReceiptState.FAILED else "busy"
