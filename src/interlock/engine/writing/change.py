"""What one write changes: the entries of a run, the release of the run, and effects on other rows."""

from dataclasses import dataclass

from interlock.engine.effects.receipts import EffectIntent, EffectResult
from interlock.engine.runs.child_runs import Child
from interlock.ids import QueueId, RunId, TenantId
from interlock.journal import ApprovalRequest, Entry, EventSubscription, LeaseRelease
from interlock.lifecycle import RunState


@dataclass(frozen=True, slots=True)
class OpenApproval:
    request: ApprovalRequest


@dataclass(frozen=True, slots=True)
class SubscribeEvent:
    subscription: EventSubscription


@dataclass(frozen=True, slots=True)
class DeclareIntent:
    intent: EffectIntent


@dataclass(frozen=True, slots=True)
class CompleteReceipt:
    result: EffectResult


@dataclass(frozen=True, slots=True)
class StartChild:
    child: Child


@dataclass(frozen=True, slots=True)
class DrainCommands:
    """The entries carry the results of these commands."""

    command_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopRun:
    """The run goes no further and undoes its effects. Its holder keeps the lease for that."""


@dataclass(frozen=True, slots=True)
class WithdrawPending:
    """Withdraw open approvals and event subscriptions, and mark unfinished effects as in doubt."""


@dataclass(frozen=True, slots=True)
class CancelChildren:
    """Cancel the runs that the run started and that have not ended."""


@dataclass(frozen=True, slots=True)
class NotifyParent:
    """Deliver the end of the run to the step that waits for it."""


Effect = (
    OpenApproval | SubscribeEvent | DeclareIntent | CompleteReceipt | StartChild
    | DrainCommands | StopRun | WithdrawPending | CancelChildren | NotifyParent
)  # fmt: skip


@dataclass(slots=True)
class WrittenRow:
    """The row of the run that a write changes, as its writer knows it.

    A worker holds a lease with this token. `status` is the one in the row, which changes only when the lease is
    released.
    `leased_from` is the queue that it was claimed from, or None if a command has locked the row instead.
    """

    run_id: RunId
    tenant_id: TenantId
    token: int
    status: RunState
    requested_by: str
    has_parent: bool
    queue_id: QueueId
    leased_from: QueueId | None = None
    # Whether the run arrived through the worker's dispatch slot.
    is_dispatched: bool = False


@dataclass(slots=True)
class RunChange:
    """`next_queue_id`: the queue that the released run belongs to from now on. `is_new` and `reclaimed` say what the
    queue said of a run that a command took out of it."""

    row: WrittenRow
    entries: list[Entry]
    release: LeaseRelease | None = None
    seq: int = 0
    cost_usd: float = 0.0
    effects: tuple[Effect, ...] = ()
    next_queue_id: QueueId | None = None
    reclaimed: bool = False
