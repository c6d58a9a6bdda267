"""Replay of a flow on its journal: steps in the journal are answered at once, new ones are declared.

The function runs from its start each time a worker takes the run up. Nothing here waits or writes: `resume` goes as
far as the journal has answers, declares the steps that the flow asks for next, and reports whether the flow has ended.
"""

import asyncio
import inspect
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from interlock.definition.flow import declaration
from interlock.definition.plan import PlanStep, StepKind
from interlock.errors import Terminal
from interlock.flows.awaitables import PendingGather, PendingStep, described
from interlock.flows.context import FlowContext
from interlock.flows.errors import FlowUsageError, NonDeterminismError, StepFailed, step_failed
from interlock.flows.registry import RegisteredFlow
from interlock.ids import TenantId
from interlock.journal import FATAL, EntryType, FlowEnd, Journal, as_stored, read_back
from interlock.lifecycle import RunReason, StepState
from interlock.telemetry import log

_HERE = Path(__file__).parent
# Exceptions of a coroutine that belong to the flow itself.
_RAISED = (Exception, SystemExit, asyncio.CancelledError)

Declares = Callable[[PlanStep], dict[str, Any]]
Encode = Callable[[Any], str]


class Branch:
    """One line of a flow: its main one, or one of several side by side. Each branch counts its keys separately.

    A replay has all the answers, so side-by-side branches ask in another order than before; within a branch the order
    is always the same.
    """

    __slots__ = ("_asked", "_names", "_scope", "awaits", "coroutine", "join", "slot")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any] | None, scope: str, join: "Join | None" = None, slot: int = 0
    ) -> None:
        self.coroutine = coroutine
        self.awaits: PendingStep | None = None
        self.join = join
        self.slot = slot
        self._scope = scope
        self._names: Counter[str] = Counter()
        self._asked = 0

    def named(self, name: str) -> str:
        self._names[name] += 1
        again = self._names[name]
        return f"{self._scope}{name}#{again}" if again > 1 else f"{self._scope}{name}"

    def next_place(self) -> str:
        self._asked += 1
        return f"{self._scope}{self._asked}"


class Join:
    """The end of the branches of one `gather`."""

    __slots__ = ("gathered", "left", "outcomes", "waiting")

    def __init__(self, waiting: Branch, gathered: PendingGather) -> None:
        self.waiting = waiting
        self.gathered = gathered
        self.left = len(gathered.items)
        self.outcomes: list[Any] = [None] * self.left


