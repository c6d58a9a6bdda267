"""The journal of one run: the fold of plan and entries, and the one way to add an entry.

`record` is the door: it asks the lifecycle table whether the transition exists, numbers the entry, applies it and
keeps it as unsaved until its writer has committed it. Replaying the same entries gives the same state, always.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.expression import Scope
from interlock.definition.flow import declared_step
from interlock.definition.plan import Plan, Step
from interlock.journal.entry import Entry, EntryType
from interlock.journal.output import NO_OUTPUT, read_back
from interlock.lifecycle import (
    RUN,
    STEP,
    RunEvent,
    RunReason,
    RunState,
    StepEvent,
    StepState,
    fired_by,
)

# What a flow cannot catch: it was forbidden, or what became of it is not known.
FATAL = frozenset(
    {RunReason.POLICY_DENIED, RunReason.CAP_EXCEEDED, RunReason.ORPHANED, RunReason.RESUME_FAILED, RunReason.TIMED_OUT}
)


@dataclass(frozen=True, slots=True)
class FlowEnd:
    """A flow came to its end: it returned, or it raised. Only whoever has its code can tell. An agent ends likewise."""

    result: str = NO_OUTPUT
    reason: RunReason = RunReason.COMPLETED
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class StepFold:
    """What is known of one step."""

    step: Step
    status: StepState = StepState.PENDING
    attempt: int = 0
    failures: int = 0
    reclaims: int = 0
    output: str | None = None
    last_error: dict[str, Any] | None = None
    reason: str | None = None
    next_run_at: datetime | None = None
    due_at: datetime | None = None
    # The event from outside that it waits for: type, correlation and, if it has one, the time-out.
    awaits: dict[str, Any] | None = None
    approval_id: str | None = None
    # What people were asked about and, once they said yes, what they allowed: one exact action.
    asked_digest: str | None = None
    allowed_digest: str | None = None
    asked_policy: str | None = None
    allowed_policy: str | None = None
    # What was asked of whoever says yes: tier, two_person, approvers, reason_required.
    asked_demand: dict[str, Any] | None = None
    allowed_demand: dict[str, Any] | None = None
    receipt_id: str | None = None
    # The action that its last intent declared.
    declared_digest: str | None = None
    # Of a step that was carried over: the receipt of the run that did it.
    carried_receipt_id: str | None = None
    # Of a step that was answered with what another run had done: that run, and its receipt.
    replayed: dict[str, str] | None = None
    # What a person put in place of the workflow's input, field by field.
    edited: dict[str, Any] | None = None
    cost_usd: float = 0.0
    # What its models took and gave, if it said so.
    tokens: dict[str, int] | None = None
    idempotency_key: str | None = None
    # Whether it may be done again after a crash. A write says so with its intent; reading is harmless.
    idempotent: bool = True
    duration_ms: float | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    # The run that this step waits for.
    child_id: str | None = None
    # Of a flow's step: what its first entry has to say about it, until it has been said.
    undeclared: dict[str, Any] | None = None

    def input(self, scope: Scope, secrets: Mapping[str, str] | None = None) -> Any:
        """What the tool is called with; secrets show their names until their values are handed in."""
        rendered = self.step.input.render(scope, secrets)
        return rendered if self.edited is None else {**(rendered or {}), **self.edited}

    @property
    def secrets(self) -> Mapping[str, tuple[str, ...]]:
        """The secrets that the input asks for, by field."""
        asked = self.step.input.secrets
        return {name: asked[name] for name in asked if name not in self.edited} if asked and self.edited else asked

    @property
    def in_doubt(self) -> bool:
        """People are asked whether an effect happened: the question is about its receipt, not about an action."""
        return self.receipt_id is not None and self.asked_digest == self.receipt_id


class Journal:
    __slots__ = (
        "_first_open",
        "_in_order",
        "asked",
        "end",
        "ending",
        "failed",
        "moves",
        "plan",
        "reason",
        "run_id",
        "scope",
        "seq",
        "status",
        "steps",
        "undos",
        "unsaved",
        "values",
    )

    def __init__(self, run_id: UUID, plan: Plan, *, input: Any, trigger: Any, run: dict[str, Any]) -> None:
        self.run_id = run_id
        self.plan = plan
        self.status = RUN.initial
        self.reason: RunReason | None = None
        self.asked = RunReason.CANCELED_BY_USER
        self.failed: StepFold | None = None
        # How it is to end once all is undone: a reason and an error, or nothing in particular after a cancel.
        self.ending: dict[str, Any] | None = None
        self.seq = 0
        # From state to state, since it was created.
        self.moves: list[Entry] = []
        self.steps = {step.key: StepFold(step) for step in plan.steps}
        # What would have to be undone, in the order it was done.
        self.undos: dict[str, StepFold] = {}
        self.scope = Scope(input, trigger, run)
        self.unsaved: list[Entry] = []
        # Of a flow: how it ended, and what it was told by place when it asked for something that changes.
        self.end: FlowEnd | None = None
        self.values: dict[str, tuple[str, Any]] = {}
        self._first_open = 0
        self._in_order = list(self.steps.values())

    # ------------------------------------------------------------ writing

    def create(self, *, actor: str, data: dict[str, Any]) -> Entry:
        return self.add(
            Entry(self.seq + 1, EntryType.RUN_CREATED, actor, event="create", to_state=RUN.initial, data=data)
        )

    def move_run(
        self,
        event: RunEvent,
        *,
        actor: str,
        to: RunState | None = None,
        reason: RunReason | None = None,
        data: dict[str, Any] | None = None,
    ) -> Entry:
        return self.add(self.draft_move(event, actor=actor, to=to, reason=reason, data=data))

    def draft_move(
        self,
        event: RunEvent,
        *,
        actor: str,
        to: RunState | None = None,
        reason: RunReason | None = None,
        data: dict[str, Any] | None = None,
    ) -> Entry:
        """The entry that would be next. A holder that wants to let go may still be told that there is mail."""
        target = RUN.move(self.status, event, to)
        ended = target in RUN.terminal
        if ended:
            data = {"reason": reason, **(data or {})}
        kind = EntryType.RUN_COMPLETED if ended else EntryType.RUN_TRANSITION
        return Entry(self.seq + 1, kind, actor, None, self.status, event, target, data=data)

    def move_step(
        self,
        fold: StepFold,
        event: StepEvent,
        *,
        actor: str,
        to: StepState | None = None,
        type: EntryType = EntryType.STEP_TRANSITION,
        data: dict[str, Any] | None = None,
        output: str | None = None,
    ) -> Entry:
        target = STEP.move(fold.status, event, to)
        attempt = fold.attempt + 1 if event in (StepEvent.CLAIM, StepEvent.RECLAIM) else fold.attempt
        data = self.declaring(fold, data)
        return self.add(
            Entry(self.seq + 1, type, actor, fold.step.key, fold.status, event, target, attempt or None, data, output)
        )

    def note(
        self, type: EntryType, *, actor: str, step: str | None = None, data: dict[str, Any] | None = None
    ) -> Entry:
        return self.add(Entry(self.seq + 1, type, actor, step, data=data))

    def declare(self, step: Step, said: dict[str, Any] | None = None) -> StepFold:
        """A flow asks for a step. `said` is what the journal does not know of it yet."""
        fold = StepFold(step, undeclared=said)
        self.steps[step.key] = fold
        self._in_order.append(fold)
        return fold

    def declaring(self, fold: StepFold, data: dict[str, Any] | None) -> dict[str, Any] | None:
        """The data of an entry about the step: with what it is, if this is the first about it."""
        if fold.undeclared is None:
            return data
        said, fold.undeclared = fold.undeclared, None
        return {"declares": said, **(data or {})}

    def begin(self, fold: StepFold) -> None:
        """The step is taken up. Its entry is written with its end, or by itself if it takes long."""
        fold.status = STEP.move(fold.status, StepEvent.CLAIM)
        fold.attempt += 1
        fold.next_run_at = None

    def add(self, entry: Entry) -> Entry:
        self.apply(entry)
        self.unsaved.append(entry)
        return entry

    def take_unsaved(self) -> list[Entry]:
        taken, self.unsaved = self.unsaved, []
        return taken

    # ------------------------------------------------------------ folding

    def replay(self, entries: Iterable[Entry]) -> "Journal":
        for entry in entries:
            self.apply(entry)
        return self

    def apply(self, entry: Entry) -> None:
        self.seq = entry.seq
        if entry.to_state is None:
            self._apply_note(entry)
        elif entry.step is None:
            self._apply_to_run(entry, RunState(entry.to_state))
        else:
            self._apply_to_step(self._met(entry.step, entry), entry, StepState(entry.to_state))

    def _apply_note(self, entry: Entry) -> None:
        if entry.type == EntryType.ACTION_EDITED and entry.step and entry.data:
            self._edit(self.fold_of(entry.step), entry.data)
        elif entry.type == EntryType.VALUE_RECORDED and entry.data:
            self.values[entry.data["place"]] = (entry.data["kind"], entry.data["value"])

    def _met(self, key: str, entry: Entry) -> StepFold:
        """A step of a flow or an agent is met first in the entry that declares it."""
        if not self.plan.is_dynamic or key in self.steps:
            return self.fold_of(key)
        return self.declare(declared_step(key, len(self.steps), (entry.data or {})["declares"]))

    def _edit(self, fold: StepFold, data: dict[str, Any]) -> None:
        fold.edited = data["fields"]
        fold.asked_digest, fold.asked_policy = data["digest"], data["policy_digest"]
        fold.asked_demand = _demand(data)

    def _apply_to_run(self, entry: Entry, status: RunState) -> None:
        self.status = status
        if entry.from_state is not None:
            self.moves.append(entry)
        if entry.event == RunEvent.COMPENSATE:
            self.ending = (entry.data or {})["ending"]
            self._cancel_unsettled(self.steps.values(), entry.at)
        elif self.status == RunState.CANCELING:
            self.asked = RunReason((entry.data or {})["asked"])
        if self.status in RUN.terminal:
            self.reason = RunReason((entry.data or {})["reason"])
            if entry.event and fired_by("run", RunEvent(entry.event), "step"):
                self._cancel_unsettled(chain(self.steps.values(), self.undos.values()), entry.at)

    def _cancel_unsettled(self, folds: Iterable[StepFold], at: datetime | None) -> None:
        for fold in folds:
            if fold.status not in STEP.terminal:
                fold.status = STEP.move(fold.status, StepEvent.CANCEL)
                fold.completed_at = at

    def _apply_to_step(self, fold: StepFold, entry: Entry, status: StepState) -> None:
        data = entry.data or {}
        before, fold.status = fold.status, status
        fold.attempt = entry.attempt or fold.attempt
        if entry.at is not None:
            _fold_start(fold, entry, before, data)
        # Whatever else becomes of a step that waits for its next try, it waits for that no longer.
        fold.next_run_at = None
        if (change := _FOLDED_BY.get(entry.event)) is not None:
            change(fold, data)
        if data:
            _fold_facts(fold, data)
        if status in STEP.terminal:
            self._settle(fold, entry, data)

    def _settle(self, fold: StepFold, entry: Entry, data: dict[str, Any]) -> None:
        fold.completed_at = entry.at
        fold.output = entry.output
        if fold.step.undoes is not None:
            return
        if fold.status == StepState.FAILED and self.failed is None and self._is_fatal(fold):
            self.failed = fold
        # Undone is what this run did: a step that succeeded, or one that was done and then failed because its output
        # could not be kept; but not what another run did, and this one was only answered with.
        undo, done = fold.step.undo, fold.status == StepState.SUCCEEDED or data.get("happened", False)
        if undo is not None and done and fold.replayed is None:
            self.undos[undo.key] = StepFold(undo)
        self.scope.settle(fold.step.key, fold.status, partial(read_back, entry.output))

    def _is_fatal(self, fold: StepFold) -> bool:
        if self.plan.agent is not None and fold.reason == RunReason.POLICY_DENIED:
            return False  # its model is told, and may do something else
        return not self.plan.is_dynamic or fold.reason in FATAL

    # ------------------------------------------------------------ reading

    def open_steps(self) -> Iterator[StepFold]:
        """Steps that are not settled, in order, without walking over the settled beginning again and again."""
        folds, ended = self._in_order, STEP.terminal
        while self._first_open < len(folds) and folds[self._first_open].status in ended:
            self._first_open += 1
        return (fold for fold in folds[self._first_open :] if fold.status not in ended)

    def fold_of(self, key: str) -> StepFold:
        """A step of the workflow, or one that undoes it."""
        return self.steps.get(key) or self.undos[key]

    def scope_of(self, fold: StepFold) -> Scope:
        """What its input may refer to: what undoes a step sees what that step returned."""
        if fold.step.undoes is None:
            return self.scope
        return self.scope.seeing(read_back(self.steps[fold.step.undoes].output))

    def unsettled(self) -> Iterator[StepFold]:
        """Steps that are not settled, and of what undoes them what is begun."""
        yield from self.open_steps()
        yield from (fold for fold in self.undos.values() if fold.attempt and fold.status not in STEP.terminal)

    @property
    def is_undoing(self) -> bool:
        return self.ending is not None

    @property
    def compensation(self) -> list[StepFold]:
        """What is undone or was, in that order: the last thing done comes first."""
        return list(reversed(self.undos.values())) if self.is_undoing else []

    def result(self) -> str:
        """A run's result is what its flow returned, or the output of the last step that has one."""
        if self.plan.is_dynamic:
            return self.end.result if self.end else NO_OUTPUT
        outputs = (self.steps[step.key].output for step in reversed(self.plan.steps))
        return next((output for output in outputs if output is not None), NO_OUTPUT)

    def has_children(self) -> bool:
        return any(fold.child_id is not None for fold in self._in_order)

    def effects(self) -> int:
        """How many writes the run has made or is making."""
        return sum(fold.receipt_id is not None for fold in self._in_order)

    def cost_usd(self) -> float:
        return sum(fold.cost_usd for fold in chain(self.steps.values(), self.undos.values()))


