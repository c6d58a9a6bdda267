"""Compensation: a run that ends without reaching its goal first undoes what it did, last step first.

The run is `canceling` during compensation, whether it was canceled or failed. A compensation step is a normal step: it
passes the gate, has a receipt, is retried, and can wait for approval. If one fails for good, the others still run, and
the run ends with that failure.
"""

from dataclasses import dataclass
from typing import Any

from interlock.journal.journal import Journal, StepSnapshot
from interlock.lifecycle import STEP, RunEvent, RunReason, StepState


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ends."""

    event: RunEvent
    reason: RunReason
    error: dict[str, Any] | None = None


def begin_compensation(journal: Journal, ending: RunOutcome, *, actor: str) -> RunOutcome | None:
    """Return how the run ends now, or None if compensation steps must run first, as the journal then records.

    No step may be in flight any more; a step that is not settled never will be.
    """
    if ending.event == RunEvent.SUCCEED or not journal.undos or journal.is_undoing:
        return ending
    canceled = ending.event == RunEvent.STOPPED
    undo = [fold.step.undoes for fold in reversed(journal.undos.values())]
    after = {} if canceled else {"reason": ending.reason, "error": ending.error}
    journal.move_run(RunEvent.COMPENSATE, actor=actor, data={"undo": undo, "ending": after})
    return None


def next_undo(journal: Journal) -> StepSnapshot | None:
    return next((fold for fold in journal.compensation if fold.status not in STEP.terminal), None)


def compensation_outcome(journal: Journal) -> RunOutcome:
    """Return how the run ends when nothing is left to undo."""
    ending = journal.ending or {}
    failed = [fold for fold in journal.compensation if fold.status != StepState.SUCCEEDED]
    if failed:
        return RunOutcome(RunEvent.FAIL, RunReason.COMPENSATION_FAILED, _left_behind(failed, ending))
    if ending:
        return RunOutcome(RunEvent.FAIL, RunReason(ending["reason"]), ending["error"])
    return RunOutcome(RunEvent.STOPPED, journal.asked)


def _left_behind(failed: list[StepSnapshot], ending: dict[str, Any]) -> dict[str, Any]:
    first = failed[0]
    why = (first.last_error or {}).get("message", "it did not end")
    others = f", nor {', '.join(fold.step.undoes or '' for fold in failed[1:])}" if len(failed) > 1 else ""
    return {
        "step": first.step.key,
        "type": "CompensationFailed",
        "code": "COMPENSATION_FAILED",
        "message": f"{first.step.undoes} could not be undone: {why}{others}",
        "not_undone": [fold.step.undoes for fold in failed],
    } | ({"because": ending} if ending else {})
