"""The effects that follow from a run's transitions. Pure: `lifecycle/couplings.py` says what follows."""

from collections.abc import Iterable

from interlock.engine.writing.change import CancelChildren, Effect, NotifyParent, WithdrawPending
from interlock.journal import Entry
from interlock.lifecycle import RUN, RunEvent, RunReason, RunState, fired_by

_REFUSED = (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED)


def effects_of(
    entries: Iterable[Entry], reason: RunReason | None, *, has_children: bool, has_parent: bool
) -> tuple[Effect, ...]:
    """Return the effects of the run's own transitions. `reason` says why the run ended, or None if it has not."""
    effects: dict[Effect, None] = {}
    for entry in entries:
        if entry.step is not None or entry.to_state is None or entry.event == "create":
            continue
        event, ended = RunEvent(entry.event or ""), RunState(entry.to_state) in RUN.terminal
        if not ended and event != RunEvent.COMPENSATE:
            continue
        # A run that reached its goal has no open approval: each of its steps is settled.
        is_settled = event == RunEvent.SUCCEED and reason not in _REFUSED
        if fired_by("run", event, "approval") and not is_settled:
            effects[WithdrawPending()] = None
        if fired_by("run", event, "child run") and has_children:
            effects[CancelChildren()] = None
        if fired_by("run", event, "parent step") and has_parent:
            effects[NotifyParent()] = None
    return tuple(effects)