# ---------------------------------------------------------------- what an entry says of its step


def _fold_start(fold: StepFold, entry: Entry, before: StepState, data: dict[str, Any]) -> None:
    """When the step began. A short one has no entry for that: it began `duration_ms` before it was settled."""
    assert entry.at is not None
    if entry.event == StepEvent.CLAIM or (fold.started_at is None and entry.from_state == StepState.PENDING):
        fold.started_at = entry.at
    elif before == StepState.PENDING and entry.from_state == StepState.RUNNING:
        fold.started_at = entry.at - timedelta(milliseconds=data.get("duration_ms", 0))


def _fold_retry(fold: StepFold, data: dict[str, Any]) -> None:
    fold.failures += 1
    fold.next_run_at = _moment(data["next_run_at"])


def _fold_reclaim(fold: StepFold, data: dict[str, Any]) -> None:
    fold.reclaims += 1


def _fold_park(fold: StepFold, data: dict[str, Any]) -> None:
    fold.due_at = _moment(data["due_at"]) if "due_at" in data else None
    fold.awaits = data.get("awaits")
    fold.child_id = data.get("child")


def _fold_question(fold: StepFold, data: dict[str, Any]) -> None:
    fold.approval_id = data["approval_id"]
    fold.asked_digest = data.get("digest")
    fold.asked_policy = data.get("policy_digest")
    fold.asked_demand = _demand(data)


