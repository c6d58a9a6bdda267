"""Append: the writes of many runs in one transaction, each accepted or refused by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import asyncpg
import orjson

from interlock.engine.effects import receipts
from interlock.engine.effects.receipts import EffectIntent, ExistingReceipt, ReceiptResult
from interlock.engine.ingress import event_subscriptions
from interlock.engine.queueing.leases import DispatchSlot, WorkerIdentity
from interlock.engine.runs import child_runs
from interlock.engine.runs.child_runs import Child
from interlock.engine.writing.run_commands import open_approvals, withdraw
from interlock.journal import ApprovalRequest, Entry, EventSubscription, LeaseRelease, encode
from interlock.lifecycle import RunReason, RunState
from interlock.store.pool import UNSTORABLE, Database, Tx


@dataclass(slots=True)
class Lease:
    """A run leased by this worker. `status` is the one in its row, which changes only at the lease release."""

    run_id: UUID
    tenant_id: UUID
    token: int
    status: RunState
    workflow: str
    requested_by: str
    has_parent: bool = False
    # The side lane that it was claimed from: a job's or a label's, or None.
    side_id: UUID | None = None
    # Whether its workflow has a cap, so that its release admits another run.
    capped: bool = False
    # Whether it arrived through the worker's dispatch slot and not from the queue.
    seated: bool = False


@dataclass(frozen=True, slots=True)
class SideEffects:
    """Rows committed with the entries: approvals, intents, their results, event subscriptions and child runs.

    `stops`: the run goes no further and undoes its effects; its row has to record that.
    """

    asks: list[ApprovalRequest] = field(default_factory=list)
    intents: list[EffectIntent] = field(default_factory=list)
    seals: list[ReceiptResult] = field(default_factory=list)
    awaits: list[EventSubscription] = field(default_factory=list)
    stops: bool = False
    children: list[Child] = field(default_factory=list)
    # The run goes no further, and its child runs are canceled.
    stops_children: bool = False
    # Set if the run is released because this worker lacks its flow: the name and version that the run waits for.
    undeployed: str | None = None

    def __bool__(self) -> bool:
        return bool(
            self.asks or self.intents or self.seals or self.awaits or self.stops
            or self.children or self.stops_children or self.undeployed
        )  # fmt: skip


NOTHING = SideEffects()


@dataclass(slots=True)
class Write:
    lease: Lease
    entries: list[Entry]
    leave: LeaseRelease | None = None
    seq: int = 0
    cost_usd: float = 0.0
    beside: "SideEffects" = field(default_factory=lambda: NOTHING)
    drained: list[int] = field(default_factory=list)
    # The side lane into which the run is released, or None.
    next_side: UUID | None = None
    # The dispatch slot that the same statement opens, if the worker has room for one more run after this release.
    seat: DispatchSlot | None = None


@dataclass(frozen=True, slots=True)
class AppendResult:
    """`kept`: it is in the journal. `nudged`: the inbox has commands. `receipts`: intents that may not go ahead."""

    kept: bool
    nudged: bool = False
    receipts: Mapping[UUID, ExistingReceipt] = field(default_factory=dict)


REFUSED = AppendResult(False)


async def append(database: Database, connection: Any, me: WorkerIdentity, writes: list[Write]) -> list[AppendResult]:
    """Append with one statement in the ordinary case, or in a transaction if there are side effects to store."""
    if any(w.beside or w.drained or _withdraws(w) or _frees_a_place(w) or _tells_parent(w) for w in writes):
        async with database.begin(connection) as tx:
            answers = await _append(tx, database, me, writes, others_follow=True)
            return await _persist_side_effects(tx, database, me, writes, answers)
    return await _append(Tx(connection), database, me, writes)


def _withdraws(write: Write) -> bool:
    # A run that ends withdraws its open approvals. A run that succeeded has none, because each of its steps is
    # settled, unless it ended because one approval was rejected.
    if write.leave is None:
        return write.beside.stops
    refused = write.leave.reason in (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED)
    return refused or write.beside.stops or write.leave.status in (RunState.FAILED, RunState.CANCELED)


def _frees_a_place(write: Write) -> bool:
    return write.lease.capped and write.leave is not None and not write.leave.queue


def _tells_parent(write: Write) -> bool:
    return write.lease.has_parent and write.leave is not None and write.leave.reason is not None


async def _persist_side_effects(
    tx: Tx, database: Database, me: WorkerIdentity, writes: list[Write], answers: list[AppendResult]
) -> list[AppendResult]:
    """Store the side effects of the kept entries in their transaction. Return the updated results."""
    kept = [write for write, answer in zip(writes, answers, strict=True) if answer.kept]
    if drained := [word for write in kept for word in write.drained]:
        await tx.fetch("drain_inbox", drained, me.id)
    if asks := [(w.lease.tenant_id, w.lease.run_id, w.lease.requested_by, ask) for w in kept for ask in w.beside.asks]:
        await open_approvals(tx, database, asks)
    if seals := [seal for w in kept for seal in w.beside.seals]:
        await receipts.complete_receipts(tx, database, seals)
        if released := [(s.releases, w.lease.run_id) for w in kept for s in w.beside.seals if s.releases is not None]:
            await receipts.release(tx, released)
    if waiting := [(w.lease.tenant_id, w.lease.run_id, awaited) for w in kept for awaited in w.beside.awaits]:
        answers = await _begin_waits(tx, database, waiting, writes, answers)
    if withdrawn := [w.lease.run_id for w in kept if _withdraws(w)]:
        await withdraw(tx, database, withdrawn)
    if stopped := [w.lease.run_id for w in kept if w.beside.stops]:
        await tx.fetch("stop_runs", stopped, me.id)
    if started := [child for w in kept for child in w.beside.children]:
        await child_runs.start(tx, database, started)
    if ended := [w.lease.run_id for w in kept if _tells_parent(w)]:
        await tx.fetch("tell_parents", database.clock(), ended)
    if parents := [w.lease.run_id for w in kept if w.beside.stops_children]:
        await tx.fetch("stop_children", database.clock(), parents)
    if lacking := [(w.lease.run_id, w.beside.undeployed) for w in kept if w.beside.undeployed]:
        await tx.fetch("await_flow", [run for run, _ in lacking], [flow for _, flow in lacking])
    answers = await _declare_intents(tx, database, kept, answers)
    if freed := [w.lease for w in kept if _frees_a_place(w)]:
        await tx.fetch("let_in", [lease.tenant_id for lease in freed], [lease.workflow for lease in freed])
    return answers


async def _declare_intents(
    tx: Tx, database: Database, kept: list[Write], answers: list[AppendResult]
) -> list[AppendResult]:
    intents = [(w.lease.tenant_id, w.lease.run_id, intent) for w in kept for intent in w.beside.intents]
    if not intents:
        return answers
    in_the_way = await receipts.declare_intents(tx, database, intents)
    return [replace(answer, receipts=in_the_way) if answer.kept else answer for answer in answers]


async def _begin_waits(
    tx: Tx,
    database: Database,
    waiting: list[tuple[UUID, UUID, EventSubscription]],
    writes: list[Write],
    answers: list[AppendResult],
) -> list[AppendResult]:
    """Subscribe the steps. An event that arrived earlier goes to the inbox, and the holder is notified at once."""
    came = await event_subscriptions.begin(tx, database, waiting)
    if not came:
        return answers
    words = [word for _, word in came]
    await tx.fetch(
        "post_events", database.clock(), [run_id for run_id, _ in came], [w.command for w in words],
        [w.step for w in words], [w.actor for w in words], [encode(w.data) for w in words],
    )  # fmt: skip
    nudged = {run_id for run_id, _ in came}
    return [
        replace(answer, nudged=True) if write.lease.run_id in nudged else answer
        for write, answer in zip(writes, answers, strict=True)
    ]


async def _append(
    tx: Tx, database: Database, me: WorkerIdentity, writes: list[Write], *, others_follow: bool = False
) -> list[AppendResult]:
    flat = [(w.lease.run_id, w.lease.token, e) for w in writes for e in w.entries]
    leaving = [(w, w.leave) for w in writes if w.leave is not None]
    seat = next((w.seat for w in writes if w.seat is not None), None)
    rows = await tx.fetch(
        "append", database.clock(), me.id,
        [r for r, _, _ in flat], [t for _, t, _ in flat], [e.seq for _, _, e in flat], [e.type for _, _, e in flat],
        [e.step for _, _, e in flat], [e.from_state for _, _, e in flat], [e.event for _, _, e in flat],
        [e.to_state for _, _, e in flat], [e.attempt for _, _, e in flat], [e.actor for _, _, e in flat],
        [encode(e.data) if e.data else None for _, _, e in flat], [e.output for _, _, e in flat],
        [w.lease.run_id for w, _ in leaving], [w.lease.tenant_id for w, _ in leaving],
        [w.lease.token for w, _ in leaving],
        [w.lease.status for w, _ in leaving], [v.status for _, v in leaving], [v.reason for _, v in leaving],
        [v.result for _, v in leaving], [v.error for _, v in leaving], [v.wake_at for _, v in leaving],
        [v.queue for _, v in leaving], [w.seq for w, _ in leaving], [w.cost_usd for w, _ in leaving],
        [w.lease.side_id for w, _ in leaving], [w.next_side for w, _ in leaving],
        *((seat.actor, seat.channel, seat.tenants) if seat else (None, None, None)), others_follow,
    )  # fmt: skip
    kept = {row["id"]: AppendResult(True, row["nudged"]) for row in rows}
    return [kept.get(w.lease.run_id, REFUSED) if w.entries or w.leave else AppendResult(True) for w in writes]


async def was_written(
    database: Database, connection: Any, me: WorkerIdentity, writes: list[Write]
) -> list[AppendResult] | None:
    """After a broken connection, return the results of the transaction, or None if it did not commit.

    The transaction committed as a whole or not at all.
    """
    tx = Tx(connection)
    firsts = [(w.lease.run_id, w.entries[0].seq, w.lease.token) for w in writes if w.entries]
    found = await tx.fetch("written_before", [f[0] for f in firsts], [f[1] for f in firsts], [f[2] for f in firsts])
    there = {row["run_id"] for row in found}
    rows = await tx.fetch("still_held", me.id, [w.lease.run_id for w in writes], [w.lease.token for w in writes])
    held = {row["id"] for row in rows}
    left = {w.lease.run_id for w in writes if w.leave and not w.entries} - held
    if not there and not left:
        return None
    # A worker continues only a run that it still holds: the outage may have been longer than the lease.
    answers = [
        AppendResult(w.lease.run_id in there | left) if w.leave
        else AppendResult(w.lease.run_id in held and (w.lease.run_id in there or not w.entries), nudged=True)
        for w in writes
    ]  # fmt: skip
    kept = [write for write, answer in zip(writes, answers, strict=True) if answer.kept]
    # The lost answer said which intents may not go ahead. Declaring an intent again changes nothing.
    return await _declare_intents(tx, database, kept, answers)


# One write of the batch is wrong, the others are not: it violates a constraint, is too large for the database, or is
# not valid JSON.
UNACCEPTABLE = (asyncpg.IntegrityConstraintViolationError, *UNSTORABLE, orjson.JSONEncodeError)
