"""A step prepared for execution: its tool, its arguments, and the name of its effect."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor as Threads
from dataclasses import dataclass, field
from typing import Any

from interlock.audit.redact import Scrubber
from interlock.definition.expression import Elsewhere, Scope
from interlock.engine.access.key_store import Salts
from interlock.engine.access.secrets import Secrets
from interlock.errors import Retryable, Terminal
from interlock.ids import ReceiptId, RunId, TenantId
from interlock.journal import StepSnapshot
from interlock.lifecycle import StepState
from interlock.policy.action import ProposedAction
from interlock.tools import Context, RegisteredTool, Registry, Veil, default_key
from interlock.worker.local_lease import LocalLease
from interlock.worker.outcome import Failed, failure


@dataclass(frozen=True, slots=True)
class ExecutionResources:
    """The resources that all executions in this process share."""

    tools: Registry
    threads: Threads
    max_output_bytes: int
    salts: Salts
    secrets: Secrets
    # The lease of the worker that this process currently is.
    lease: LocalLease = field(default_factory=LocalLease)


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """Where a run comes from. This decides which tools and secrets its steps may use."""

    run_id: RunId
    tenant_id: TenantId
    tenant: str
    workspace_id: str | None


@dataclass(slots=True)
class PreparedCall:
    """A prepared step: the tool, its arguments and, for a write, the proposed action."""

    fold: StepSnapshot
    tool: RegisteredTool
    arguments: dict[str, Any]
    context: Context
    scope: Scope
    origin: RunOrigin
    action: ProposedAction | None = None
    receipt_id: ReceiptId | None = None
    # For a read that was judged: the decision that allowed it.
    grounds: dict[str, Any] | None = None
    # Values that must not be shown: the tool's secret fields and, once opened, the secrets it is given.
    hidden: set[str] = field(default_factory=set)
    # A write that may have happened before the database was restored: see `Journal.may_have_done`.
    may_have_been_done: bool = False
    # The call's thread did not end when asked to, so the call may still act.
    left_behind: bool = False

    @property
    def timeout(self) -> float | None:
        return self.fold.step.timeout or self.tool.timeout

    def hide(self, values: Iterable[str], scrubber: Scrubber | None = None) -> None:
        """Hide the values from now on. `scrubber` may be an existing one that knows exactly these values."""
        new = frozenset(values) - self.hidden
        if new:
            self.context.scrubber = scrubber if scrubber and not self.hidden else Scrubber(self.hidden | new)
            self.hidden |= new


def prepare(
    shop: ExecutionResources,
    fold: StepSnapshot,
    scope: Scope,
    origin: RunOrigin,
    effect: Callable[[], str] | None = None,
) -> PreparedCall | Failed:
    """Resolve the tool and render its input. Return Failed if the step cannot be called.

    `effect` returns the name of the effect if the tool gives none: see `effect_key`.
    """
    try:
        tool = find(shop.tools.of_tenant(origin.tenant), fold.step.tool or "")
    except Retryable as error:
        return failure(error)
    return prepare_as(tool, shop, fold, scope, origin, effect)


def prepare_as(
    tool: RegisteredTool,
    shop: ExecutionResources,
    fold: StepSnapshot,
    scope: Scope,
    origin: RunOrigin,
    effect: Callable[[], str] | None = None,
) -> PreparedCall | Failed:
    run_id, tenant_id = origin.run_id, origin.tenant_id
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
            attempt=fold.attempt + (fold.status == StepState.PENDING), lease_remaining=shop.lease.remaining,
        )  # fmt: skip
        call = PreparedCall(fold, tool, arguments, context, scope, origin, action)
        call.hide(veil.hidden)
        return call
    except Elsewhere:
        raise  # the caller gets the answer first and prepares the call again
    except (Retryable, Terminal) as error:
        return failure(error)
    except Exception as error:  # a template or an argument that cannot be evaluated
        return failure(Terminal(str(error) or type(error).__name__))


def propose_read(shop: ExecutionResources, call: PreparedCall) -> ProposedAction | Failed:
    """Return the action of a read, for a policy that has a rule about it."""
    try:
        veil = Veil(shop.salts(TenantId(call.context.tenant_id)) if call.tool.secret else None)
        return call.tool.propose(call.arguments, call.tool.shown(call.arguments, veil), call.fold.secrets)
    except Exception as error:
        return failure(Terminal(str(error) or type(error).__name__), call.context)


def effect_key(effect: str, action: ProposedAction) -> str:
    """Return the key of an effect that the tool does not name.

    An edited action is another effect and has another key.
    """
    return f"{effect}:{action.digest[:16]}"


def _begun_with(fold: StepSnapshot) -> str | None:
    """Return the key of an interrupted effect.

    The tool may name it differently now, but its system knows it by this key.
    """
    return fold.idempotency_key if fold.status == StepState.RUNNING and fold.receipt_id is not None else None


def find(tools: Registry, name: str) -> RegisteredTool:
    tool = tools.find(name)
    if tool is None:
        # Not terminal: the worker may be older than the workflow, and the next to try may have the tool.
        raise Retryable(tools.missing(name, "in this worker"))
    return tool
