"""Couplings: an event in one machine that fires an event in another."""

from dataclasses import dataclass

from interlock.lifecycle.approval import ApprovalEvent
from interlock.lifecycle.machine import Term
from interlock.lifecycle.run import RunEvent
from interlock.lifecycle.step import StepEvent
from interlock.lifecycle.worker import WorkerEvent


@dataclass(frozen=True, slots=True)
class Coupling:
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
    Coupling("approval", ApprovalEvent.APPROVE, "step", StepEvent.GRANT, "the step is the approval"),
    Coupling("approval", ApprovalEvent.APPROVE, "step", StepEvent.RELEASE, "the step was held by policy"),
    Coupling("approval", ApprovalEvent.REJECT, "step", StepEvent.REFUSE, "always"),
    Coupling("approval", ApprovalEvent.EXPIRE, "step", StepEvent.REFUSE, "always"),
    Coupling("run", RunEvent.CANCEL, "step", StepEvent.CANCEL, "the step is not settled and the run ended"),
    Coupling("run", RunEvent.COMPENSATE, "step", StepEvent.CANCEL, "the step is not settled and undoes nothing"),
    Coupling("run", RunEvent.STOPPED, "step", StepEvent.CANCEL, "the step is not settled"),
    Coupling("run", RunEvent.FAIL, "step", StepEvent.CANCEL, "the step is not settled"),
    Coupling("run", RunEvent.CANCEL, "approval", ApprovalEvent.CANCEL, "the approval is not decided"),
    Coupling("run", RunEvent.COMPENSATE, "approval", ApprovalEvent.CANCEL, "the approval is not decided"),
    Coupling("run", RunEvent.FAIL, "approval", ApprovalEvent.CANCEL, "the approval is not decided"),
    Coupling("run", RunEvent.CANCEL, "run", RunEvent.CANCEL, "it ended, and a run that it started has not"),
    Coupling("run", RunEvent.COMPENSATE, "run", RunEvent.CANCEL, "a run that it started has not ended"),
    Coupling("run", RunEvent.STOPPED, "run", RunEvent.CANCEL, "a run that it started has not ended"),
    Coupling("run", RunEvent.FAIL, "run", RunEvent.CANCEL, "a run that it started has not ended"),
    Coupling("worker", WorkerEvent.TERMINATE, "step", StepEvent.RECLAIM, "the worker held its run"),
    Coupling("worker", WorkerEvent.FAIL, "step", StepEvent.RECLAIM, "the worker held its run"),
)


def fired_by(machine: str, event: Term, target: str) -> tuple[Term, ...]:
    return tuple(c.with_event for c in COUPLINGS if c.machine == machine and c.event == event and c.fires == target)
