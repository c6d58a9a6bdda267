"""How a run leaves its writer's hands: it waits, it goes back to the queue, or it ended."""

from dataclasses import dataclass
from datetime import datetime

from interlock.journal.advance import ENGINE, Wait
from interlock.journal.entry import Entry
from interlock.journal.journal import Journal, encode
from interlock.journal.undo import Settle
from interlock.lifecycle import RunEvent, RunReason, RunState

_WAITS = {RunState.WAITING_APPROVAL: RunEvent.HOLD, RunState.WAITING_EXTERNAL: RunEvent.PARK}


@dataclass(frozen=True, slots=True)
class Leave:
    """What the run's row says from now on, and the entry that says so. `queue`: it can be claimed again at once."""

    status: RunState
    entry: Entry | None = None
    reason: RunReason | None = None
    result: str | None = None
    error: str | None = None
    wake_at: datetime | None = None
    queue: bool = False


def conclude(journal: Journal, then: Wait | Settle, *, actor: str = ENGINE) -> Leave:
    match then:
        case Wait(status, wake_at):
            if status == journal.status or status not in _WAITS:
                return Leave(journal.status, wake_at=wake_at)
            return Leave(status, journal.draft_move(_WAITS[status], actor=actor), wake_at=wake_at)
        case Settle(event, reason, error):
            entry = journal.draft_move(event, actor=actor, reason=reason, data={"error": error} if error else None)
            status = RunState(entry.to_state or "")
            result = journal.result() if status == RunState.SUCCEEDED else None
            return Leave(status, entry, reason, result, encode(error) if error else None)


def ended(journal: Journal) -> Leave:
    """The leave of a run whose last entry ended it already."""
    return Leave(journal.status, reason=journal.reason)


def go_on(journal: Journal, *, actor: str = ENGINE) -> Leave:
    """There is something to start: the run belongs in the queue."""
    if journal.status in (RunState.WAITING_APPROVAL, RunState.WAITING_EXTERNAL):
        return Leave(RunState.RUNNING, journal.draft_move(RunEvent.RESUME, actor=actor), queue=True)
    return Leave(journal.status, queue=True)
