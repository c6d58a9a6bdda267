"""Advance: given the fold, make every move that needs no tool, and return what to do next.

Workers and run commands share this function, so an approval moves a run exactly as a worker would.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import orjson

from interlock.definition.duration import parse_duration
from interlock.definition.expression import Elsewhere, Template
from interlock.definition.plan import OnReject, StepKind
from interlock.journal.agent_loop import plan_agent_steps
from interlock.journal.approval_request import ApprovalKind, ApprovalRequest, request_approval
from interlock.journal.compensation import RunOutcome, begin_compensation, compensation_outcome, next_undo
from interlock.journal.journal import Journal, StepSnapshot, encode
from interlock.lifecycle import SETTLED_WELL, RunEvent, RunReason, RunState, StepEvent, StepState, fires

ENGINE = "system:engine"


@dataclass(frozen=True, slots=True)
class Suspend:
    """Nothing can move now. The run gives its lease back; `resume_at` is when time alone moves it."""

    status: RunState
    resume_at: datetime | None


@dataclass(frozen=True, slots=True)
class EventSubscription:
    """A step's subscription to an external event, from now on. The event may have arrived already."""

    step: str
    type: str
    correlation: str
    timeout_at: datetime | None


@dataclass(frozen=True, slots=True)
class InterruptInFlight:
    """In-flight steps have to be interrupted before the run can end."""

    ending: RunOutcome | None


@dataclass(slots=True)
class NextActions:
    start: list[StepSnapshot] = field(default_factory=list)
    # Started according to the journal; the run's current holder has them in flight or must start them again.
    resume: list[StepSnapshot] = field(default_factory=list)
    approvals: list[ApprovalRequest] = field(default_factory=list)
    subscriptions: list[EventSubscription] = field(default_factory=list)
    # Expressions that take too long here. The caller evaluates them and advances again; nothing else is decided before.
    elsewhere: list[Elsewhere] = field(default_factory=list)
    # None: steps are ready to start or are in flight.
    then: Suspend | RunOutcome | InterruptInFlight | None = None


def advance(journal: Journal, now: datetime) -> NextActions:
    """Skip, open and park every step that can be; the entries are in `journal.unsaved` afterwards."""
    found = NextActions()
    if journal.status == RunState.CANCELING:
        found.then = _stop(journal, found, now)
        return found
    while journal.end is None:
        if journal.plan.agent is not None:
            plan_agent_steps(journal, journal.plan.agent)
        before = journal.seq
        found.start = [fold for fold in _reachable(journal) if _take(journal, fold, now, found)]
        # A skip, an arrival or a failure may have made other steps reachable.
        if journal.seq == before or found.elsewhere:
            break
    if found.elsewhere:
        found.start.clear()
        return found
    found.then = _verdict(journal, found, now)
    return found


def _reachable(journal: Journal) -> Iterator[StepSnapshot]:
    for fold in journal.open_steps():
        if all(journal.steps[key].status in SETTLED_WELL for key in fold.step.after):
            yield fold
        if journal.plan.is_sequence and fold.status not in SETTLED_WELL:
            return


def _take(journal: Journal, fold: StepSnapshot, now: datetime, found: NextActions) -> bool:
    """Make the moves that need no tool. Return True if a worker must start the step now."""
    try:
        return _taken(journal, fold, now, found)
    except Elsewhere as asked:  # expressions come first, so nothing was changed yet
        found.elsewhere.append(asked)
        return False


def _taken(journal: Journal, fold: StepSnapshot, now: datetime, found: NextActions) -> bool:
    step = fold.step
    if fold.status == StepState.WAITING_EXTERNAL and fold.due_at is not None and fold.due_at <= now:
        journal.move_step(fold, StepEvent.ARRIVE, actor="system:timer", data={"due_at": fold.due_at})
        return False
    if fold.status != StepState.PENDING or (fold.attempt == 0 and not _is_wanted(journal, fold)):
        return False
    match step.kind:
        case StepKind.TOOL | StepKind.FLOW | StepKind.MODEL:
            return fold.next_run_at is None or fold.next_run_at <= now
        case StepKind.APPROVAL:
            _open(journal, fold, found)
        case StepKind.WAIT:
            _park(journal, fold, now, found)
    return False


def _is_wanted(journal: Journal, fold: StepSnapshot) -> bool:
    """Return True if the condition holds and no needed step was skipped. An invalid condition fails the step."""
    if any(journal.steps[key].status == StepState.SKIPPED for key in fold.step.needs):
        journal.move_step(fold, StepEvent.SKIP, actor=ENGINE, data={"why": "what it needs was skipped"})
        return False
    if fold.step.when is None:
        return True
    try:
        wanted = fold.step.when.evaluate(journal.scope)
        if not isinstance(wanted, bool):
            raise ValueError(f"`{fold.step.when.source}` gave {wanted!r}; a condition must give true or false")
    except ValueError as error:
        _fail(journal, fold, error)
        return False
    if not wanted:
        journal.move_step(fold, StepEvent.SKIP, actor=ENGINE, data={"why": f"`{fold.step.when.source}` is false"})
    return wanted