class Replay:
    def __init__(
        self,
        flow: RegisteredFlow,
        journal: Journal,
        *,
        tenant_id: TenantId,
        input: Any,
        actor: str,
        clock: Callable[[], datetime],
        declares: Declares = declaration,
        encode: Encode = lambda value: orjson.dumps(value).decode(),
    ) -> None:
        self.clock = clock
        self._journal = journal
        self._actor = actor
        self._declares = declares
        self._encode = encode
        context = FlowContext(self, journal.run_id, tenant_id, flow.name)
        self._begun: list[Coroutine[Any, Any, Any]] = [flow.start(context, input)]
        self._main = Branch(self._begun[0], "")
        self._current: Branch | None = None
        self._ready: deque[tuple[Branch, Any, BaseException | None]] = deque([(self._main, None, None)])
        self._waiting: dict[Branch, None] = {}
        self._unawaited: dict[str, PendingStep | PendingGather] = {}
        # The steps in the history, by place, until the flow has asked for them again.
        self._history: dict[str, str] = {}
        for key, fold in journal.steps.items():
            self._history[fold.step.place or ""] = key
        for place, (kind, _) in journal.values.items():
            self._history[place] = f"ctx.{kind}()"
        self._fault: NonDeterminismError | FlowUsageError | None = None
        self._is_closed = False

    # ------------------------------------------------------------ for the run driver

    def resume(self) -> bool:
        """Run the flow as far as the journal has answers. Return False if there was no new answer for it."""
        if self._is_over():
            return False
        for branch in list(self._waiting):
            assert branch.awaits is not None
            if (answer := self._answer(branch.awaits.step.key)) is not None:
                del self._waiting[branch]
                self._ready.append((branch, *answer))
        if not self._ready:
            return False
        while self._ready and not self._is_over():
            self._run(*self._ready.popleft())
        if self._history and not self._is_over():
            self._forgotten()
        if self._is_over():
            self.close()
        return True

    def _is_over(self) -> bool:
        return self._journal.end is not None

    def has_news(self) -> bool:
        return not self._is_over() and any(
            branch.awaits is not None and self._answer(branch.awaits.step.key) is not None for branch in self._waiting
        )

    def close(self) -> None:
        """Discard the coroutines: nothing of the flow is kept while it waits."""
        self._is_closed = True
        for coroutine in reversed(self._begun):
            try:
                coroutine.close()
            except BaseException as error:
                # An error from a flow's `finally` does not affect its run.
                log.debug("flow_closed", run_id=str(self._journal.run_id), error=repr(error))
        self._waiting.clear()
        self._ready.clear()

    # ------------------------------------------------------------ for the context

    def branch(self) -> Branch:
        if self._is_closed:
            raise GeneratorExit  # from a `finally`, after the flow was closed
        if self._current is None:
            raise FlowUsageError("this can only be asked in the flow itself, not in a task or thread that it started")
        return self._current

    def asked(self, asked: PendingStep) -> PendingStep:
        self._unawaited[asked.step.key] = asked
        return asked

    def gathered(self, gathered: PendingGather) -> PendingGather:
        self._unawaited[gathered.name] = gathered
        self._begun += [item for item in gathered.items if inspect.iscoroutine(item)]
        return gathered

    def recorded(self, kind: str, make: Callable[[], Any]) -> Any:
        place = self.branch().next_place()
        there = self._history.pop(place, None)
        if there is None:
            value = make()
            data = {"place": place, "kind": kind, "value": value}
            self._journal.note(EntryType.VALUE_RECORDED, actor=self._actor, data=data)
            return value
        if there != f"ctx.{kind}()":
            self._fault = NonDeterminismError(
                there, f"the flow asks for ctx.{kind}() where its history has {self._what(there)}"
            )
            raise self._fault
        return self._journal.values[place][1]

    def log(self, logger: Any) -> Any:
        return _Silent() if self._history else logger

    # ------------------------------------------------------------ running

    def _run(self, branch: Branch, value: Any, error: BaseException | None) -> None:
        """Run one branch until it waits or is done."""
        if branch.coroutine is None:
            self._done(branch, value, error)
            return
        while True:
            self._current = branch
            try:
                awaited = branch.coroutine.send(value) if error is None else branch.coroutine.throw(error)
            except StopIteration as returned:
                self._done(branch, returned.value, None)
                return
            except _RAISED as raised:
                self._done(branch, None, raised)
                return
            finally:
                self._current = None
            if self._fault is not None:
                self._end(self._fault)  # the flow caught it, but it may not decide about it
                return
            match awaited:
                case PendingStep():
                    answer = self._look(awaited)
                    if answer is None:
                        self._wait(branch, awaited)
                        return
                    value, error = answer
                case PendingGather():
                    self._spread(branch, awaited)
                    return
                case _:
                    self._end(_foreign(awaited))
                    return

    def _look(self, asked: PendingStep) -> tuple[Any, BaseException | None] | None:
        self._unawaited.pop(asked.step.key, None)
        if not asked.is_known:
            asked.is_known = True
            self._recognise(asked.step)
        return self._answer(asked.step.key) if self._fault is None else None

    def _wait(self, branch: Branch, asked: PendingStep) -> None:
        if self._fault is not None:
            self._end(self._fault)
            return
        branch.awaits = asked
        self._waiting[branch] = None

    def _recognise(self, step: PlanStep) -> None:
        """Find the step in the history at the same place, or declare it."""
        fold = self._journal.steps.get(step.key)
        there = self._history.pop(step.place or "", None)
        if fold is None and there is None:
            self._journal.declare(_numbered(step, len(self._journal.steps)), self._declares(step))
        elif fold is None or there != step.key:
            found = f"has {self._what(there)} there" if there else "has that in another place"
            self._fault = NonDeterminismError(
                there or step.key, f"the flow asks for {described(step)}; its history {found}"
            )
        elif (why := _difference(fold.step, step)) is not None:
            self._fault = NonDeterminismError(step.key, why)
        else:
            # The declaration is incomplete: for example, the input of a read is only known here.
            fold.step = _numbered(step, fold.step.index)

    def _answer(self, key: str) -> tuple[Any, BaseException | None] | None:
        fold = self._journal.steps[key]
        match fold.status:
            case StepState.SUCCEEDED | StepState.SKIPPED:
                return read_back(fold.output), None
            case StepState.FAILED if fold.reason not in FATAL:
                reason = RunReason(fold.reason or RunReason.TERMINAL_ERROR)
                return None, step_failed(key, reason, as_stored(fold.last_error or {}))
            case _:
                return None

    def _spread(self, branch: Branch, gathered: PendingGather) -> None:
        self._unawaited.pop(gathered.name, None)
        join = Join(branch, gathered)
        if not gathered.items:
            self._ready.append((branch, [], None))
        for slot, item in enumerate(gathered.items):
            if isinstance(item, PendingStep):
                single = Branch(None, "", join, slot)
                answer = self._look(item)
                if answer is None:
                    self._wait(single, item)
                else:
                    self._ready.append((single, *answer))
            elif inspect.iscoroutine(item):
                self._ready.append((Branch(item, f"{gathered.name}.{slot}/", join, slot), None, None))
            elif isinstance(item, PendingGather):
                inner = Branch(None, "", join, slot)
                self._spread(inner, item)
            else:
                self._end(FlowUsageError(f"ctx.gather takes steps of ctx and coroutines, not {item!r:.120}"))

    def _done(self, branch: Branch, value: Any, error: BaseException | None) -> None:
        if self._fault is not None:
            self._end(self._fault)
        elif branch.join is None:
            self._end(error, value)
        else:
            join = branch.join
            join.outcomes[branch.slot] = value if error is None else error
            join.left -= 1
            if join.left == 0:
                self._ready.append((join.waiting, *_together(join)))

    # ------------------------------------------------------------ ending

    def _end(self, error: BaseException | None, result: Any = None) -> None:
        if self._is_over():
            return
        if error is None:
            error = self._left_over()
        if error is None:
            try:
                self._journal.end_flow(FlowEnd(self._encode(result)))
                return
            except (Terminal, TypeError, ValueError) as refused:
                error = Terminal(f"what the flow returned cannot be kept: {refused}")
        self._journal.end_flow(_failed(error))

    def _left_over(self) -> BaseException | None:
        if self._unawaited:
            return FlowUsageError(f"{next(iter(self._unawaited.values()))!r} was asked for and never awaited")
        if self._history:
            there = next(iter(self._history.values()))
            return NonDeterminismError(
                there, f"the flow returned; its history has {self._what(there)}, which it did not ask for"
            )
        return None

    def _forgotten(self) -> None:
        """Fail if the flow waits for a new step before it asked for all steps of its history."""
        there = next(iter(self._history.values()))
        asks = ", ".join(repr(branch.awaits) for branch in self._waiting)
        self._end(
            NonDeterminismError(there, f"the flow waits for {asks}; its history has {self._what(there)} before that")
        )

    def _what(self, there: str | None) -> str:
        """Return a step in the history as the flow's author would know it."""
        fold = self._journal.steps.get(there or "")
        return f"{described(fold.step)} (step {there})" if fold is not None else str(there)


