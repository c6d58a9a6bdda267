"""The one way in which runs change: entries, releases and effects of many runs, in the caller's transaction."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import asyncpg
import orjson

from interlock.engine.approvals.open import open_all
from interlock.engine.approvals.withdraw import withdraw
from interlock.engine.effects import receipts
from interlock.engine.effects.receipts import ExistingReceipt
from interlock.engine.ingress import event_subscriptions
from interlock.engine.proof.instrumentation import observe_entries
from interlock.engine.runs import child_runs
from interlock.engine.writing.change import (
    CancelChildren,
    CompleteReceipt,
    DeclareIntent,
    DrainCommands,
    Effect,
    NotifyParent,
    OpenApproval,
    RunChange,
    StartChild,
    StopRun,
    SubscribeEvent,
    WithdrawPending,
)
from interlock.ids import ReceiptId, RunId, WorkerId
from interlock.journal import Entry, encode
from interlock.store import sql
from interlock.store.pool import UNSTORABLE, Executor
from interlock.store.records import DispatchSlot, NewEntry, RunRelease

E = TypeVar("E")

# The priority of a ready run: one that can continue goes before new runs and those that used up their time slice.
SOONER, LATER = 0, 1

# One change of a batch is wrong, the others are not: it violates a constraint, is too large for the database, or is not
# valid JSON.
UNACCEPTABLE = (asyncpg.IntegrityConstraintViolationError, *UNSTORABLE, orjson.JSONEncodeError)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """`kept`: the entries are in the journal. `receipts`: the intents that may not go ahead, by id."""

    kept: bool
    has_pending_commands: bool = False
    receipts: Mapping[ReceiptId, ExistingReceipt] = field(default_factory=dict)


REFUSED = CommitResult(False)


def has_effects(changes: Sequence[RunChange]) -> bool:
    """Return whether the changes need a transaction of several statements."""
    return any(change.effects for change in changes)


async def commit(
    tx: Executor, changes: Sequence[RunChange], worker_id: WorkerId | None, slot: DispatchSlot | None = None
) -> list[CommitResult]:
    """Write the changes, each accepted or refused by itself.

    The changes of a worker are fenced by its lease and the token of each run. A command passes no worker: it has locked
    the row of its run. `slot` is the dispatch slot that the worker opens once these runs have left.
    """
    entries = [new_entry(change, entry) for change in changes for entry in change.entries]
    releases = [_release(change) for change in changes if change.release is not None]
    rows = await sql.write_runs(tx, worker_id=worker_id, entries=entries, releases=releases, slot=slot)
    kept = {row.run_id: CommitResult(True, row.has_pending_commands) for row in rows}
    batch = Batch(tx, worker_id, {c.row.run_id: _result(c, kept) for c in changes})
    accepted = [change for change in changes if batch.results[change.row.run_id].kept]
    for change in accepted:
        tx.on_commit(partial(observe_entries, change.row.run_id, change.entries))
    await _apply_effects(batch, accepted)
    return [batch.results[change.row.run_id] for change in changes]


@dataclass(slots=True)
class Batch:
    """One commit in progress. A run is in it once."""

    tx: Executor
    worker_id: WorkerId | None
    results: dict[RunId, CommitResult]


def _result(change: RunChange, kept: Mapping[RunId, CommitResult]) -> CommitResult:
    if not change.entries and change.release is None:
        return CommitResult(True)
    return kept.get(change.row.run_id, REFUSED)


def new_entry(change: RunChange, entry: Entry) -> NewEntry:
    row = change.row
    return NewEntry(
        row.run_id, row.token if row.leased_from else 0, entry.seq, entry.type, entry.step, entry.from_state,
        entry.event, entry.to_state, entry.attempt, entry.actor, encode(entry.data) if entry.data else None,
        entry.output,
    )  # fmt: skip


def _release(change: RunChange) -> RunRelease:
    row, release = change.row, change.release
    assert release is not None
    # A worker that gives a run back has used its turn. A command moves a run that waited.
    is_new = row.leased_from is None and release.status == "pending"
    priority = (LATER if is_new or row.leased_from else SOONER) if release.queue else None
    return RunRelease(
        row.run_id, row.token, row.status, release.status, release.reason, release.result, release.error,
        release.resume_at, release.awaits_flow, change.seq, change.cost_usd, row.leased_from,
        change.next_queue_id or row.queue_id, priority, is_new, change.reclaimed,
    )  # fmt: skip


# ---------------------------------------------------------------- effects

Found = list[tuple[RunChange, E]]


async def _apply_effects(batch: Batch, accepted: Sequence[RunChange]) -> None:
    """Store the effects of the accepted changes, kind by kind, in the order of `_HANDLERS`."""
    by_kind: dict[type[Effect], list[tuple[RunChange, Any]]] = {}
    for change in accepted:
        for effect in change.effects:
            by_kind.setdefault(type(effect), []).append((change, effect))
    for kind, handler in _HANDLERS.items() if by_kind else ():
        if found := by_kind.get(kind):
            await handler(batch, found)


async def _drain_commands(batch: Batch, found: Found[DrainCommands]) -> None:
    assert batch.worker_id is not None
    ids = [command_id for _, effect in found for command_id in effect.command_ids]
    await sql.drain_commands(batch.tx, command_ids=ids, worker_id=batch.worker_id)


async def _open_approvals(batch: Batch, found: Found[OpenApproval]) -> None:
    await open_all(batch.tx, [(change.row, effect.request) for change, effect in found])


async def _complete_receipts(batch: Batch, found: Found[CompleteReceipt]) -> None:
    await receipts.complete(batch.tx, [(change.row.run_id, effect.result) for change, effect in found])


async def _subscribe_events(batch: Batch, found: Found[SubscribeEvent]) -> None:
    """Subscribe the steps. An event that arrived earlier becomes a command for the run's holder."""
    waiting = [(change.row.tenant_id, change.row.run_id, effect.subscription) for change, effect in found]
    arrived = await event_subscriptions.begin(batch.tx, waiting)
    if not arrived:
        return
    await sql.post_commands(
        batch.tx, run_ids=[run_id for run_id, _ in arrived], commands=[c.command for _, c in arrived],
        steps=[c.step for _, c in arrived], actors=[c.actor for _, c in arrived],
        data=[encode(c.data) for _, c in arrived],
    )  # fmt: skip
    for run_id, _ in arrived:
        batch.results[run_id] = replace(batch.results[run_id], has_pending_commands=True)


