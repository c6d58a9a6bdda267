"""Lease release: the run waits, goes back to the queue, or ended."""

from dataclasses import dataclass
from datetime import datetime

from interlock.definition.plan import StepKind
from interlock.journal.advance import ENGINE, Suspend
from interlock.journal.compensation import RunOutcome
from interlock.journal.entry import Entry
from interlock.journal.journal import Journal, encode
from interlock.lifecycle import RunEvent, RunReason, RunState, StepEvent, fires


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """The new values of the run's row, and the entry that records them. `queue`: it can be claimed again at once.

    `awaits_flow`: the flow, with its version, that this worker lacks.
    """

    status: RunState
    entry: Entry | None = None
    reason: RunReason | None = None
    result: str | None = None
    error: str | None = None
    resume_at: datetime | None = None
    queue: bool = False
    awaits_flow: str | None = None


def release_for(journal: Journal, then: Suspend | RunOutcome, *, actor: str = ENGINE) -> LeaseRelease:
    match then:
        case Suspend(status, resume_at):
            event = _wait_event(journal, status)
            if status == journal.status or event is None:
                return LeaseRelease(journal.status, resume_at=resume_at)
            return LeaseRelease(status, journal.draft_move(event, actor=actor), resume_at=resume_at)
        case RunOutcome(event, reason, error):
            entry = journal.draft_move(event, actor=actor, reason=reason, data={"error": error} if error else None)
            status = RunState(entry.to_state or "")
            result = journal.result() if status == RunState.SUCCEEDED else None
            return LeaseRelease(status, entry, reason, result, encode(error) if error else None)


def _wait_event(journal: Journal, status: RunState) -> RunEvent | None:
    """Return the run's event when its steps begin to wait, or None if it waits for the time of a retry."""
    waiting = next((step for step in journal.open_steps() if str(step.status) == str(status)), None)
    if waiting is None:
        return None
    if status == RunState.WAITING_EXTERNAL:
        return RunEvent(fires("step", StepEvent.PARK, "run"))
    is_gate = waiting.step.kind is StepKind.APPROVAL
    return RunEvent(fires("step", StepEvent.OPEN if is_gate else StepEvent.HOLD, "run"))


def final_release(journal: Journal) -> LeaseRelease:
    """Return the release of a run whose last entry already ended it."""
    error = next((e.data.get("error") for e in reversed(journal.unsaved) if e.step is None and e.data), None)
    return LeaseRelease(journal.status, reason=journal.reason, error=encode(error) if error else None)


def requeue(journal: Journal, *, actor: str = ENGINE) -> LeaseRelease:
    """Return the release of a run that has steps to start: it goes back to the queue."""
    if journal.status in (RunState.WAITING_APPROVAL, RunState.WAITING_EXTERNAL):
        return LeaseRelease(RunState.RUNNING, journal.draft_move(RunEvent.RESUME, actor=actor), queue=True)
    return LeaseRelease(journal.status, queue=True)
