"""The rows that leave the store, and the rows that statements take as arrays.

The fields of a record are the columns of the statements that return it, in their order; a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple, Protocol, TypeVar, dataclass_transform
from uuid import UUID

from pydantic import TypeAdapter

from interlock.ids import ApprovalId, JobId, QueueId, ReceiptId, RunId, SessionId, TenantId, WorkerId
from interlock.lifecycle import ApprovalState, ReceiptState, RunReason, RunState

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A frozen, slotted dataclass. The type checker refuses assignments to its fields.

    Python does not: with `frozen=True` it takes 9 µs to fill a row of 27 fields, and 0.6 µs without.
    """
    return dataclass(slots=True)(cls)


def from_json(kind: type[T], text: str) -> T:
    """Return a record that PostgreSQL rendered as JSON."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    made: T = _ADAPTERS[kind].validate_json(text)
    return made


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


# ---------------------------------------------------------------- runs


@record
class RunRecord:
    """A row of `run`."""

    id: RunId
    tenant_id: TenantId
    workspace_id: str | None
    workflow: str
    workflow_version: int
    has_concurrency_limit: bool
    status: RunState
    reason: RunReason | None
    input: str | None
    result: str | None
    error: str | None
    trigger: str
    requested_by: str
    requester: str | None
    session_id: SessionId | None
    session_run: int | None
    auto_approve: bool
    job_id: JobId | None
    parent_run_id: RunId | None
    parent_step: str | None
    resumed_from: RunId | None
    root_id: RunId | None
    resume_count: int
    cost_usd: Decimal
    seq: int
    lease_token: int
    lease_worker: WorkerId | None
    queue_id: QueueId
    pending_commands: int
    resume_at: datetime | None
    awaits_flow: str | None
    deadline_at: datetime | None
    watched_until: datetime | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    duration_ms: int | None


@record
class LockedRun(RunRecord):
    now: datetime


@record
class RunDetails(RunRecord):
    """With the last heartbeat of the worker that holds it, and the time of its last entry."""

    last_heartbeat_at: datetime | None
    updated_at: datetime | None


@record
class RunToShow(RunDetails):
    """With its journal entries, rows of `journal_entry`, if they were asked for."""

    entries: Sequence[Any] | None


class RunFacts(Protocol):
    """What a run's journal is read with: a row of `run`, or a claimed run."""

    @property
    def id(self) -> RunId: ...
    @property
    def tenant_id(self) -> TenantId: ...
    @property
    def workflow(self) -> str: ...
    @property
    def workflow_version(self) -> int: ...
    @property
    def input(self) -> str | None: ...
    @property
    def trigger(self) -> str: ...
    @property
    def requested_by(self) -> str: ...
    @property
    def created_at(self) -> datetime: ...


@record
class EarlierRun:
    """A run of the same session that came before."""

    id: RunId
    tenant_id: TenantId
    workflow: str
    workflow_version: int
    input: str | None
    trigger: str
    requested_by: str
    created_at: datetime
    session_run: int


@record
class EntryRecord:
    """An entry of a journal."""

    run_id: RunId
    seq: int
    at: datetime
    type: str
    step: str | None
    from_state: str | None
    event: str | None
    to_state: str | None
    attempt: int | None
    token: int
    actor: str
    data: str | None
    output: str | None


@record
class SessionEntry(EntryRecord):
    """An entry of one of a session's runs."""

    session_run: int
    input: str | None


def entry_record(row: Any) -> EntryRecord:
    """Return the record of a whole row of `journal_entry`, whose third column is the tenant."""
    return EntryRecord(row[0], row[1], *row[3:])


@record
class StatusCount:
    status: str
    count: int


@record
class RunSignal:
    """A command from one run to another."""

    id: int
    tenant_id: TenantId
    from_run: RunId
    to_run: RunId
    command: str
    step: str | None
    at: datetime


@record
class StartedRuns:
    """The time of their creation, and the latest minute in which the tenant's rate limit lets one of them go on."""

    now: datetime
    last_place: datetime | None


@record
class PendingCommand:
    id: int
    run_id: RunId
    command: str
    step: str | None
    actor: str
    data: str
    at: datetime


class NewRun(NamedTuple):
    """A run to be started."""

    run_id: RunId
    tenant_id: TenantId
    workspace_id: str | None
    workflow: str
    workflow_version: int
    has_concurrency_limit: bool
    input: str
    trigger: str
    requested_by: str
    requester: str | None
    deadline_seconds: float | None = None
    watch_seconds: float | None = None
    job_id: JobId | None = None
    parent_run_id: RunId | None = None
    parent_step: str | None = None
    session_id: SessionId | None = None
    session_run: int | None = None
    auto_approve: bool = False
    resumed_from: RunId | None = None
    resume_count: int = 0
    root_id: UUID | None = None


# ---------------------------------------------------------------- writing runs


class NewEntry(NamedTuple):
    """A journal entry to be added, with the fencing token that its writer holds."""

    run_id: RunId
    token: int
    seq: int
    type: str
    step: str | None
    from_state: str | None
    event: str | None
    to_state: str | None
    attempt: int | None
    actor: str
    data: str | None
    output: str | None


class RunRelease(NamedTuple):
    """A run that its writer gives back: the new values of its row.

    `left_queue_id`: a lease that came from this queue ends. `priority`: the run becomes ready in `queue_id`.
    """

    run_id: RunId
    token: int
    from_status: RunState
    to_status: RunState
    reason: RunReason | None
    result: str | None
    error: str | None
    resume_at: datetime | None
    awaits_flow: str | None
    seq: int
    cost_usd: float
    left_queue_id: QueueId | None
    queue_id: QueueId
    priority: int | None
    is_new: bool
    reclaimed: bool