async def _withdraw_pending(batch: Batch, found: Found[WithdrawPending]) -> None:
    await withdraw(batch.tx, [change.row.run_id for change, _ in found])


async def _stop_runs(batch: Batch, found: Found[StopRun]) -> None:
    assert batch.worker_id is not None
    await sql.stop_runs(batch.tx, run_ids=[change.row.run_id for change, _ in found], worker_id=batch.worker_id)


async def _start_children(batch: Batch, found: Found[StartChild]) -> None:
    await child_runs.start(batch.tx, [effect.child for _, effect in found])


async def _notify_parents(batch: Batch, found: Found[NotifyParent]) -> None:
    await sql.signal_parents(batch.tx, run_ids=[change.row.run_id for change, _ in found])


async def _cancel_children(batch: Batch, found: Found[CancelChildren]) -> None:
    await sql.signal_children(batch.tx, run_ids=[change.row.run_id for change, _ in found])


async def _declare_intents(batch: Batch, found: Found[DeclareIntent]) -> None:
    intents = [(change.row.tenant_id, change.row.run_id, effect.intent) for change, effect in found]
    blocked = await receipts.declare_intents(batch.tx, intents)
    if blocked:
        for change, _ in found:
            run_id = change.row.run_id
            batch.results[run_id] = replace(batch.results[run_id], receipts=blocked)


# In this order. Commands are drained first, because a later effect may post new ones. Intents come last: whether one
# may go ahead depends on the receipts that this write completes.
_HANDLERS: Mapping[type[Effect], Callable[[Batch, list[tuple[RunChange, Any]]], Awaitable[None]]] = MappingProxyType(
    {
        DrainCommands: _drain_commands,
        OpenApproval: _open_approvals,
        CompleteReceipt: _complete_receipts,
        SubscribeEvent: _subscribe_events,
        WithdrawPending: _withdraw_pending,
        StopRun: _stop_runs,
        StartChild: _start_children,
        NotifyParent: _notify_parents,
        CancelChildren: _cancel_children,
        DeclareIntent: _declare_intents,
    }
)


# ---------------------------------------------------------------- after a lost answer


async def result_of_earlier(
    tx: Executor, changes: Sequence[RunChange], worker_id: WorkerId
) -> list[CommitResult] | None:
    """Return the results of a worker's commit whose answer was lost, or None if it did not commit.

    It committed as a whole or not at all.
    """
    written, held = await _found_afterwards(tx, changes, worker_id)
    left = {c.row.run_id for c in changes if c.release is not None and not c.entries} - held
    if not written and not left:
        return None
    batch = Batch(tx, worker_id, {})
    for change in changes:
        run_id = change.row.run_id
        if change.release is not None:
            batch.results[run_id] = CommitResult(run_id in written | left)
        else:
            # The outage may have been longer than the lease: a worker continues only a run that it still holds.
            kept = run_id in held and (run_id in written or not change.entries)
            batch.results[run_id] = CommitResult(kept, has_pending_commands=True)
    accepted = [change for change in changes if batch.results[change.row.run_id].kept]
    for change in accepted:
        tx.on_commit(partial(observe_entries, change.row.run_id, change.entries))
    # The lost answer said which intents may not go ahead. Declaring an intent again changes nothing.
    intents = [(c, effect) for c in accepted for effect in c.effects if isinstance(effect, DeclareIntent)]
    if intents:
        await _declare_intents(batch, intents)
    return [batch.results[change.row.run_id] for change in changes]


async def _found_afterwards(
    tx: Executor, changes: Sequence[RunChange], worker_id: WorkerId
) -> tuple[set[RunId], set[RunId]]:
    """Return the runs whose first entry was written, and the runs that the worker still holds."""
    first = [(c.row.run_id, c.entries[0].seq, c.row.token) for c in changes if c.entries]
    written = await sql.written_before(
        tx, run_ids=[f[0] for f in first], seqs=[f[1] for f in first], tokens=[f[2] for f in first]
    )
    held = await sql.still_held(
        tx, worker_id=worker_id, run_ids=[c.row.run_id for c in changes], tokens=[c.row.token for c in changes]
    )
    return set(written), set(held)
