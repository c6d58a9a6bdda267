"""A run leased to this worker: its lease and journal, the contents of its next write, and the release of its lease."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from interlock.engine.effects.receipts import EffectIntent, ReceiptResult
from interlock.engine.policies import tenant_of
from interlock.engine.proof.instrumentation import observe_run_end
from interlock.engine.queueing.workers import DEFAULT_LABEL
from interlock.engine.runs.child_runs import Child
from interlock.engine.writing import command_queue as inbox
from interlock.engine.writing.journal_writer import AppendResult, Lease, SideEffects, Write
from interlock.errors import LeaseLost
from interlock.journal import ApprovalRequest, EventSubscription, Journal, LeaseRelease, StepSnapshot
from interlock.lifecycle import RunState
from interlock.store.pool import NO_TIMEOUT, Row
from interlock.worker.tool_call import RunOrigin

if TYPE_CHECKING:
    from interlock.worker.worker import Worker


class LeasedRun:
    """The state that the parts of the run driver share. They know this class and each other; it knows none of them."""

    __slots__ = (
        "_since", "_zero", "actor", "alone", "asks", "awaits", "children", "intents", "journal", "lease", "mail",
        "origin", "row", "seals", "spent_before", "told", "traceparent", "wake", "worker",
    )  # fmt: skip

    def __init__(self, worker: "Worker", row: Row) -> None:
        self.worker = worker
        self.actor = worker.me.actor
        self.row = row
        self.lease = Lease(
            row["id"],
            row["tenant_id"],
            row["lease_token"],
            RunState(row["status"]),
            row["workflow"],
            row["requested_by"],
            row["parent_run_id"] is not None,
            row["side_id"],
            seated=row["seated"],
        )
        self.origin = RunOrigin(row["id"], row["tenant_id"], tenant_of(row), row["workspace_id"])
        self.journal: Journal
        # The database's time at the claim, and our monotonic clock then. `now` derives the database's time from both.
        self._zero: datetime = row["now"]
        self._since = time.monotonic()
        self.mail: bool = row["inbox"] > 0
        # Set when something arrives that the driver may wait for: mail, the end of a step, an order.
        self.wake = asyncio.Event()
        # The step that runs with nothing beside it, and when it started.
        self.alone: tuple[StepSnapshot, float] | None = None
        # The contents of the next write.
        self.asks: list[ApprovalRequest] = []
        self.awaits: list[EventSubscription] = []
        self.intents: list[EffectIntent] = []
        self.seals: list[ReceiptResult] = []
        self.children: list[Child] = []
        # The cost that the run's row already includes. The journal may have more, written by a worker that was lost
        # before it could release the run.
        self.spent_before = float(row["cost_usd"])
        # The last write that the driver did not wait for: see `ProgressReporter`.
        self.told: asyncio.Future[AppendResult] | None = None
        self.traceparent: str | None = None

    def now(self) -> datetime:
        if (fixed := self.worker.database.clock()) is not None:
            return max(fixed, self._zero)  # with a fixed clock, time stands still until a test moves it
        return self._zero + timedelta(seconds=time.monotonic() - self._since)

    def not_before(self, at: datetime) -> None:
        """Move the run's clock forward.

        The process that woke the run may have read the clock after the claim; a timer that was due then must be due
        now.
        """
        self._zero = max(self._zero, at)

    @property
    def seconds_held(self) -> float:
        return time.monotonic() - self._since

    # ------------------------------------------------------------ labels

    @property
    def is_away(self) -> bool:
        """Return True if the run is in the queue of a label, not in its home queue (its tenant's or its job's)."""
        return bool(self.lease.side_id != self.row["job_id"])

    def is_served_here(self, fold: StepSnapshot) -> bool:
        """Return True if this worker may run the step.

        A step with a label goes to workers that serve it. Other steps run in the run's home queue.
        """
        if fold.step.runs_on is not None:
            return self.worker.serves(fold.step.runs_on)
        return not self.is_away or (self.row["job_id"] is None and self.worker.serves(DEFAULT_LABEL))

    # ------------------------------------------------------------ writing

    async def save(self, drained: list[int] | None = None, *, stops: bool = False) -> AppendResult:
        await self._told()
        beside = self._take_beside(stops=stops)
        return await self._write(Write(self.lease, self.journal.take_unsaved(), beside=beside, drained=drained or []))

    def _take_beside(self, *, stops: bool = False) -> SideEffects:
        """Return the side effects to commit with the entries that mention them."""
        beside = SideEffects(
            self.asks, self.intents, self.seals, self.awaits, stops, self.children,
            stops_children=stops and self.journal.has_children(),
        )  # fmt: skip
        self.asks, self.intents, self.seals, self.awaits, self.children = [], [], [], [], []
        return beside

    async def _write(self, write: Write) -> AppendResult:
        answer = await self.worker.flusher.put(write)
        if not answer.kept and write.leave is None:
            raise LeaseLost("somebody else holds the run now")
        if answer.nudged:
            self.mail = True
        return answer

    async def _told(self) -> None:
        """Wait for the write that the driver did not wait for.

        If it failed, later writes must fail too: they would leave a gap in the sequence numbers.
        """
        while (told := self.told) is not None:
            if told.done():
                self.told = None
                told.result()
            else:
                await asyncio.wait([told])

    # ------------------------------------------------------------ releasing the lease

    async def release_lease(self, leave: LeaseRelease, undeployed: str | None = None) -> bool:
        """Release the lease.

        A requeued run stays in its queue, because a step that started there belongs to that queue's workers. A waiting
        or ended run returns to its home queue.
        """
        return await self._commit_release(leave, self.lease.side_id if leave.queue else self.row["job_id"], undeployed)

    async def yield_lease(self) -> bool:
        """Requeue the run for the next worker that claims it."""
        return await self.release_lease(LeaseRelease(self.journal.status, queue=True))

    async def move_to(self, label: str | None) -> bool:
        """Requeue the run in the queue from which workers for the next step claim."""
        tenant_id = self.lease.tenant_id
        lane = self.row["job_id"] if label is None else await self.worker.lane_for(tenant_id, label)
        return await self._commit_release(LeaseRelease(self.journal.status, queue=True), lane)

    async def _commit_release(self, leave: LeaseRelease, lane: UUID | None, undeployed: str | None = None) -> bool:
        """Release the lease with the last entries.

        If mail arrived in the interim, keep the entries and return False.
        """
        if self.awaits:
            # Save while we still hold the lease: the awaited event may already have arrived, and then counts as mail.
            await self.save()
            if self.mail:
                return False
        await self._told()
        entries, beside = self.journal.take_unsaved(), self._take_beside()
        kept_back = beside
        if leave.reason is not None and self.journal.has_children():
            beside = replace(beside, stops_children=True)
        if undeployed is not None:
            beside = replace(beside, undeployed=undeployed)
        leaving = [*entries, leave.entry] if leave.entry else entries
        seq = leaving[-1].seq if leaving else self.journal.seq
        cost = self.journal.cost_usd() - self.spent_before
        write = Write(self.lease, leaving, leave, seq=seq, cost_usd=cost, beside=beside, next_side=lane)
        answer = await self._write(write)
        if answer.kept:
            self._observe_end(leave)
            if beside.stops_children or (self._has_followers and leave.reason is not None):
                self.worker.run_errands()
            return True
        if entries:
            await self._write(Write(self.lease, entries, beside=kept_back))
        self.mail = True
        if not await inbox.read(self.worker.database, self.lease.run_id, patience=NO_TIMEOUT):
            raise LeaseLost("somebody else holds the run now")
        return False

    @property
    def _has_followers(self) -> bool:
        """Return True if a parent run or queued messages wait for the end of this run."""
        return self.lease.has_parent or self.row["session_id"] is not None

    def _observe_end(self, leave: LeaseRelease) -> None:
        if leave.reason is None:
            return
        duration_ms = (self.now() - self.row["created_at"]).total_seconds() * 1000
        # Spans of steps end by this machine's clock. If the database's clock is behind, they would end after the run's
        # span.
        ended = max(self.now(), datetime.now(UTC))
        observe_run_end(self.row, leave.status, leave.reason, ended=ended, duration_ms=duration_ms)
