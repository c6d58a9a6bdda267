"""A run leased to this worker: its lease and journal, the contents of its next write, and the release of its lease."""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from interlock.engine.policies import tenant_of
from interlock.engine.proof.instrumentation import observe_run_end
from interlock.engine.queueing.workers import DEFAULT_LABEL
from interlock.engine.writing.change import (
    CancelChildren,
    DrainCommands,
    Effect,
    RunChange,
    StopRun,
    SubscribeEvent,
    WrittenRow,
)
from interlock.engine.writing.commit import CommitResult
from interlock.engine.writing.deliver import commands_for
from interlock.engine.writing.effects import effects_of
from interlock.errors import LeaseLost
from interlock.ids import QueueId
from interlock.journal import Entry, Journal, LeaseRelease, RunCommand, StepSnapshot
from interlock.lifecycle import RunReason
from interlock.store.pool import NO_TIMEOUT
from interlock.store.records import ClaimedRun
from interlock.worker.tool_call import RunOrigin

if TYPE_CHECKING:
    from interlock.worker.worker import Worker


class LeasedRun:
    """The state that the parts of the run driver share. They know this class and each other; it knows none of them."""

    __slots__ = (
        "_since", "_zero", "actor", "alone", "effects", "has_commands", "journal", "lease", "origin", "reported", "row",
        "traceparent", "wake", "worker",
    )  # fmt: skip

    def __init__(self, worker: "Worker", row: ClaimedRun) -> None:
        self.worker = worker
        self.actor = worker.me.actor
        self.row = row
        self.lease = WrittenRow(
            row.id, row.tenant_id, row.lease_token, row.status, row.requested_by, row.parent_run_id is not None,
            row.queue_id, leased_from=row.queue_id, is_dispatched=row.is_dispatched,
        )  # fmt: skip
        self.origin = RunOrigin(row.id, row.tenant_id, tenant_of(row), row.workspace_id)
        self.journal: Journal
        # The database's time at the claim, and our monotonic clock then. `now` derives the database's time from both.
        self._zero: datetime = row.now
        self._since = time.monotonic()
        self.has_commands = row.pending_commands > 0
        # Set when something arrives that the driver may wait for: a command, the end of a step, an order.
        self.wake = asyncio.Event()
        # The step that runs with nothing beside it, and when it started.
        self.alone: tuple[StepSnapshot, float] | None = None
        # The effects to commit with the entries that mention them.
        self.effects: list[Effect] = []
        # The last write that the driver did not wait for: see `report`.
        self.reported: asyncio.Future[CommitResult] | None = None
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
        return self.lease.queue_id != self.home_queue_id

    @property
    def home_queue_id(self) -> QueueId:
        return QueueId(self.row.job_id or self.row.tenant_id)

    def is_served_here(self, fold: StepSnapshot) -> bool:
        """Return True if this worker may run the step.

        A step with a label goes to workers that serve it. Other steps run in the run's home queue.
        """
        if fold.step.runs_on is not None:
            return self.worker.serves(fold.step.runs_on)
        return not self.is_away or (self.row.job_id is None and self.worker.serves(DEFAULT_LABEL))

    # ------------------------------------------------------------ writing

    async def save(self, *, drained: Sequence[int] = (), stops: bool = False) -> CommitResult:
        """Commit the unsaved entries with their effects. `stops`: the run goes no further and undoes its effects."""
        await self._reported()
        entries, effects = self.journal.take_unsaved(), self._take_effects()
        if drained:
            effects = (DrainCommands(tuple(drained)), *effects)
        if stops:
            effects = (*effects, StopRun(), *self._follows(entries))
        return await self._write(RunChange(self.lease, entries, effects=effects))

    def _take_effects(self) -> tuple[Effect, ...]:
        effects, self.effects = tuple(self.effects), []
        return effects

    def _follows(self, entries: Sequence[Entry], reason: RunReason | None = None) -> tuple[Effect, ...]:
        return effects_of(entries, reason, has_children=self.journal.has_children(), has_parent=self.lease.has_parent)

    async def _write(self, change: RunChange) -> CommitResult:
        result = await self.worker.flusher.put(change)
        if not result.kept and change.release is None:
            raise LeaseLost("another worker holds the run now")
        if result.has_pending_commands:
            self.has_commands = True
        return result

    def report(self, entries: list[Entry]) -> None:
        """Commit entries without waiting, so that the step continues. The run's next write checks the result."""
        self.reported = self.worker.flusher.put(RunChange(self.lease, entries))

    async def _reported(self) -> None:
        """Wait for the write that the driver did not wait for.

        If it failed, later writes must fail too: they would leave a gap in the sequence numbers.
        """
        while (reported := self.reported) is not None:
            if reported.done():
                self.reported = None
                reported.result()
            else:
                await asyncio.wait([reported])

    # ------------------------------------------------------------ releasing the lease

    async def release_lease(self, release: LeaseRelease) -> bool:
        """Release the lease.

        A requeued run stays in its queue, because a step that started there belongs to that queue's workers. A waiting
        or ended run returns to its home queue.
        """
        return await self._commit_release(release, self.lease.queue_id if release.queue else self.home_queue_id)

    async def yield_lease(self) -> bool:
        """Requeue the run for the next worker that claims it."""
        return await self.release_lease(LeaseRelease(self.journal.status, queue=True))

    async def move_to(self, label: str | None) -> bool:
        """Requeue the run in the queue from which workers for the next step claim."""
        queue_id = self.home_queue_id
        if label is not None:
            queue_id = await self.worker.queue_for(self.lease.tenant_id, label)
        return await self._commit_release(LeaseRelease(self.journal.status, queue=True), queue_id)

    async def _commit_release(self, release: LeaseRelease, queue_id: QueueId) -> bool:
        """Release the lease with the last entries.

        If a command arrived in the interim, keep the entries and return False.
        """
        if any(isinstance(effect, SubscribeEvent) for effect in self.effects):
            # Save while we still hold the lease: the awaited event may already have arrived, and then is a command.
            await self.save()
            if self.has_commands:
                return False
        await self._reported()
        entries, effects = self.journal.take_unsaved(), self._take_effects()
        leaving = [*entries, release.entry] if release.entry else entries
        follows = self._follows(leaving, release.reason)
        seq = leaving[-1].seq if leaving else self.journal.seq
        change = RunChange(
            self.lease, leaving, release, seq, self.journal.cost_usd(), (*effects, *follows), next_queue_id=queue_id
        )
        if (await self._write(change)).kept:
            self._observe_end(release)
            if CancelChildren() in follows or (self._has_followers and release.reason is not None):
                self.worker.deliver_signals()
            return True
        if entries:
            await self._write(RunChange(self.lease, entries, effects=effects))
        self.has_commands = True
        if not await self.pending_commands():
            raise LeaseLost("another worker holds the run now")
        return False

    async def pending_commands(self) -> list[RunCommand]:
        """Return the commands that wait for this run. They stay until the write with their results is committed."""
        return await commands_for(self.worker.database.patiently(NO_TIMEOUT), self.lease.run_id)

    @property
    def _has_followers(self) -> bool:
        """Return True if a parent run or queued messages wait for the end of this run."""
        return self.lease.has_parent or self.row.session_id is not None

    def _observe_end(self, release: LeaseRelease) -> None:
        if release.reason is None:
            return
        duration_ms = (self.now() - self.row.created_at).total_seconds() * 1000
        # Spans of steps end by this machine's clock. If the database's clock is behind, they would end after the run's
        # span.
        ended = max(self.now(), datetime.now(UTC))
        observe_run_end(self.row, release.status, release.reason, ended=ended, duration_ms=duration_ms)
