"""Words: what people, timers and deadlines say to a run, turned into entries.

Whoever may write to the journal applies them: the command itself if nobody holds the run, else the worker that does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interlock.definition.plan import OnReject, OnTimeout, StepKind
from interlock.journal.entry import EntryType
from interlock.journal.journal import Journal, StepFold
from interlock.journal.output import NO_OUTPUT
from interlock.journal.undo import Settle, wind_up
from interlock.lifecycle import (
    ApprovalState,
    RunEvent,
    RunReason,
    RunState,
    StepEvent,
    StepState,
    Term,
)

TIMED_OUT = Settle(RunEvent.FAIL, RunReason.TIMED_OUT, {"type": "TimedOut", "message": "the run's deadline passed"})


class Command(Term):
    DECIDE = "decide", "People decided on an approval, or nobody did in time."
    CANCEL = "cancel", "Stop the run."
    EDIT = "edit", "A person changed the action that is to be decided."
    TIME_OUT = "time_out", "The run's deadline passed."
    ARRIVE = "arrive", "The event from outside that a step waits for has come."
    MISS = "miss", "The event from outside that a step waits for did not come in time."
    CHILD_ENDED = "child_ended", "A run that a step waits for came to its end."
    NOTE = "note", "Something to remember that changes nothing: a reminder, an escalation."


@dataclass(frozen=True, slots=True)
class Word:
    command: Command
    actor: str
    data: dict[str, Any]
    step: str | None = None
    id: int | None = None


# What has not begun when a run is told to leave it at that, and how it is skipped.
_LEFT_UNDONE = {StepState.PENDING: StepEvent.SKIP, StepState.WAITING_APPROVAL: StepEvent.REFUSE}


def apply_word(journal: Journal, word: Word, *, in_flight: bool) -> None:
    _APPLY[word.command](journal, word, in_flight)


def _decide(journal: Journal, word: Word, in_flight: bool) -> None:
    fold = journal.fold_of(word.step or "")
    if fold.status != StepState.WAITING_APPROVAL or fold.approval_id != word.data["approval_id"]:
        return
    decision = ApprovalState(word.data["decision"])
    if decision == ApprovalState.APPROVED:
        _allow(journal, fold, word)
        return
    expired = decision == ApprovalState.EXPIRED
    said = word.data.get("reason") or ("nobody decided in time" if expired else "rejected")
    reason = RunReason.APPROVAL_EXPIRED if expired else RunReason.REJECTED
    if fold.in_doubt and not expired:
        reason = RunReason.RESUME_FAILED
    error = {"type": "Refused", "message": said}
    if reason == RunReason.RESUME_FAILED:
        error["code"] = "RUN_RESUME_FAILED"
    data = {**word.data, "said": word.data.get("reason"), "reason": reason, "error": error}
    # Going on as if it had not happened is not a choice that anybody has: it may have. Nor is a step that nobody may
    # undo as good as one that is undone.
    fails = journal.plan.on_reject == OnReject.FAIL or fold.in_doubt or fold.step.undoes is not None
    target = StepState.FAILED if fails else StepState.SKIPPED
    journal.move_step(fold, StepEvent.REFUSE, to=target, actor=word.actor, type=EntryType.APPROVAL_RESOLVED, data=data)
    if journal.plan.on_reject == OnReject.COMPLETE and not fails:
        # Nothing else is applied: what has not begun is skipped, and the run ends well.
        for other in list(journal.open_steps()):
            event = _LEFT_UNDONE.get(other.status)
            if event is not None and not other.in_doubt:
                why = {"why": f"{fold.step.key} was refused"}
                journal.move_step(other, event, to=StepState.SKIPPED, actor=word.actor, data=why)


def _allow(journal: Journal, fold: StepFold, word: Word) -> None:
    """A gate is passed; a held action is scheduled again; an effect in doubt is what the person says it is."""
    resolved: dict[str, Any] = {"actor": word.actor, "type": EntryType.APPROVAL_RESOLVED, "data": word.data}
    if fold.step.kind == StepKind.APPROVAL:
        journal.move_step(fold, StepEvent.GRANT, **resolved)
    elif word.data.get("outcome") == "happened":
        journal.move_step(fold, StepEvent.GRANT, output=word.data.get("output") or NO_OUTPUT, **resolved)
    else:
        journal.move_step(fold, StepEvent.RELEASE, **resolved)


def _cancel(journal: Journal, word: Word, in_flight: bool) -> None:
    if journal.status == RunState.CANCELING:
        return
    reason = RunReason(word.data["reason_code"])
    has_to_stop = in_flight or bool(journal.undos)
    # Whoever talks to an agent sees it stopping and then stopped, also if nothing was under way.
    passes = has_to_stop or reason == RunReason.INTERRUPTED
    target = RunState.CANCELING if passes else RunState.CANCELED
    data = {k: v for k, v in word.data.items() if k != "reason_code"} | {"asked": reason}
    journal.move_run(RunEvent.CANCEL, to=target, actor=word.actor, reason=reason, data=data)
    if passes and not has_to_stop:
        journal.move_run(RunEvent.STOPPED, actor=word.actor, reason=reason)


def _edit(journal: Journal, word: Word, in_flight: bool) -> None:
    fold = journal.fold_of(word.step or "")
    if fold.status == StepState.WAITING_APPROVAL and fold.approval_id == word.data["approval_id"]:
        journal.note(EntryType.ACTION_EDITED, actor=word.actor, step=word.step, data=word.data)


def _time_out(journal: Journal, word: Word, in_flight: bool) -> None:
    """With steps in flight the holder interrupts them first and ends the run itself."""
    if not in_flight and wind_up(journal, TIMED_OUT, actor=word.actor):
        journal.move_run(RunEvent.FAIL, actor=word.actor, reason=RunReason.TIMED_OUT, data=word.data)


def _arrive(journal: Journal, word: Word, in_flight: bool) -> None:
    fold = journal.steps[word.step or ""]
    if fold.status == StepState.WAITING_EXTERNAL:
        journal.move_step(
            fold, StepEvent.ARRIVE, actor=word.actor, data={"event": word.data["event"]}, output=word.data["payload"]
        )


def _miss(journal: Journal, word: Word, in_flight: bool) -> None:
    fold = journal.steps[word.step or ""]
    event = fold.step.event
    if fold.status != StepState.WAITING_EXTERNAL or event is None or fold.awaits is None:
        return
    if event.on_timeout == OnTimeout.CONTINUE:
        journal.move_step(fold, StepEvent.ARRIVE, actor=word.actor, data={"timed_out": True}, output=NO_OUTPUT)
        return
    message = f"no {fold.awaits['event']} for {fold.awaits['correlation']} came in time"
    data = {"error": {"type": "EventTimedOut", "message": message}, "reason": RunReason.EXTERNAL_TIMEOUT}
    journal.move_step(fold, StepEvent.FAIL, actor=word.actor, data=data)


def _child_ended(journal: Journal, word: Word, in_flight: bool) -> None:
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
    data = {"error": error, "reason": RunReason.TERMINAL_ERROR}
    journal.move_step(fold, StepEvent.FAIL, actor=word.actor, data=data)


def _note(journal: Journal, word: Word, in_flight: bool) -> None:
    data = {k: v for k, v in word.data.items() if k != "type"}
    journal.note(EntryType(word.data["type"]), actor=word.actor, step=word.step, data=data)


_APPLY: dict[Command, Callable[[Journal, Word, bool], None]] = {
    Command.DECIDE: _decide,
    Command.CANCEL: _cancel,
    Command.EDIT: _edit,
    Command.TIME_OUT: _time_out,
    Command.ARRIVE: _arrive,
    Command.MISS: _miss,
    Command.CHILD_ENDED: _child_ended,
    Command.NOTE: _note,
}
