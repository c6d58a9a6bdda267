"""Couplings: an event in one machine that fires an event in another.

Code asks this table what follows from an event; nothing else says it. A row without code, or code without a row, fails
a test.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from interlock.lifecycle.approval import ApprovalEvent
from interlock.lifecycle.machine import Term
from interlock.lifecycle.run import RunEvent
from interlock.lifecycle.step import StepEvent
from interlock.lifecycle.worker import WorkerEvent


@dataclass(frozen=True, slots=True)
class Coupling:
    """`fires` is the machine that moves: the same run's, a child run's, or the waiting step of a parent run."""

    machine: str
    event: Term
    fires: str
    with_event: Term
    when: str


COUPLINGS: tuple[Coupling, ...] = (
    Coupling("step", StepEvent.CLAIM, "run", RunEvent.START, "the run is pending"),
    Coupling("step", StepEvent.OPEN, "run", RunEvent.HOLD, "no other step can move"),
    Coupling("step", StepEvent.HOLD, "run", RunEvent.HOLD, "no other step can move"),
    Coupling("step", StepEvent.PARK, "run", RunEvent.PARK, "no other step can move"),
    Coupling("step", StepEvent.FAIL, "run", RunEvent.FAIL, "its flow, if it has one, does not catch it"),
    Coupling("step", StepEvent.SUCCEED, "run", RunEvent.SUCCEED, "it was the last step"),
    Coupling("approval", ApprovalEvent.APPROVE, "gate", StepEvent.GRANT, "the step is the approval"),
    Coupling("approval", ApprovalEvent.APPROVE, "step", StepEvent.RELEASE, "the step was held by policy"),
    Coupling("approval", ApprovalEvent.REJECT, "step", StepEvent.REFUSE, "always"),
    Coupling("approval", ApprovalEvent.EXPIRE, "step", StepEvent.REFUSE, "always"),
    Coupling("run", RunEvent.CANCEL, "step", StepEvent.CANCEL, "the step is not settled and the run ended"),
    Coupling("run", RunEvent.COMPENSATE, "step", StepEvent.CANCEL, "the step is not settled and undoes nothing"),
    Coupling("run", RunEvent.STOPPED, "step", StepEvent.CANCEL, "the step is not settled"),
    Coupling("run", RunEvent.FAIL, "step", StepEvent.CANCEL, "the step is not settled"),
    Coupling("run", RunEvent.CANCEL, "approval", ApprovalEvent.CANCEL, "the approval is not decided and the run ended"),
    Coupling("run", RunEvent.COMPENSATE, "approval", ApprovalEvent.CANCEL, "the approval is not decided"),
    Coupling("run", RunEvent.STOPPED, "approval", ApprovalEvent.CANCEL, "the approval is not decided"),
    Coupling("run", RunEvent.FAIL, "approval", ApprovalEvent.CANCEL, "the approval is not decided"),
    Coupling("run", RunEvent.SUCCEED, "approval", ApprovalEvent.CANCEL, "another approval of the run was refused"),
    Coupling("run", RunEvent.CANCEL, "child run", RunEvent.CANCEL, "the run ended, and the child has not"),
    Coupling("run", RunEvent.COMPENSATE, "child run", RunEvent.CANCEL, "the child has not ended"),
    Coupling("run", RunEvent.STOPPED, "child run", RunEvent.CANCEL, "the child has not ended"),
    Coupling("run", RunEvent.FAIL, "child run", RunEvent.CANCEL, "the child has not ended"),
    Coupling("run", RunEvent.SUCCEED, "child run", RunEvent.CANCEL, "the child has not ended"),
    Coupling("run", RunEvent.SUCCEED, "parent step", StepEvent.ARRIVE, "a step of another run waits for it"),
    Coupling("run", RunEvent.FAIL, "parent step", StepEvent.FAIL, "a step of another run waits for it"),
    Coupling("run", RunEvent.CANCEL, "parent step", StepEvent.FAIL, "it ended, and a step of another run waits for it"),
    Coupling("run", RunEvent.STOPPED, "parent step", StepEvent.FAIL, "a step of another run waits for it"),
    Coupling("worker", WorkerEvent.TERMINATE, "step", StepEvent.RECLAIM, "the worker held its run"),
    Coupling("worker", WorkerEvent.FAIL, "step", StepEvent.RECLAIM, "the worker held its run"),
)

_FIRED: dict[tuple[str, Term, str], Term] = {}


def _index(rows: tuple[Coupling, ...]) -> None:
    _FIRED.clear()
    _FIRED.update({(row.machine, row.event, row.fires): row.with_event for row in rows})


_index(COUPLINGS)


def fired_by(machine: str, event: Term, target: str) -> Term | None:
    """Return the event that this event fires in the target machine, or None."""
    return _FIRED.get((machine, event, target))


def fires(machine: str, event: Term, target: str) -> Term:
    """Return the event that this event fires in the target machine, where the code relies on one."""
    if (fired := fired_by(machine, event, target)) is None:
        raise LookupError(f"no coupling says what {machine} {event} fires in a {target}")
    return fired


@contextmanager
def without(row: Coupling) -> Iterator[None]:
    """Take one row out of the table, for tests that want to see what depends on it."""
    _index(tuple(other for other in COUPLINGS if other != row))
    try:
        yield
    finally:
        _index(COUPLINGS)
