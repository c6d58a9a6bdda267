"""Run commands: what people, timers and deadlines tell a run, turned into entries.

The command itself writes to the journal if no worker holds the run; otherwise the worker that holds it does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from interlock.definition.plan import OnReject, OnTimeout, StepKind
from interlock.journal.compensation import RunOutcome, begin_compensation
from interlock.journal.entry import EntryType
from interlock.journal.journal import Journal, StepSnapshot
from interlock.journal.output import NO_OUTPUT
from interlock.lifecycle import (
    ApprovalEvent,
    ApprovalState,
    RunEvent,
    RunReason,
    RunState,
    StepEvent,
    StepState,
    Term,
    fires,
)

TIMED_OUT = RunOutcome(RunEvent.FAIL, RunReason.TIMED_OUT, {"type": "TimedOut", "message": "the run's deadline passed"})


class CommandType(Term):
    DECIDE = "decide", "People decided on an approval, or nobody did in time."
    CANCEL = "cancel", "Stop the run."
    EDIT = "edit", "A person changed the action that is to be decided."
    TIME_OUT = "time_out", "The run's deadline passed."
    ARRIVE = "arrive", "The event from outside that a step waits for has come."
    MISS = "miss", "The event from outside that a step waits for did not come in time."
    CHILD_ENDED = "child_ended", "A run that a step waits for came to its end."
    NOTE = "note", "Something to remember that changes nothing: a reminder, an escalation."


@dataclass(frozen=True, slots=True)
class RunCommand:
    command: CommandType
    actor: str
    data: dict[str, Any]
    step: str | None = None
    id: int | None = None


# How steps that have not started are skipped when a rejection completes the run.
_LEFT_UNDONE = {StepState.PENDING: StepEvent.SKIP, StepState.WAITING_APPROVAL: StepEvent.REFUSE}


def apply_command(journal: Journal, word: RunCommand, *, in_flight: bool) -> None:
    _APPLY[word.command](journal, word, in_flight)


def _decide(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    fold = journal.fold_of(word.step or "")
    if fold.status != StepState.WAITING_APPROVAL or fold.approval_id != word.data["approval_id"]:
        return
    word = replace(word, data={**_question(fold), **word.data})
    decision = ApprovalState(word.data["decision"])
    if decision == ApprovalState.APPROVED:
        _allow(journal, fold, word)
        return
    expired = decision == ApprovalState.EXPIRED
    said = word.data.get("reason") or _why_refused(expired=expired, in_doubt=fold.in_doubt)
    reason = RunReason.APPROVAL_EXPIRED if expired else RunReason.REJECTED
    if fold.in_doubt and not expired:
        reason = RunReason.RESUME_FAILED
    error = {"type": "Refused", "message": said}
    if fold.in_doubt:
        error["code"] = "RUN_RESUME_FAILED"
    data = {**word.data, "said": word.data.get("reason"), "reason": reason, "error": error}
    # An in-doubt effect must fail, never be skipped: the effect may exist. A compensation step must fail too, because
    # a skipped one would report the effect as undone.
    fails = journal.plan.on_reject == OnReject.FAIL or fold.in_doubt or fold.step.undoes is not None
    target = StepState.FAILED if fails else StepState.SKIPPED
    fired = StepEvent(fires("approval", ApprovalEvent.EXPIRE if expired else ApprovalEvent.REJECT, "step"))
    journal.move_step(fold, fired, to=target, actor=word.actor, type=EntryType.APPROVAL_RESOLVED, data=data)
    if journal.plan.on_reject == OnReject.COMPLETE and not fails:
        # No other step runs: steps that have not started are skipped, and the run succeeds.
        for other in list(journal.open_steps()):
            event = _LEFT_UNDONE.get(other.status)
            if event is not None and not other.in_doubt:
                why = {"why": f"{fold.step.key} was refused"}
                journal.move_step(other, event, to=StepState.SKIPPED, actor=word.actor, data=why)


def _why_refused(*, expired: bool, in_doubt: bool) -> str:
    if in_doubt:
        found_out = "nobody found out in time" if expired else "nobody could find out"
        return f"{found_out} whether the interrupted effect happened"
    return "nobody decided in time" if expired else "rejected"


def _question(fold: StepSnapshot) -> dict[str, Any]:
    """Return the question and its approvers, for the entry of the decision."""
    asked = (fold.cause or {}).get("approval", {})
    return {"summary": asked.get("action"), "requested_by": asked.get("requested_by")}


def _allow(journal: Journal, fold: StepSnapshot, word: RunCommand) -> None:
    """Pass a gate, schedule a held action again, or resolve an effect in doubt as the person says."""
    resolved: dict[str, Any] = {"actor": word.actor, "type": EntryType.APPROVAL_RESOLVED, "data": word.data}
    if fold.step.kind == StepKind.APPROVAL:
        journal.move_step(fold, StepEvent(fires("approval", ApprovalEvent.APPROVE, "gate")), **resolved)
    elif word.data.get("outcome") == "happened":
        journal.move_step(fold, StepEvent.GRANT, output=word.data.get("output") or NO_OUTPUT, **resolved)
    else:
        journal.move_step(fold, StepEvent(fires("approval", ApprovalEvent.APPROVE, "step")), **resolved)


def _cancel(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    if journal.status == RunState.CANCELING:
        return
    reason = RunReason(word.data["reason_code"])
    has_to_stop = in_flight or bool(journal.undos)
    # A user who talks to an agent sees the run stopping and then stopped, even if no step was in flight.
    passes = has_to_stop or reason == RunReason.INTERRUPTED
    target = RunState.CANCELING if passes else RunState.CANCELED
    data = {k: v for k, v in word.data.items() if k != "reason_code"} | {"asked": reason}
    journal.move_run(RunEvent.CANCEL, to=target, actor=word.actor, reason=reason, data=data)
    if passes and not has_to_stop:
        journal.move_run(RunEvent.STOPPED, actor=word.actor, reason=reason)


def _edit(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    fold = journal.fold_of(word.step or "")
    if fold.status == StepState.WAITING_APPROVAL and fold.approval_id == word.data["approval_id"]:
        journal.note(EntryType.ACTION_EDITED, actor=word.actor, step=word.step, data=word.data)


def _time_out(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    """Time the run out. With steps in flight, the holder interrupts them first and ends the run itself."""
    if not in_flight and begin_compensation(journal, TIMED_OUT, actor=word.actor):
        data = {**word.data, "error": TIMED_OUT.error}
        journal.move_run(RunEvent.FAIL, actor=word.actor, reason=RunReason.TIMED_OUT, data=data)


def _arrive(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    fold = journal.steps[word.step or ""]
    if fold.status == StepState.WAITING_EXTERNAL:
        data = {"event": word.data["event"], "expected_at": (fold.awaits or {}).get("timeout_at")}
        journal.move_step(fold, StepEvent.ARRIVE, actor=word.actor, data=data, output=word.data["payload"])


def _miss(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    fold = journal.steps[word.step or ""]
    event = fold.step.event
    if fold.status != StepState.WAITING_EXTERNAL or event is None or fold.awaits is None:
        return
    if event.on_timeout == OnTimeout.CONTINUE:
        data = {"timed_out": True, "awaits": fold.awaits}
        journal.move_step(fold, StepEvent.ARRIVE, actor=word.actor, data=data, output=NO_OUTPUT)
        return
    message = f"no {fold.awaits['event']} for {fold.awaits['correlation']} came in time"
    data = {
        "error": {"type": "EventTimedOut", "message": message}, "reason": RunReason.EXTERNAL_TIMEOUT,
        "awaits": fold.awaits,
    }  # fmt: skip
    journal.move_step(fold, StepEvent.FAIL, actor=word.actor, data=data)


def _child_ended(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    fold = journal.steps[word.step or ""]
    child = word.data["child"]
    if fold.status != StepState.WAITING_EXTERNAL or fold.child_id != child:
        return
    if word.data["status"] == RunState.SUCCEEDED:
        output = word.data["output"] or NO_OUTPUT
        journal.move_step(fold, StepEvent.ARRIVE, actor=word.actor, data={"child": child}, output=output)
        return
    cause = word.data["error"] or {}
    why = cause.get("message") or word.data["reason"]
    message = f"run {child} of {fold.step.workflow} is {word.data['status']}: {why}"
    error = {"type": "ChildFailed", "message": message, "child": child, "reason": word.data["reason"]}
    data = {"error": error, "reason": RunReason.TERMINAL_ERROR, "child": child}
    journal.move_step(fold, StepEvent.FAIL, actor=word.actor, data=data)


def _note(journal: Journal, word: RunCommand, in_flight: bool) -> None:
    data = {k: v for k, v in word.data.items() if k != "type"}
    journal.note(EntryType(word.data["type"]), actor=word.actor, step=word.step, data=data)


_APPLY: dict[CommandType, Callable[[Journal, RunCommand, bool], None]] = {
    CommandType.DECIDE: _decide,
    CommandType.CANCEL: _cancel,
    CommandType.EDIT: _edit,
    CommandType.TIME_OUT: _time_out,
    CommandType.ARRIVE: _arrive,
    CommandType.MISS: _miss,
    CommandType.CHILD_ENDED: _child_ended,
    CommandType.NOTE: _note,
}