class NewApproval(NamedTuple):
    """An approval to be opened; `expires_in` and `escalate_after` are seconds."""

    id: ApprovalId
    tenant_id: TenantId
    run_id: RunId
    step: str
    kind: str
    tier: str
    two_person: bool
    summary: str
    action: str
    digest: str
    requested_by: str
    rule_ids: Sequence[str]
    reason: str | None
    reason_required: bool
    policy_digest: str | None
    approvers: Sequence[str]
    escalate_to: Sequence[str]
    escalate_after: float | None
    expires_in: float
    receipt_id: ReceiptId | None


@record
class WithdrawnApproval:
    status: ApprovalState
    requested_at: datetime
    resolved_at: datetime


class NewIntent(NamedTuple):
    """An effect that a step will attempt."""

    id: ReceiptId
    tenant_id: TenantId
    run_id: RunId
    step: str
    tool: str
    idempotency_key: str
    action_digest: str
    attempt: int
    request_metadata: str
    undo: str | None


@record
class DeclaredIntent:
    """An intent that met an earlier receipt with its key: the receipt that it retries, or one that blocks it."""

    intent_id: ReceiptId
    goes_ahead: bool
    idempotency_key: str
    id: ReceiptId | None
    run_id: RunId | None
    step: str | None
    status: ReceiptState | None
    action_digest: str | None
    output: str | None
    undone_by: RunId | None
    undone_in: str | None


@record
class OtherReversal:
    """The reversal of an effect by another run."""

    receipt_id: ReceiptId
    run_id: RunId
    step: str
    state: str


class ReceiptResult(NamedTuple):
    """The result of an attempted effect."""

    receipt_id: ReceiptId
    status: str
    output: str | None
    response_metadata: str | None
    acting_worker: WorkerId | None
    error: str | None


class NewSubscription(NamedTuple):
    """A step that waits for an external event."""

    tenant_id: TenantId
    run_id: RunId
    step: str
    type: str
    correlation: str
    timeout_at: datetime | None


@record
class ExternalEvent:
    """A row of `external_event`."""

    tenant_id: TenantId
    id: str
    number: int
    workspace_id: str | None
    type: str
    correlation: str
    payload: str
    sent_by: str
    received_at: datetime
    expires_at: datetime
    run_id: RunId | None
    step: str | None
    consumed_at: datetime | None


@record
class OverdueWait:
    tenant_id: TenantId
    run_id: RunId
    step: str


@record
class ForgottenEvents:
    """How many expired events were deleted, and how many of them no step had waited for."""

    gone: int
    unmatched: int


@record
class WaitingStep:
    """A step that waits for an external event."""

    run_id: RunId
    step: str


@record
class ArrivedEvent:
    """An external event that had arrived before the step subscribed."""

    run_id: RunId
    step: str
    id: str
    type: str
    correlation: str
    payload: str
    sent_by: str
    received_at: datetime


@record
class WrittenRun:
    run_id: RunId
    has_pending_commands: bool


# ---------------------------------------------------------------- the queue


@record
class ClaimableQueue:
    """`places`: how many more runs it may have in flight, or None without a cap."""

    id: QueueId
    tenant_id: TenantId
    weight: float
    virtual_time: float
    places: int | None
    places_of_tenant: int | None


class QueueShare(NamedTuple):
    """How many runs a claim takes from a queue at most."""

    queue_id: QueueId
    runs: int


class QueueMove(NamedTuple):
    """A run that enters or leaves the queue.

    `left_queue_id`: a lease that came from this queue ends. `queue_id`: the run becomes ready in this queue.
    `workflow`: set if its workflow has a cap.
    """

    tenant_id: TenantId
    run_id: RunId
    left_queue_id: QueueId | None
    queue_id: QueueId | None
    workflow: str | None
    priority: int | None
    is_new: bool
    reclaimed: bool


class DispatchSlot(NamedTuple):
    """A worker's offer to receive the next new run at once: the notification channel, and the tenants it serves."""

    worker_id: WorkerId
    actor: str
    channel: str
    tenants: Sequence[TenantId] | None


@record
class ClaimedRun:
    """A run with what its holder needs to know: a row of the view `leased_run`."""

    id: RunId
    tenant_id: TenantId
    workspace_id: str | None
    workflow: str
    workflow_version: int
    has_concurrency_limit: bool
    status: RunState
    input: str | None
    trigger: str
    seq: int
    lease_token: int
    lease_worker: WorkerId
    queue_id: QueueId
    pending_commands: int
    requested_by: str
    requester: str | None
    parent_run_id: RunId | None
    session_id: SessionId | None
    session_run: int | None
    auto_approve: bool
    job_id: JobId | None
    root_id: RunId | None
    cost_usd: Decimal
    created_at: datetime
    started_at: datetime | None
    deadline_at: datetime | None
    max_writes_per_run: int | None
    policy_version: int
    now: datetime
    is_new: bool
    reclaimed: bool
    is_dispatched: bool


# A run as the gate judges its actions: its row, or its claim.
AnyRun = RunRecord | ClaimedRun


@record
class QueuedRun:
    """What the queue said of a run that a command took out of it."""

    is_new: bool
    reclaimed: bool


@record
class ResumedRun:
    run_id: RunId
    status_before: RunState


@record
class ReclaimedRun:
    """A run that was taken back from a lost worker."""

    run_id: RunId
    worker_id: WorkerId
    resume_count: int
    worker: str
    heartbeat_at: datetime


@record
class Recount:
    """A queue's number of runs in flight: what its row said, and what the leases say."""

    before: int
    after: int


@record
class WorkflowWithRoom:
    tenant_id: TenantId
    workflow: str


@record
class TenantName:
    id: TenantId
    name: str
