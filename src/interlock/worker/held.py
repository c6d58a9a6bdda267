"""A run in this worker's hands: its lease and journal, what goes with its next write, and giving it back."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from interlock.engine import inbox
from interlock.engine.append import Answer, Beside, Lease, Write
from interlock.engine.children import Child
from interlock.engine.observe import observe_run_end
from interlock.engine.receipts import Intent, Seal
from interlock.engine.workers import DEFAULT_LABEL
from interlock.errors import LeaseLost
from interlock.journal import Ask, Awaited, Journal, Leave, StepFold
from interlock.lifecycle import RunState
from interlock.store.pool import FOREVER, Row

if TYPE_CHECKING:
    from interlock.worker.loop import Worker


class HeldRun:
    """What every part of driving a run works on. They know this and each other, and this knows none of them."""

    __slots__ = (
        "_since", "_zero", "actor", "alone", "asks", "awaits", "children", "intents", "journal", "lease", "mail", "row",
        "seals", "spent_before", "told", "traceparent", "wake", "worker",
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
        self.journal: Journal
        # The database's time at the claim, and our clock's then: with both, `now` can tell the database's time.
        self._zero: datetime = row["now"]
        self._since = time.monotonic()
        self.mail: bool = row["inbox"] > 0
        # Set when something came that its driver may wait for: mail, a step's end, an order.
        self.wake = asyncio.Event()
        # The step that is done with nothing beside it, and since when.
        self.alone: tuple[StepFold, float] | None = None
        # What goes with the next write.
        self.asks: list[Ask] = []
        self.awaits: list[Awaited] = []
        self.intents: list[Intent] = []
        self.seals: list[Seal] = []
        self.children: list[Child] = []
        # The cost that the run's row has counted so far. The journal may have more, written by a worker that was lost
        # before it could give the run back.
        self.spent_before = float(row["cost_usd"])
        # The last write that the driver did not wait for: see `Teller`.
        self.told: asyncio.Future[Answer] | None = None
        self.traceparent: str | None = None

    def now(self) -> datetime:
        if (fixed := self.worker.database.clock()) is not None:
            return max(fixed, self._zero)  # time stands still until somebody moves it
        return self._zero + timedelta(seconds=time.monotonic() - self._since)

    def not_before(self, at: datetime) -> None:
        """Whoever woke the run may have looked at the clock after the claim did: what was due then is due now."""
        self._zero = max(self._zero, at)

    @property
    def seconds_held(self) -> float:
        return time.monotonic() - self._since

    # ------------------------------------------------------------ labels

    @property
    def is_away(self) -> bool:
        """In the lane of a label, and not where it is at home: with its tenant or its job."""
        return bool(self.lease.side_id != self.row["job_id"])

    def is_served_here(self, fold: StepFold) -> bool:
        """Steps that ask for a label go to workers that have it, all others to where the run is at home."""
        if fold.step.runs_on is not None:
            return self.worker.serves(fold.step.runs_on)
        return not self.is_away or (self.row["job_id"] is None and self.worker.serves(DEFAULT_LABEL))

    # ------------------------------------------------------------ writing

    async def save(self, drained: list[int] | None = None, *, stops: bool = False) -> Answer:
        await self._told()
        beside = self._take_beside(stops=stops)
        return await self._write(Write(self.lease, self.journal.take_unsaved(), beside=beside, drained=drained or []))

    def _take_beside(self, *, stops: bool = False) -> Beside:
        """What has to be committed with the entries that speak of it."""
        beside = Beside(
            self.asks, self.intents, self.seals, self.awaits, stops, self.children,
            stops_children=stops and self.journal.has_children(),
        )  # fmt: skip
        self.asks, self.intents, self.seals, self.awaits, self.children = [], [], [], [], []
        return beside

    async def _write(self, write: Write) -> Answer:
        answer = await self.worker.flusher.put(write)
        if not answer.kept and write.leave is None:
            raise LeaseLost("somebody else holds the run now")
        if answer.nudged:
            self.mail = True
        return answer

    async def _told(self) -> None:
        """Wait for the write that nobody waited for. If it could not be stored, nothing after it can be either: that
        would leave a gap in the numbers."""
        while (told := self.told) is not None:
            if told.done():
                self.told = None
                told.result()
            else:
                await asyncio.wait([told])

    # ------------------------------------------------------------ letting go

    async def let_go(self, leave: Leave, undeployed: str | None = None) -> bool:
        """A run that others go on with at once stays in its lane: the step that was begun there is for workers of that
        lane. A run that waits or ended goes back to its own lane."""
        return await self._depart(leave, self.lease.side_id if leave.queue else self.row["job_id"], undeployed)

    async def yield_lease(self) -> bool:
        """To whoever claims the run next."""
        return await self.let_go(Leave(self.journal.status, queue=True))

    async def move_to(self, label: str | None) -> bool:
        """Into the lane that the workers for the next step claim from."""
        tenant_id = self.lease.tenant_id
        lane = self.row["job_id"] if label is None else await self.worker.lane_for(tenant_id, label)
        return await self._depart(Leave(self.journal.status, queue=True), lane)

    async def _depart(self, leave: Leave, lane: UUID | None, undeployed: str | None = None) -> bool:
        """Give the lease back with the last entries. If mail came meanwhile, the entries are kept and we go on."""
        if self.awaits:
            # Saved while the run is still ours: the event that it is to wait for may have come already, and is mail
            # then.
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
        if not await inbox.read(self.worker.database, self.lease.run_id, patience=FOREVER):
            raise LeaseLost("somebody else holds the run now")
        return False

    @property
    def _has_followers(self) -> bool:
        """A parent that waits for its end, or messages that wait for their turn."""
        return self.lease.has_parent or self.row["session_id"] is not None

    def _observe_end(self, leave: Leave) -> None:
        if leave.reason is None:
            return
        duration_ms = (self.now() - self.row["created_at"]).total_seconds() * 1000
        # The spans of its steps end by this machine's clock. If the database's is behind, theirs would end after its.
        ended = max(self.now(), datetime.now(UTC))
        observe_run_end(self.row, leave.status, leave.reason, ended=ended, duration_ms=duration_ms)