class _Silent:
    """A logger that drops what was logged before."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **more: self if name == "bind" else None


def _together(join: Join) -> tuple[Any, BaseException | None]:
    raised = next((outcome for outcome in join.outcomes if isinstance(outcome, BaseException)), None)
    if raised is None or join.gathered.return_exceptions:
        return join.outcomes, None
    return None, raised


def _numbered(step: PlanStep, index: int) -> PlanStep:
    object.__setattr__(step, "index", index)  # nothing else refers to it before it is declared
    return step


def _difference(recorded: PlanStep, asked: PlanStep) -> str | None:
    if (recorded.kind, recorded.tool, recorded.workflow) != (asked.kind, asked.tool, asked.workflow):
        return f"the flow asks for {described(asked)} where its history has {described(recorded)}"
    if recorded.digest == asked.digest:
        return None
    before, after = recorded.input.value, asked.input.value
    names = [
        name for name in sorted({*before, *after}) if before.get(name) != after.get(name)
    ] if isinstance(before, dict) and isinstance(after, dict) and before else []  # fmt: skip
    which = f" ({', '.join(names)})" if names else ""
    hint = "; what changes by itself comes from ctx.now(), ctx.random() or ctx.uuid()"
    how = "another input" if asked.kind in (StepKind.TOOL, StepKind.FLOW) else "other terms"
    return f"the flow asks for {described(asked)} with {how} than its history has{which}{hint}"


def _foreign(awaited: Any) -> FlowUsageError:
    what = "something that only gives way" if awaited is None else f"{type(awaited).__name__}"
    return FlowUsageError(
        f"the flow awaits {what}, which is none of its steps: a flow awaits only what ctx gives "
        "(ctx.sleep instead of asyncio.sleep, ctx.gather instead of asyncio.gather), and does I/O in tools"
    )


def _failed(error: BaseException) -> FlowEnd:
    match error:
        case StepFailed():
            return FlowEnd(reason=error.reason, error={"step": error.step, **error.error})
        case NonDeterminismError():
            said = {"type": "NonDeterminismError", "message": str(error), "step": error.step, "code": "NONDETERMINISM"}
            return FlowEnd(reason=RunReason.RESUME_FAILED, error=said)
        case _:
            kind = type(error).__name__
            said = {"type": kind, "message": _text(str(error) or kind)}
            where = _where(error)
            return FlowEnd(reason=RunReason.TERMINAL_ERROR, error=said | ({"where": where} if where else {}))


def _text(message: str) -> str:
    return message[:2000].replace("\x00", "�").encode(errors="replace").decode()


def _where(error: BaseException) -> str | None:
    """Return the last line that is not in this package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != _HERE]
    return f"{frames[-1].name} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else None
