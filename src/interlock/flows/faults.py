"""What goes wrong in a flow.

StepFailed       a step failed for good; the flow may catch it
├── Rejected     people said no, or nobody decided in time
└── EventMissed  the event that was waited for did not come in time
FlowMisused      the flow does what a flow must not, say await something that is not one of its steps
FlowChanged      the flow asks for something else than its history has
"""

from typing import Any

from interlock.lifecycle import RunReason


class StepFailed(Exception):
    """`step` is its key, `reason` the code of why, `error` what its last attempt ended with."""

    def __init__(self, step: str, reason: RunReason, error: dict[str, Any]) -> None:
        super().__init__(f"{step}: {error.get('message') or reason}")
        self.step = step
        self.reason = reason
        self.error = error


class Rejected(StepFailed):
    """Of an approval, or of an action that the policy held for people."""


class EventMissed(StepFailed):
    """Of a wait for an event from outside."""


class FlowMisused(Exception):
    pass


class FlowChanged(Exception):
    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


def step_failed(step: str, reason: RunReason, error: dict[str, Any]) -> StepFailed:
    match reason:
        case RunReason.REJECTED | RunReason.APPROVAL_EXPIRED:
            return Rejected(step, reason, error)
        case RunReason.EXTERNAL_TIMEOUT:
            return EventMissed(step, reason, error)
        case _:
            return StepFailed(step, reason, error)
