"""Loading runs: their journals, and a run with its row locked for a command."""

from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from interlock.definition.plan import Plan
from interlock.engine.workflows import Plans, unread
from interlock.errors import NotFound, Unreadable
from interlock.ids import RunId, TenantId
from interlock.journal import Entry, Journal
from interlock.lifecycle import RunState
from interlock.store import sql
from interlock.store.pool import Executor, RetryTransaction, Tx
from interlock.store.records import EntryRecord, LockedRun, QueuedRun, RunFacts
from interlock.telemetry import log


@dataclass(slots=True)
class OpenRun:
    """A run under its row lock.

    `journal` is None if only a worker may change the run: a worker holds it, commands wait for it, or this process
    cannot read it. Then callers only leave a command for a worker. `queued` is what the queue said of the run.
    """

    row: LockedRun
    journal: Journal | None
    queued: QueuedRun | None

    @property
    def status(self) -> RunState:
        return self.row.status


def entry_of(row: EntryRecord) -> Entry:
    return Entry(
        row.seq, row.type, row.actor, row.step, row.from_state, row.event, row.to_state, row.attempt,
        orjson.loads(row.data) if row.data else None, row.output, row.at,
    )  # fmt: skip


def empty_journal(run: RunFacts, plan: Plan) -> Journal:
    about = {"id": str(run.id), "workflow": run.workflow, "version": run.workflow_version}
    journal = Journal(
        run.id, plan, input=orjson.loads(run.input or "null"), trigger=orjson.loads(run.trigger), run=about,
        requested_by=run.requested_by,
    )  # fmt: skip
    journal.scope.on_event_loop = True
    return journal


async def load_journal(db: Executor, plans: Plans, run: RunFacts, plan: Plan | None = None) -> Journal:
    plan = plan or await plans.get(run.tenant_id, run.workflow, run.workflow_version, db)
    return replayed(run, plan, await sql.journal_of(db, run_ids=[run.id]))


def replayed(run: RunFacts, plan: Plan, entries: Iterable[EntryRecord]) -> Journal:
    try:
        return empty_journal(run, plan).replay(entry_of(entry) for entry in entries)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Unreadable(f"This version of Interlock cannot read the journal of run {run.id}: {why}") from error


async def load_for_display(
    db: Executor, plans: Plans, run: RunFacts, entries: Iterable[EntryRecord] | None = None
) -> Journal:
    """Return the run's journal. If the steps cannot be read, leave them out: the row contains the run's state."""
    try:
        plan = await plans.get(run.tenant_id, run.workflow, run.workflow_version, db)
        return replayed(run, plan, await sql.journal_of(db, run_ids=[run.id]) if entries is None else entries)
    except Unreadable as error:
        log.warning("run_unreadable", run_id=str(run.id), error=error.detail)
        return empty_journal(run, unread(run.workflow))


async def open_run(
    tx: Tx, plans: Plans, tenant_id: TenantId, run_id: RunId, workspace_id: str | None = None
) -> OpenRun:
    """Lock the run, and take it out of the queue. `put_back` undoes this."""
    # Out of the queue before its row is locked, in the same order as a claim.
    queued = await sql.unqueue_run(tx, tenant_id=tenant_id, run_id=run_id)
    row = await sql.lock_run(tx, tenant_id=tenant_id, run_id=run_id)
    if row is None or (workspace_id is not None and row.workspace_id != workspace_id):
        raise NotFound(f"There is no run {run_id}.", code="RUN_NOT_FOUND")
    if queued is None and row.lease_worker is None and await sql.is_queued(tx, tenant_id=tenant_id, run_id=run_id):
        # It was released, resumed or reclaimed after we looked into the queue, so a claim may be waiting for our lock.
        raise RetryTransaction("the run went into the queue at the same time")
    # A lost worker may have left commands unapplied. They come first, so the next holder applies both.
    is_held = row.lease_worker is not None or row.pending_commands > 0
    return OpenRun(row, None if is_held else await _load_if_readable(tx, plans, row), queued)


async def _load_if_readable(tx: Tx, plans: Plans, row: LockedRun) -> Journal | None:
    """Return the journal, or None if this process cannot read it: then a worker reads it or fails the run."""
    try:
        return await load_journal(tx, plans, row)
    except Unreadable as error:
        log.warning("run_unreadable", run_id=str(row.id), error=error.detail)
        return None
