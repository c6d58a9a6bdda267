"""The journal of one run: the fold of plan and entries, and the one way to add an entry.

`Journal.add` asks the lifecycle table whether the transition exists, numbers the entry, applies it and keeps it as
unsaved until its writer has committed it. Replaying the same entries always gives the same state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import orjson

from interlock.definition.expression import Scope
from interlock.definition.flow import declared_step
from interlock.definition.plan import Plan, PlanStep
from interlock.ids import RunId
from interlock.journal.cause import DEADLINE, Cause, cause_of_step
from interlock.journal.entry import Entry, EntryType
from interlock.journal.output import NO_OUTPUT, read_back
from interlock.lifecycle import RUN, STEP, RunEvent, RunReason, RunState, StepEvent, StepState, fired_by

# Errors that a flow cannot catch: the action was forbidden, or its outcome is not known.
FATAL = frozenset(
    {RunReason.POLICY_DENIED, RunReason.CAP_EXCEEDED, RunReason.ORPHANED, RunReason.RESUME_FAILED, RunReason.TIMED_OUT}
)

_WAITING = (RunState.WAITING_APPROVAL, RunState.WAITING_EXTERNAL)
_WAITING_STEP = (StepState.WAITING_APPROVAL, StepState.WAITING_EXTERNAL)
_REFUSED = (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED)


@dataclass(frozen=True, slots=True)
class FlowEnd:
    """The end of a flow: it returned or raised. Only a process with its code can tell. Agents end the same way."""

    result: str = NO_OUTPUT
    reason: RunReason = RunReason.COMPLETED
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class StepSnapshot:
    """What the journal says of one step."""

    step: PlanStep
    status: StepState = StepState.PENDING
    attempt: int = 0
    failures: int = 0
    reclaims: int = 0
    output: str | None = None
    last_error: dict[str, Any] | None = None
    reason: str | None = None
    next_run_at: datetime | None = None
    due_at: datetime | None = None
    # The external event that the step waits for: type, correlation and an optional time-out.
    awaits: dict[str, Any] | None = None
    approval_id: str | None = None
    # What made the step wait, and then what ended the wait.
    cause: Cause | None = None
    # The digest of the one exact action in the approval request and, once it is approved, of the approved action.
    asked_digest: str | None = None
    allowed_digest: str | None = None
    asked_policy: str | None = None
    allowed_policy: str | None = None
    # The requirements on approvers: tier, two_person, approvers, reason_required.
    asked_demand: dict[str, Any] | None = None
    allowed_demand: dict[str, Any] | None = None
    receipt_id: str | None = None
    # The action that its last intent declared.
    declared_digest: str | None = None
    # For a step carried over from an earlier run: the receipt of the run that executed it.
    carried_receipt_id: str | None = None
    # For a step answered with the result of another run: that run, and its receipt.
    replayed: dict[str, str] | None = None
    # A person's edits of the workflow's input, field by field.
    edited: dict[str, Any] | None = None
    cost_usd: float = 0.0
    # Tokens in and out of its models, if the tool reported them.
    tokens: dict[str, int] | None = None
    idempotency_key: str | None = None
    # True if the step started after the database was last restored to an earlier moment.
    begun_since_restore: bool = False
    # True if a crashed attempt may be repeated. A write declares this with its intent; a read is always safe.
    idempotent: bool = True
    # The step ended, and it is unknown whether its effect happened.
    ended_in_doubt: bool = False
    duration_ms: float | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    # The child run that this step waits for.
    child_id: str | None = None
    # For a flow's step: the data for its first entry, until that entry is written.
    undeclared: dict[str, Any] | None = None

    def input(self, scope: Scope, secrets: Mapping[str, str] | None = None) -> Any:
        """Return the tool's input; without `secrets`, each secret shows its name instead of its value."""
        rendered = self.step.input.render(scope, secrets)
        return rendered if self.edited is None else {**(rendered or {}), **self.edited}

    @property
    def secrets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the secrets that the input refers to, by field."""
        asked = self.step.input.secrets
        return {name: asked[name] for name in asked if name not in self.edited} if asked and self.edited else asked

    @property
    def in_doubt(self) -> bool:
        """True if people must say whether an effect happened: the question is about its receipt, not an action."""
        return self.receipt_id is not None and self.asked_digest == self.receipt_id


class Journal:
    __slots__ = (
        "_end",
        "_first_open",
        "_in_order",
        "_seq",
        "_status",
        "asked",
        "behind",
        "ending",
        "failed",
        "moves",
        "news",
        "plan",
        "reason",
        "requested_by",
        "restored",
        "run_id",
        "scope",
        "steps",
        "undos",
        "unsaved",
        "updated_at",
        "values",
    )

    def __init__(
        self, run_id: RunId, plan: Plan, *, input: Any, trigger: Any, run: dict[str, Any],
        requested_by: str | None = None,
    ) -> None:  # fmt: skip
        self.run_id = run_id
        self.plan = plan
        self.requested_by = requested_by
        self._status = RUN.initial
        self.reason: RunReason | None = None
        self.asked = RunReason.CANCELED_BY_USER
        self.failed: StepSnapshot | None = None
        # How the run ends after its compensation: a reason and an error, or empty after a cancel.
        self.ending: dict[str, Any] | None = None
        # What ended the last wait since the run's last move, or why it stopped or failed if it is `canceling`.
        self.news: Cause | None = None
        self.behind: Cause | None = None
        self._seq = 0
        # When its last entry was committed.
        self.updated_at: datetime | None = None
        # The run's transitions since it was created.
        self.moves: list[Entry] = []
        self.steps = {step.key: StepSnapshot(step) for step in plan.steps}
        # The steps to compensate, in the order in which they were done.
        self.undos: dict[str, StepSnapshot] = {}
        self.scope = Scope(input, trigger, run)
        # The moment to which the database was restored while the run, or the run that started it, had not ended.
        self.restored: dict[str, Any] | None = (trigger or {}).get("restored")
        self.unsaved: list[Entry] = []
        # For a flow: how it ended, and the values (time, random, id) that it received, by place.
        self._end: FlowEnd | None = None
        self.values: dict[str, tuple[str, Any]] = {}
        self._first_open = 0
        self._in_order = list(self.steps.values())

    @property
    def seq(self) -> int:
        """The number of the last entry."""
        return self._seq

    @property
    def status(self) -> RunState:
        return self._status

    @property
    def end(self) -> FlowEnd | None:
        """How the flow or the agent's loop ended, once its code has said so."""
        return self._end

    # ------------------------------------------------------------ writing

    def at(self, status: RunState, seq: int) -> "Journal":
        """Return this journal as it is after entries that are known without reading them."""
        self._status, self._seq = status, seq
        return self

    def end_flow(self, end: FlowEnd) -> None:
        self._end = end

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
        """Build the next entry without adding it: a release may still fail because a command is in the inbox."""
        target = RUN.move(self.status, event, to)
        ended = target in RUN.terminal
        if ended:
            data = {"reason": reason, **(data or {})}
        cause = self._cause_of(event, reason, data or {})
        if cause is not None and cause != {"by": actor}:
            data = {**(data or {}), "cause": cause}
        kind = EntryType.RUN_COMPLETED if ended else EntryType.RUN_TRANSITION
        return Entry(self.seq + 1, kind, actor, None, self.status, event, target, data=data)

    def _cause_of(self, event: RunEvent, reason: RunReason | None, data: dict[str, Any]) -> Cause | None:
        match event:
            case RunEvent.HOLD | RunEvent.PARK:
                return self._cause_of_wait(event)
            case RunEvent.RESUME:
                return self.news
            case RunEvent.STOPPED:
                return self.behind
            case RunEvent.COMPENSATE:
                ending = data["ending"]
                return self._cause_of_end(RunReason(ending["reason"]), ending["error"]) if ending else self.behind
            case RunEvent.FAIL if self.ending and reason == self.ending["reason"]:
                return self.behind
            case RunEvent.SUCCEED if self.status in _WAITING and reason == RunReason.COMPLETED:
                return self.news
            case RunEvent.FAIL | RunEvent.SUCCEED if reason is not None:
                return self._cause_of_end(reason, data.get("error"))
        return None

    def _cause_of_wait(self, event: RunEvent) -> Cause | None:
        """Return the current wait's cause; if one wait ended and another is left, also what ended the first."""
        state = StepState.WAITING_APPROVAL if event == RunEvent.HOLD else StepState.WAITING_EXTERNAL
        waiting = next((fold.cause for fold in self.open_steps() if fold.status == state), None)
        if self.status not in _WAITING or self.news is None:
            return waiting
        return {**(waiting or {}), **self.news}

    def _cause_of_end(self, reason: RunReason, error: dict[str, Any] | None) -> Cause | None:
        """Return why the step in the run's error failed; a run that succeeds after a rejection has no error."""
        if reason == RunReason.TIMED_OUT:
            return {"by": DEADLINE}
        key = (error or {}).get("step")
        if key is not None:
            to_blame = self.steps.get(key) or self.undos.get(key)
        else:
            to_blame = next((fold for fold in self._in_order if fold.reason == reason and reason in _REFUSED), None)
        cause = to_blame.cause if to_blame is not None else None
        if to_blame is None or cause is None or "approval" not in cause or to_blame.completed_at is None:
            return cause
        return {**cause, "approval": {**cause["approval"], "decided_at": to_blame.completed_at.isoformat()}}

    def move_step(
        self,
        fold: StepSnapshot,
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
        self, type: EntryType, *, actor: str, step: str | None = None, attempt: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> Entry:  # fmt: skip
        return self.add(Entry(self.seq + 1, type, actor, step, attempt=attempt, data=data))

    def add_start(self, fold: StepSnapshot, *, actor: str, data: dict[str, Any]) -> Entry:
        """Add the start entry of a step that `begin` has started."""
        return self.add(
            Entry(
                self.seq + 1, EntryType.STEP_TRANSITION, actor, fold.step.key, STEP.initial, StepEvent.CLAIM,
                fold.status, fold.attempt, self.declaring(fold, data),
            )
        )  # fmt: skip

    def declare(self, step: PlanStep, said: dict[str, Any] | None = None) -> StepSnapshot:
        """Declare a step that a flow or an agent asks for. `said` is what the journal does not know about it yet."""
        fold = StepSnapshot(step, undeclared=said)
        self.steps[step.key] = fold
        self._in_order.append(fold)
        return fold

    def declaring(self, fold: StepSnapshot, data: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the data of an entry about the step, including its declaration if this is the first one."""
        if fold.undeclared is None:
            return data
        said, fold.undeclared = fold.undeclared, None
        return {"declares": said, **(data or {})}

    def begin(self, fold: StepSnapshot) -> None:
        """Start the step. Its start is written with its end, or separately if it takes long."""
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
        self._seq = entry.seq
        self.updated_at = entry.at
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
        elif entry.type == EntryType.RUN_RESTORED and entry.data:
            self.restored = {"to": entry.data["to"]}
            for fold in chain(self.steps.values(), self.undos.values()):
                fold.begun_since_restore = False

    def _met(self, key: str, entry: Entry) -> StepSnapshot:
        """Return the step; the entry that declares a step of a flow or an agent creates it."""
        if not self.plan.is_dynamic or key in self.steps:
            return self.fold_of(key)
        return self.declare(declared_step(key, len(self.steps), (entry.data or {})["declares"]))

    def _edit(self, fold: StepSnapshot, data: dict[str, Any]) -> None:
        fold.edited = data["fields"]
        fold.asked_digest, fold.asked_policy = data["digest"], data["policy_digest"]
        fold.asked_demand = _demand(data)

    def _apply_to_run(self, entry: Entry, status: RunState) -> None:
        self._status = status
        self.news = None
        if entry.from_state is not None:
            self.moves.append(entry)
        if status == RunState.CANCELING:
            self.behind = (entry.data or {}).get("cause") or {"by": entry.actor}
        if entry.event == RunEvent.COMPENSATE:
            self.ending = (entry.data or {})["ending"]
            self._cancel_unsettled(RunEvent.COMPENSATE, self.steps.values(), entry.at)
        elif self._status == RunState.CANCELING:
            self.asked = RunReason((entry.data or {})["asked"])
        if self._status in RUN.terminal:
            self.reason = RunReason((entry.data or {})["reason"])
            self._cancel_unsettled(
                RunEvent(entry.event or ""), chain(self.steps.values(), self.undos.values()), entry.at
            )

    def _cancel_unsettled(self, event: RunEvent, steps: Iterable[StepSnapshot], at: datetime | None) -> None:
        fired = fired_by("run", event, "step")
        for step in steps if fired is not None else ():
            if step.status not in STEP.terminal:
                step.status = STEP.move(step.status, StepEvent(str(fired)))
                step.completed_at = at

    def _apply_to_step(self, fold: StepSnapshot, entry: Entry, status: StepState) -> None:
        data = entry.data or {}
        before, fold.status = fold.status, status
        fold.attempt = entry.attempt or fold.attempt
        if entry.at is not None:
            _fold_start(fold, entry, before, data)
        # Every event of a step that waits for its next attempt ends that wait.
        fold.next_run_at = None
        if (change := _FOLDED_BY.get(entry.event)) is not None:
            change(fold, data)
        fold.cause = cause_of_step(entry.event, entry.from_state, entry.actor, data)
        if before in _WAITING_STEP:
            self.news = fold.cause
        if data:
            _fold_facts(fold, data)
        if status in STEP.terminal:
            self._settle(fold, entry)

    def _settle(self, fold: StepSnapshot, entry: Entry) -> None:
        fold.completed_at = entry.at
        fold.output = entry.output
        if fold.step.undoes is not None:
            return
        if fold.status == StepState.FAILED and self.failed is None and self._is_fatal(fold):
            self.failed = fold
        # Compensate what this run did, not what another run did and this run only reused.
        undo = fold.step.undo
        if undo is not None and fold.status == StepState.SUCCEEDED and fold.replayed is None:
            self.undos[undo.key] = StepSnapshot(undo)
        self.scope.settle(fold.step.key, fold.status, partial(read_back, entry.output))

    def _is_fatal(self, fold: StepSnapshot) -> bool:
        if self.plan.agent is not None and fold.reason == RunReason.POLICY_DENIED:
            return False  # the model receives the error, and may do something else
        return not self.plan.is_dynamic or fold.reason in FATAL

    # ------------------------------------------------------------ reading

    def open_steps(self) -> Iterator[StepSnapshot]:
        """Yield the steps that are not settled, in order, without scanning the settled beginning each time."""
        folds, ended = self._in_order, STEP.terminal
        while self._first_open < len(folds) and folds[self._first_open].status in ended:
            self._first_open += 1
        return (fold for fold in folds[self._first_open :] if fold.status not in ended)

    def fold_of(self, key: str) -> StepSnapshot:
        """Return a step of the workflow, or a compensation step."""
        return self.steps.get(key) or self.undos[key]

    def scope_of(self, fold: StepSnapshot) -> Scope:
        """Return what the step's input may refer to: a compensation step sees the output of the step that it undoes."""
        if fold.step.undoes is None:
            return self.scope
        return self.scope.seeing(read_back(self.steps[fold.step.undoes].output))

    def unsettled(self) -> Iterator[StepSnapshot]:
        """Yield the steps that are not settled, and the started compensation steps."""
        yield from self.open_steps()
        yield from (fold for fold in self.undos.values() if fold.attempt and fold.status not in STEP.terminal)

    @property
    def is_undoing(self) -> bool:
        return self.ending is not None

    @property
    def compensation(self) -> list[StepSnapshot]:
        """Return the compensation steps, done or to do, in order: the last thing done comes first."""
        return list(reversed(self.undos.values())) if self.is_undoing else []

    def result(self) -> str:
        """Return what the flow returned, or the output of the last step that has one."""
        if self.plan.is_dynamic:
            return self.end.result if self.end else NO_OUTPUT
        outputs = (self.steps[step.key].output for step in reversed(self.plan.steps))
        return next((output for output in outputs if output is not None), NO_OUTPUT)

    def has_children(self) -> bool:
        return any(fold.child_id is not None for fold in self._in_order)

    def may_have_done(self, fold: StepSnapshot) -> bool:
        """Return True if the step may have been done in a timeline that a restore of the database discarded.

        That is every step that starts for the first time since the restore, except the compensation of an effect that
        this run made since then: nothing can have undone it before.
        """
        if self.restored is None or fold.begun_since_restore:
            return False
        return fold.step.undoes is None or not self.steps[fold.step.undoes].begun_since_restore

    def effects(self) -> int:
        """Return how many writes the run has made or is making."""
        return sum(fold.receipt_id is not None for fold in self._in_order)

    def cost_usd(self) -> float:
        return sum(fold.cost_usd for fold in chain(self.steps.values(), self.undos.values()))


# ---------------------------------------------------------------- fold of an entry into its step


def _fold_start(fold: StepSnapshot, entry: Entry, before: StepState, data: dict[str, Any]) -> None:
    """Set when the step began. A short step has no start entry: it began `duration_ms` before it settled."""
    assert entry.at is not None
    if entry.event == StepEvent.CLAIM or (fold.started_at is None and entry.from_state == StepState.PENDING):
        fold.started_at = entry.at
    elif before == StepState.PENDING and entry.from_state == StepState.RUNNING:
        fold.started_at = entry.at - timedelta(milliseconds=data.get("duration_ms", 0))


def _fold_retry(fold: StepSnapshot, data: dict[str, Any]) -> None:
    fold.failures += 1
    fold.next_run_at = _moment(data["next_run_at"])


def _fold_reclaim(fold: StepSnapshot, data: dict[str, Any]) -> None:
    fold.reclaims += 1


def _fold_park(fold: StepSnapshot, data: dict[str, Any]) -> None:
    fold.begun_since_restore = True
    fold.due_at = _moment(data["due_at"]) if "due_at" in data else None
    fold.awaits = data.get("awaits")
    fold.child_id = data.get("child")


def _fold_question(fold: StepSnapshot, data: dict[str, Any]) -> None:
    fold.approval_id = data["approval_id"]
    fold.asked_digest = data.get("digest")
    fold.asked_policy = data.get("policy_digest")
    fold.asked_demand = _demand(data)


def _fold_release(fold: StepSnapshot, data: dict[str, Any]) -> None:
    fold.allowed_digest, fold.allowed_policy = fold.asked_digest, fold.asked_policy
    fold.allowed_demand = fold.asked_demand
    if not fold.in_doubt:  # the policy held it before any attempt
        fold.attempt -= 1


def _fold_claim(fold: StepSnapshot, data: dict[str, Any]) -> None:
    fold.begun_since_restore = True
    fold.receipt_id = data.get("receipt_id")
    fold.declared_digest = data.get("digest")
    fold.idempotent = data.get("idempotent", fold.receipt_id is None)
    if "started_at" in data:
        fold.started_at = _moment(data["started_at"])


# With these events, more changes in a step than its state.
_FOLDED_BY: Mapping[str | None, Callable[[StepSnapshot, dict[str, Any]], None]] = MappingProxyType(
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


def _fold_facts(fold: StepSnapshot, data: dict[str, Any]) -> None:
    """Fold the data that any entry about a step may have."""
    fold.last_error = data.get("error", fold.last_error)
    fold.reason = data.get("reason", fold.reason)
    fold.ended_in_doubt = data.get("in_doubt", False)
    fold.cost_usd += data.get("cost_usd", 0.0)
    fold.duration_ms = data.get("duration_ms", fold.duration_ms)
    if "costs" in data:
        fold.tokens = _tokens(data["costs"], fold.tokens)
    fold.idempotency_key = data.get("idempotency_key", fold.idempotency_key)
    fold.carried_receipt_id = data.get("carried_receipt_id", fold.carried_receipt_id)
    if "replayed_from" in data:
        fold.replayed = {name: data[name] for name in ("replayed_from", "receipt_id") if name in data}


def _tokens(costs: list[dict[str, Any]], before: dict[str, int] | None) -> dict[str, int] | None:
    """Return the sums over all attempts. A cost has them under the names that `ctx.cost` takes."""
    told = [cost for cost in costs if "input_tokens" in cost or "output_tokens" in cost]
    if not told:
        return before
    known = before or {"input": 0, "output": 0}
    return {way: known[way] + int(sum(cost.get(f"{way}_tokens", 0) for cost in told)) for way in ("input", "output")}


def _demand(data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the question's requirements on approvers, or None if the question does not state all of them."""
    names = ("tier", "two_person", "approvers", "reason_required")
    return {name: data[name] for name in names} if all(name in data for name in names) else None


def _moment(value: str | datetime) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def encode(value: Any) -> str:
    return orjson.dumps(value).decode()
