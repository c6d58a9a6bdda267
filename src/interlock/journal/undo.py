"""Compensation: a run that ends without reaching its goal first undoes what it did, the last thing first.

It is `canceling` meanwhile, whether it was told to stop or failed. What undoes a step is a step itself: it passes the
gate, has its receipt, is tried again, waits for people. One that fails for good does not keep the others from being
undone, and is what the run ends with.
"""

from dataclasses import dataclass
from typing import Any

from interlock.journal.journal import Journal, StepFold
from interlock.lifecycle import STEP, RunEvent, RunReason, StepState


@dataclass(frozen=True, slots=True)
class Settle:
    """The run is at its end."""

    event: RunEvent
    reason: RunReason
    error: dict[str, Any] | None = None


def wind_up(journal: Journal, ending: Settle, *, actor: str) -> Settle | None:
    """How the run ends now, or None if something has to be undone first: the journal then says so.

    Nothing may be in flight any more; what is not settled never will be.
    """
    if ending.event == RunEvent.SUCCEED or not journal.undos or journal.is_undoing:
        return ending
    canceled = ending.event == RunEvent.STOPPED
    undo = [fold.step.undoes for fold in reversed(journal.undos.values())]
    after = {} if canceled else {"reason": ending.reason, "error": ending.error}
    journal.move_run(RunEvent.COMPENSATE, actor=actor, data={"undo": undo, "ending": after})
    return None


def next_undo(journal: Journal) -> StepFold | None:
    return next((fold for fold in journal.compensation if fold.status not in STEP.terminal), None)


def undone(journal: Journal) -> Settle:
    """How the run ends when there is nothing left to undo."""
    ending = journal.ending or {}
    failed = [fold for fold in journal.compensation if fold.status != StepState.SUCCEEDED]
    if failed:
        return Settle(RunEvent.FAIL, RunReason.COMPENSATION_FAILED, _left_behind(failed, ending))
    if ending:
        return Settle(RunEvent.FAIL, RunReason(ending["reason"]), ending["error"])
    return Settle(RunEvent.STOPPED, journal.asked)


def _left_behind(failed: list[StepFold], ending: dict[str, Any]) -> dict[str, Any]:
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