def _fold_release(fold: StepFold, data: dict[str, Any]) -> None:
    fold.allowed_digest, fold.allowed_policy = fold.asked_digest, fold.asked_policy
    fold.allowed_demand = fold.asked_demand
    if not fold.in_doubt:  # the policy held it before anything was tried
        fold.attempt -= 1


def _fold_claim(fold: StepFold, data: dict[str, Any]) -> None:
    fold.receipt_id = data.get("receipt_id")
    fold.declared_digest = data.get("digest")
    fold.idempotent = data.get("idempotent", fold.receipt_id is None)
    if "started_at" in data:
        fold.started_at = _moment(data["started_at"])


# What is known of a step changes with these events in more than its state.
_FOLDED_BY: Mapping[str | None, Callable[[StepFold, dict[str, Any]], None]] = MappingProxyType(
    {
        StepEvent.RETRY: _fold_retry,
        StepEvent.RECLAIM: _fold_reclaim,
        StepEvent.PARK: _fold_park,
        StepEvent.OPEN: _fold_question,
        StepEvent.HOLD: _fold_question,
        StepEvent.RELEASE: _fold_release,
        StepEvent.CLAIM: _fold_claim,
    }
)


def _fold_facts(fold: StepFold, data: dict[str, Any]) -> None:
    """What any entry about a step may say."""
    fold.last_error = data.get("error", fold.last_error)
    fold.reason = data.get("reason", fold.reason)
    fold.cost_usd += data.get("cost_usd", 0.0)
    fold.duration_ms = data.get("duration_ms", fold.duration_ms)
    if "costs" in data:
        fold.tokens = _tokens(data["costs"], fold.tokens)
    fold.idempotency_key = data.get("idempotency_key", fold.idempotency_key)
    fold.carried_receipt_id = data.get("carried_receipt_id", fold.carried_receipt_id)
    if "replayed_from" in data:
        fold.replayed = {name: data[name] for name in ("replayed_from", "receipt_id") if name in data}


def _tokens(costs: list[dict[str, Any]], before: dict[str, int] | None) -> dict[str, int] | None:
    """The sums over all attempts. A cost has them under the names that `ctx.cost` takes."""
    told = [cost for cost in costs if "input_tokens" in cost or "output_tokens" in cost]
    if not told:
        return before
    known = before or {"input": 0, "output": 0}
    return {way: known[way] + int(sum(cost.get(f"{way}_tokens", 0) for cost in told)) for way in ("input", "output")}


def _demand(data: dict[str, Any]) -> dict[str, Any] | None:
    """What the question asks of whoever says yes. If it does not say all of it, nothing is taken as known."""
    names = ("tier", "two_person", "approvers", "reason_required")
    return {name: data[name] for name in names} if all(name in data for name in names) else None


def _moment(value: str | datetime) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def encode(value: Any) -> str:
    return orjson.dumps(value).decode()
