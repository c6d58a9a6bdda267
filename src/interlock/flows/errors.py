"""Errors in a flow.

StepFailed           a step failed for good; the flow may catch it
├── Rejected         the approval was rejected or expired
└── EventTimeout     the awaited event did not come in time
FlowUsageError       the flow uses the API wrongly, for example awaits something that is not one of its steps
NonDeterminismError  the flow asks for a different step than its history has
"""

from typing import Any

from interlock.lifecycle import RunReason


class StepFailed(Exception):
    """`step` is the step's key, `reason` an error code, `error` the error of its last attempt."""

    def __init__(self, step: str, reason: RunReason, error: dict[str, Any]) -> None:
        super().__init__(f"{step}: {error.get('message') or reason}")
        self.step = step
        self.reason = reason
        self.error = error


class Rejected(StepFailed):
    """A rejected or expired approval, of an approval gate or of an action that the policy held."""


class EventTimeout(StepFailed):
    """A time-out of a wait for an external event."""


class FlowUsageError(Exception):
    pass


class NonDeterminismError(Exception):
    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


def step_failed(step: str, reason: RunReason, error: dict[str, Any]) -> StepFailed:
    match reason:
        case RunReason.REJECTED | RunReason.APPROVAL_EXPIRED:
            return Rejected(step, reason, error)
        case RunReason.EXTERNAL_TIMEOUT:
            return EventTimeout(step, reason, error)
        case _:
            return StepFailed(step, reason, error)
