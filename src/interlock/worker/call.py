"""A step made ready to be executed: its tool, what that is called with, and the name of its effect."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor as Threads
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from interlock.definition.expression import Scope
from interlock.engine.keyfiles import Salts
from interlock.engine.secrets import Secrets
from interlock.errors import Retryable, Terminal
from interlock.governance.action import ProposedAction
from interlock.governance.redact import Scrubber
from interlock.journal import StepFold
from interlock.lifecycle import StepState
from interlock.tools import Context, Registry, Tool, Veil, default_key
from interlock.worker.outcome import Failed, failure


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every execution in this process shares."""

    tools: Registry
    threads: Threads
    max_output_bytes: int
    salts: Salts
    secrets: Secrets


@dataclass(slots=True)
class Call:
    """A step made ready: the tool, what it is called with and, for a write, the action that is proposed."""

    fold: StepFold
    tool: Tool
    arguments: dict[str, Any]
    context: Context
    scope: Scope
    action: ProposedAction | None = None
    receipt_id: UUID | None = None
    # For a read that was judged: the decision that let it through.
    grounds: dict[str, Any] | None = None
    # Values that must not be seen: what the tool calls secret and, once they are opened, the secrets it is given.
    hidden: set[str] = field(default_factory=set)
    # In a thread that did not end when it was told to: what it does, it does still.
    left_behind: bool = False

    @property
    def timeout(self) -> float | None:
        return self.fold.step.timeout or self.tool.timeout

    def hide(self, values: Iterable[str], scrubber: Scrubber | None = None) -> None:
        """From now on; `scrubber` is one that knows exactly these, if somebody has made it already."""
        new = frozenset(values) - self.hidden
        if new:
            self.context.scrubber = scrubber if scrubber and not self.hidden else Scrubber(self.hidden | new)
            self.hidden |= new


def prepare(
    shop: Workshop, fold: StepFold, scope: Scope, run_id: UUID, tenant_id: UUID,
    effect: Callable[[], str] | None = None,
) -> Call | Failed:  # fmt: skip
    """Resolve the tool and render its input. A step that cannot be called has failed.

    `effect` says what its effect is called if its tool does not: see `effect_key`.
    """
    try:
        tool = find(shop.tools, fold.step.tool or "")
    except Retryable as error:
        return failure(error)
    return prepare_as(tool, shop, fold, scope, run_id, tenant_id, effect)


def prepare_as(
    tool: Tool,
    shop: Workshop,
    fold: StepFold,
    scope: Scope,
    run_id: UUID,
    tenant_id: UUID,
    effect: Callable[[], str] | None = None,
) -> Call | Failed:
    try:
        arguments = tool.validated(fold.input(scope))
        veil = Veil(shop.salts(tenant_id) if tool.secret else None)
        shown = tool.shown(arguments, veil) if tool.writes or tool.secret else None
        action = tool.propose(arguments, shown, fold.secrets) if tool.writes and shown is not None else None
        context = Context(
            run_id=run_id, tenant_id=tenant_id, step=fold.step.key,
            idempotency_key=_begun_with(fold)
            or tool.effect_key(arguments, shown)
            or (effect_key(effect() if effect else default_key(run_id, fold.step.key), action) if action else None),
            attempt=fold.attempt + (fold.status == StepState.PENDING),
        )  # fmt: skip
        call = Call(fold, tool, arguments, context, scope, action)
        call.hide(veil.hidden)
        return call
    except (Retryable, Terminal) as error:
        return failure(error)
    except Exception as error:  # a template or an argument that nobody can make sense of
        return failure(Terminal(str(error) or type(error).__name__))


def propose_read(shop: Workshop, call: Call) -> ProposedAction | Failed:
    """The action of a tool that only reads, for a policy that has something to say about it."""
    try:
        veil = Veil(shop.salts(call.context.tenant_id) if call.tool.secret else None)
        return call.tool.propose(call.arguments, call.tool.shown(call.arguments, veil), call.fold.secrets)
    except Exception as error:
        return failure(Terminal(str(error) or type(error).__name__), call.context)


def effect_key(effect: str, action: ProposedAction) -> str:
    """For a tool that does not name its effects. An edited action is another effect, and has another key."""
    return f"{effect}:{action.digest[:16]}"


def _begun_with(fold: StepFold) -> str | None:
    """The key of an effect that was cut off. The tool may name it otherwise by now; its system knows it by this one."""
    return fold.idempotency_key if fold.status == StepState.RUNNING and fold.receipt_id is not None else None


def find(tools: Registry, name: str) -> Tool:
    tool = tools.find(name)
    if tool is None:
        # Not terminal: the worker may be older than the workflow, and the next to try may know it.
        raise Retryable(f"no tool {name} in this worker; add its file to INTERLOCK_TOOLS")
    return tool