def _open(journal: Journal, fold: StepSnapshot, found: NextActions) -> None:
    gate = fold.step.gate
    assert gate is not None
    try:
        summary = gate.summary.render(journal.scope)
    except ValueError as error:
        _fail(journal, fold, error)
        return
    fields = {"workflow": journal.plan.name, "step": fold.step.key, "summary": summary}
    action = {
        "tool": None,
        "connector": "workflow",
        "operation": "approve",
        "target": journal.plan.name,
        "fields": fields,
    }
    digest = sha256(orjson.dumps([str(journal.run_id), action], option=orjson.OPT_SORT_KEYS)).hexdigest()
    found.approvals.append(
        request_approval(
            journal, fold, StepEvent.OPEN, ApprovalKind.GATE, tier=gate.tier, two_person=gate.two_person,
            expires_in=gate.expires_in, summary=str(summary or fold.step.key), action=action, digest=digest,
        )
    )  # fmt: skip


def _park(journal: Journal, fold: StepSnapshot, now: datetime, found: NextActions) -> None:
    try:
        if fold.step.event is not None:
            data = _await(journal, fold, now, found)
        else:
            assert fold.step.duration is not None
            data = {"due_at": now + _span(fold.step.duration, journal)}
    except (ValueError, TypeError, OverflowError) as error:
        _fail(journal, fold, error)
        return
    journal.move_step(fold, StepEvent.PARK, actor=ENGINE, data=data)


def _await(journal: Journal, fold: StepSnapshot, now: datetime, found: NextActions) -> dict[str, Any]:
    """Subscribe to the event. The run has no timer for the time-out: the event or the time-out ends the wait, once."""
    event = fold.step.event
    assert event is not None
    about = event.correlation.render(journal.scope)
    about = encode(about) if isinstance(about, int | float) and not isinstance(about, bool) else about
    if not isinstance(about, str) or not 0 < len(about) <= 500:
        raise ValueError(f"the correlation is {about!r}; it must be a number or a text of 1 to 500 characters")
    timeout_at = now + _span(event.timeout, journal) if event.timeout is not None else None
    found.subscriptions.append(EventSubscription(fold.step.key, event.type, about, timeout_at))
    until = timeout_at.isoformat() if timeout_at is not None else None
    return {"awaits": {"event": event.type, "correlation": about, "timeout_at": until}}


def _span(template: Template, journal: Journal) -> timedelta:
    return timedelta(seconds=parse_duration(template.render(journal.scope)))


def _fail(journal: Journal, fold: StepSnapshot, error: Exception) -> None:
    journal.begin(fold)
    data = {"error": {"type": type(error).__name__, "message": str(error)}, "reason": RunReason.TERMINAL_ERROR}
    journal.move_step(fold, StepEvent.FAIL, actor=ENGINE, data=data)


def _verdict(journal: Journal, found: NextActions, now: datetime) -> Suspend | RunOutcome | InterruptInFlight | None:
    unsettled = list(journal.open_steps())
    running = found.resume = [fold for fold in unsettled if fold.status == StepState.RUNNING]
    ending = _ending(journal)
    if ending is not None:
        found.start.clear()
        if running:
            return InterruptInFlight(ending)
        return begin_compensation(journal, ending, actor=ENGINE) or _undo(journal, found, now)
    if not unsettled and journal.plan.is_dynamic:
        return None  # the agent's or the flow's code decides what comes next
    if not unsettled:
        refused = any(
            fold.reason in (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED) for fold in journal.steps.values()
        )
        completes = refused and journal.plan.on_reject == OnReject.COMPLETE
        event = RunEvent(fires("step", StepEvent.SUCCEED, "run"))
        return RunOutcome(event, RunReason.REJECTED if completes else RunReason.COMPLETED)
    if found.start or running:
        return None
    return _waiting(unsettled)


def _ending(journal: Journal) -> RunOutcome | None:
    """Return the outcome if a step failed for good or the flow ended."""
    failed, end = journal.failed, journal.end
    if failed is not None:
        reason = RunReason(failed.reason or RunReason.TERMINAL_ERROR)
        event = RunEvent(fires("step", StepEvent.FAIL, "run"))
        return RunOutcome(event, reason, {"step": failed.step.key, **(failed.last_error or {})})
    if end is not None:
        return RunOutcome(RunEvent.SUCCEED if end.error is None else RunEvent.FAIL, end.reason, end.error)
    return None


def _stop(journal: Journal, found: NextActions, now: datetime) -> Suspend | RunOutcome | InterruptInFlight | None:
    if journal.is_undoing:
        return _undo(journal, found, now)
    if not journal.undos or any(fold.status == StepState.RUNNING for fold in journal.open_steps()):
        return InterruptInFlight(None)
    begin_compensation(journal, RunOutcome(RunEvent.STOPPED, journal.asked), actor=ENGINE)
    return _undo(journal, found, now)


def _undo(journal: Journal, found: NextActions, now: datetime) -> Suspend | RunOutcome | None:
    """Compensate one step at a time, last first: a later step may build on an earlier one."""
    fold = next_undo(journal)
    if fold is None:
        return compensation_outcome(journal)
    if fold.status == StepState.RUNNING:
        found.resume = [fold]
        return None
    if fold.status == StepState.PENDING and (fold.next_run_at is None or fold.next_run_at <= now):
        found.start = [fold]
        return None
    return Suspend(journal.status, fold.next_run_at)


def _waiting(unsettled: list[StepSnapshot]) -> Suspend:
    times = [at for fold in unsettled for at in (fold.next_run_at, fold.due_at) if at is not None]
    states = {fold.status for fold in unsettled}
    if any(fold.next_run_at is not None for fold in unsettled):
        status = RunState.RUNNING
    elif StepState.WAITING_APPROVAL in states:
        status = RunState.WAITING_APPROVAL
    else:
        status = RunState.WAITING_EXTERNAL
    return Suspend(status, min(times, default=None))
