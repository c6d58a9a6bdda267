"""Lease release: the run waits, goes back to the queue, or ended."""

from dataclasses import dataclass
from datetime import datetime

from interlock.journal.advance import ENGINE, Suspend
from interlock.journal.compensation import RunOutcome
from interlock.journal.entry import Entry
from interlock.journal.journal import Journal, encode
from interlock.lifecycle import RunEvent, RunReason, RunState

_WAITS = {RunState.WAITING_APPROVAL: RunEvent.HOLD, RunState.WAITING_EXTERNAL: RunEvent.PARK}


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """The new values of the run's row, and the entry that records them. `queue`: it can be claimed again at once."""

    status: RunState
    entry: Entry | None = None
    reason: RunReason | None = None
    result: str | None = None
    error: str | None = None
    wake_at: datetime | None = None
    queue: bool = False


def release_for(journal: Journal, then: Suspend | RunOutcome, *, actor: str = ENGINE) -> LeaseRelease:
    match then:
        case Suspend(status, wake_at):
            if status == journal.status or status not in _WAITS:
                return LeaseRelease(journal.status, wake_at=wake_at)
            return LeaseRelease(status, journal.draft_move(_WAITS[status], actor=actor), wake_at=wake_at)
        case RunOutcome(event, reason, error):
            entry = journal.draft_move(event, actor=actor, reason=reason, data={"error": error} if error else None)
            status = RunState(entry.to_state or "")
            result = journal.result() if status == RunState.SUCCEEDED else None
            return LeaseRelease(status, entry, reason, result, encode(error) if error else None)


def final_release(journal: Journal) -> LeaseRelease:
    """Return the release of a run whose last entry already ended it."""
    error = next((e.data.get("error") for e in reversed(journal.unsaved) if e.step is None and e.data), None)
    return LeaseRelease(journal.status, reason=journal.reason, error=encode(error) if error else None)


def requeue(journal: Journal, *, actor: str = ENGINE) -> LeaseRelease:
    """Return the release of a run that has steps to start: it goes back to the queue."""
    if journal.status in (RunState.WAITING_APPROVAL, RunState.WAITING_EXTERNAL):
        return LeaseRelease(RunState.RUNNING, journal.draft_move(RunEvent.RESUME, actor=actor), queue=True)
    return LeaseRelease(journal.status, queue=True)
