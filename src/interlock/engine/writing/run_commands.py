"""Commands from outside a worker: lock a run, then change and save it, or put a command into its inbox."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.plan import Plan
from interlock.engine import expression_answers as answers
from interlock.engine.effects import receipts
from interlock.engine.ingress import event_subscriptions
from interlock.engine.proof.instrumentation import observe_approval_end, observe_entries, observe_run_end
from interlock.engine.workflows import Plans, unread
from interlock.errors import NotFound, Unreadable
from interlock.journal import (
    ENGINE,
    ApprovalRequest,
    CommandType,
    Entry,
    EntryType,
    InterruptInFlight,
    Journal,
    LeaseRelease,
    NextActions,
    RunCommand,
    RunOutcome,
    Suspend,
    advance,
    apply_command,
    cause_of_word,
    encode,
    final_release,
    release_for,
    requeue,
)
from interlock.lifecycle import RUN, STEP, RunEvent, RunReason, RunState
from interlock.store.pool import Database, RetryTransaction, Row, Tx
from interlock.telemetry import log


@dataclass(slots=True)
class OpenRun:
    """A run under its row lock.

    `journal` is None if only a worker may change the run: a worker holds it, it has unread commands, or this process
    cannot read it. Then callers write only to its inbox.
    """

    row: Row
    now: datetime
    journal: Journal | None
    queued: Row | None

    @property
    def status(self) -> RunState:
        return RunState(self.row["status"])


def entry_of(row: Row) -> Entry:
    return Entry(
        row["seq"], row["type"], row["actor"], row["step"], row["from_state"], row["event"], row["to_state"],
        row["attempt"], orjson.loads(row["data"]) if row["data"] else None, row["output"], row["at"],
    )  # fmt: skip


def journal_for(row: Row, plan: Any) -> Journal:
    run = {"id": str(row["id"]), "workflow": row["workflow"], "version": row["workflow_version"]}
    journal = Journal(
        row["id"], plan, input=orjson.loads(row["input"] or "null"), trigger=orjson.loads(row["trigger"]), run=run,
        requested_by=row["requested_by"],
    )  # fmt: skip
    journal.scope.on_event_loop = True
    return journal


async def read_journal(tx: Tx | Database, plans: Plans, row: Row, plan: Plan | None = None) -> Journal:
    plan = plan or await plans.get(row["tenant_id"], row["workflow"], row["workflow_version"], tx)
    return replayed(row, plan, await tx.fetch("journal_of", [row["id"]]))


def replayed(row: Row, plan: Plan, entries: Iterable[Row]) -> Journal:
    try:
        return journal_for(row, plan).replay(entry_of(e) for e in entries)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Unreadable(
            f"the journal of run {row['id']} cannot be read by this version of Interlock: {why}"
        ) from error


async def journal_to_show(tx: Tx | Database, plans: Plans, row: Row, entries: Iterable[Row] | None = None) -> Journal:
    """Return the run's journal. If the steps cannot be read, leave them out: the row contains the run's state."""
    try:
        plan = await plans.get(row["tenant_id"], row["workflow"], row["workflow_version"], tx)
        return replayed(row, plan, await tx.fetch("journal_of", [row["id"]]) if entries is None else entries)
    except Unreadable as error:
        log.warning("run_unreadable", run_id=str(row["id"]), error=error.detail)
        return journal_for(row, unread(row["workflow"]))


async def open_run(
    tx: Tx, database: Database, plans: Plans, tenant_id: UUID, run_id: UUID, workspace_id: str | None = None
) -> OpenRun:
    # Remove the run from the queue before locking its row, in the same order as a claim. `put_back` undoes this.
    queued = await tx.row("unqueue_run", tenant_id, run_id)
    row = await tx.row("lock_run", database.clock(), tenant_id, run_id)
    if row is None or (workspace_id is not None and row["workspace_id"] != workspace_id):
        raise NotFound(f"no run {run_id}", code="RUN_NOT_FOUND")
    if queued is None and row["lease_worker"] is None and await tx.value("is_queued", tenant_id, run_id):
        # It was released, woken or reclaimed after we looked into the queue, so a claim may be waiting for our lock.
        raise RetryTransaction("the run went into the queue meanwhile")
    # A lost worker may have left commands unread. They come first, so the next holder applies both.
    held = row["lease_worker"] is not None or row["inbox"] > 0
    journal = None if held else await _read_if_possible(tx, plans, row)
    return OpenRun(row, row["now"], journal, queued)


async def _read_if_possible(tx: Tx, plans: Plans, row: Row) -> Journal | None:
    """Return the journal, or None if this process cannot read it: then a worker reads it or fails the run."""
    try:
        return await read_journal(tx, plans, row)
    except Unreadable as error:
        log.warning("run_unreadable", run_id=str(row["id"]), error=error.detail)
        return None


async def put_back(tx: Tx, run: OpenRun) -> Row:
    """Put the run back as it was, because the command changed nothing."""
    if run.queued is not None:
        await _queue(tx, run.row, run.queued["fresh"], run.queued["lost"])
    return run.row


async def deliver_command(tx: Tx, database: Database, run: OpenRun, word: RunCommand) -> Row:
    """Apply a command at once, or put it into the inbox if a worker holds the run. Return the run's new row."""
    if run.journal is None and run.row["lease_worker"] is None:
        return await _leave_to_a_worker(tx, database, run, word)
    if run.journal is None:
        status = RunState.CANCELING if word.command == CommandType.CANCEL else run.status
        return await _post(tx, database, run, word, status)
    apply_command(run.journal, word, in_flight=False)
    return await move_on(tx, database, run)


async def _leave_to_a_worker(tx: Tx, database: Database, run: OpenRun, word: RunCommand) -> Row:
    """Put the command into the inbox for the next worker that claims the run.

    No worker holds the run, but it has unread commands or cannot be read here.
    """
    status, seq, now = run.status, run.row["seq"], database.clock()
    if word.command == CommandType.CANCEL:
        status = RunState.CANCELING
    elif status in (RunState.WAITING_APPROVAL, RunState.WAITING_EXTERNAL):
        seq, status = seq + 1, RunState.RUNNING
        entry = Entry(
            seq, EntryType.RUN_TRANSITION, ENGINE, from_state=run.status, event=RunEvent.RESUME, to_state=status,
            data={"cause": cause_of_word(word.actor, word.data, requested_by=run.row["requested_by"])},
        )  # fmt: skip
        await _append(tx, database, run.row, [entry])
        tx.on_commit(partial(observe_entries, run.row["id"], [entry]))
    await tx.row("move_run", now, run.row["id"], status, None, None, None, None, seq, 0)
    row = await _post(tx, database, run, word, status)
    await _queue(tx, run.row, status == RunState.PENDING, run.queued["lost"] if run.queued else False)
    return row


async def move_on(tx: Tx, database: Database, run: OpenRun) -> Row:
    """Continue the run after new entries: open the next gate, queue it or end it."""
    journal = run.journal
    assert journal is not None
    if journal.status in RUN.terminal:
        return await save(tx, database, run, final_release(journal))
    if not journal.unsaved:
        return await put_back(tx, run)
    following = await _advance(tx, database, run, journal)
    match following.then:
        case None:
            leave = requeue(journal)
        case InterruptInFlight(None):
            leave = LeaseRelease(journal.status, queue=True)
        case InterruptInFlight() if journal.undos:
            # A worker released the run after a step had started. A worker settles that step and then undoes the
            # others.
            leave = requeue(journal)
        case InterruptInFlight(ending):
            assert ending is not None
            leave = release_for(journal, ending)
        case RunOutcome(RunEvent.SUCCEED) if journal.status == RunState.PENDING:
            # All steps were skipped or carried over. A run that was never claimed cannot succeed, so a worker ends
            # it.
            leave = requeue(journal)
        case Suspend() if _has_news(journal):
            leave = requeue(journal)
        case then:
            leave = release_for(journal, then)
    return await save(tx, database, run, leave, following.ask)


async def _advance(tx: Tx, database: Database, run: OpenRun, journal: Journal) -> NextActions:
    """Return the next actions. Apply events that arrived before their step subscribed."""
    asks: list[ApprovalRequest] = []
    while True:
        following = advance(journal, run.now)
        asks += following.ask
        await answers.answer(run.row["tenant_id"], following.elsewhere)
        awaited = [(run.row["tenant_id"], journal.run_id, a) for a in following.await_]
        came = await event_subscriptions.begin(tx, database, awaited) if awaited else []
        for _, word in came:
            apply_command(journal, word, in_flight=False)
        if not came and not following.elsewhere:
            following.ask = asks
            return following


def _has_news(journal: Journal) -> bool:
    """Return whether a step of a flow has ended. Only the flow's own code can continue from there."""
    return journal.plan.flow is not None and any(
        entry.step is not None and entry.to_state in STEP.terminal for entry in journal.unsaved
    )


async def save(
    tx: Tx, database: Database, run: OpenRun, leave: LeaseRelease, asks: list[ApprovalRequest] | None = None
) -> Row:
    journal = run.journal
    assert journal is not None
    now = database.clock()
    entries = [*journal.take_unsaved(), *([leave.entry] if leave.entry else ())]
    await _append(tx, database, run.row, entries)
    row = await tx.row(
        "move_run",
        now,
        run.row["id"],
        leave.status,
        leave.reason,
        leave.result,
        leave.error,
        leave.wake_at,
        entries[-1].seq if entries else journal.seq,
        journal.cost_usd(),
    )
    assert row is not None
    if asks:
        await open_approvals(
            tx, database, [(run.row["tenant_id"], run.row["id"], run.row["requested_by"], a) for a in asks]
        )
    if leave.queue:
        fresh = leave.status == RunState.PENDING
        lost = run.queued["lost"] if run.queued else False
        await _queue(tx, run.row, fresh, lost)
    elif run.queued is not None and run.row["capped"]:
        await tx.fetch("let_in", [run.row["tenant_id"]], [run.row["workflow"]])
    if leave.reason is not None or any(e.event == RunEvent.COMPENSATE for e in entries):
        await withdraw(tx, database, [run.row["id"]])
        if journal.has_children():
            await tx.fetch("stop_children", now, [run.row["id"]])
    if leave.reason is not None and run.row["parent_run_id"] is not None:
        await tx.fetch("tell_parents", now, [run.row["id"]])
    tx.on_commit(partial(observe_entries, run.row["id"], entries))
    if leave.reason is not None:
        tx.on_commit(
            partial(
                observe_run_end, row, row["status"], row["reason"], ended=row["completed_at"],
                duration_ms=row["duration_ms"],
            )
        )  # fmt: skip
    return row


async def _append(tx: Tx, database: Database, row: Row, entries: list[Entry]) -> None:
    await tx.fetch(
        "append_from_outside", database.clock(), row["id"], row["tenant_id"],
        [e.seq for e in entries], [e.type for e in entries], [e.step for e in entries],
        [e.from_state for e in entries], [e.event for e in entries], [e.to_state for e in entries],
        [e.attempt for e in entries], [e.actor for e in entries],
        [encode(e.data) if e.data else None for e in entries], [e.output for e in entries],
    )  # fmt: skip


async def fail_unreadable(tx: Tx, database: Database, row: Row, actor: str, why: str) -> None:
    """Fail a run that no worker can read, regardless of its commands. Its effects are not undone."""
    queued = await tx.row("unqueue_run", row["tenant_id"], row["id"])
    now = await tx.row("lock_run", database.clock(), row["tenant_id"], row["id"])
    assert now is not None
    journal = journal_for(now, unread(now["workflow"]))
    journal.status = RunState(now["status"])
    run = OpenRun(now, now["now"], journal, queued)
    if now["lease_worker"] is not None or journal.status in RUN.terminal:
        await put_back(tx, run)  # another process holds it or has ended it
        return
    journal.seq = await tx.value("last_seq", row["id"])
    await tx.fetch("forget_mail", row["id"])
    error = {"type": "Unreadable", "message": why, "code": "RUN_RESUME_FAILED"}
    await save(
        tx, database, run, release_for(journal, RunOutcome(RunEvent.FAIL, RunReason.RESUME_FAILED, error), actor=actor)
    )
    await tx.fetch("stop_children", database.clock(), [row["id"]])


async def _queue(tx: Tx, row: Row, fresh: bool, lost: bool) -> None:
    capped = row["workflow"] if row["capped"] else None
    await tx.fetch("queue_run", row["tenant_id"], row["id"], fresh, lost, capped)


async def withdraw(tx: Tx, database: Database, run_ids: list[UUID]) -> None:
    """Withdraw the open approvals and event subscriptions of runs that stop. Their open effects become in doubt."""
    for row in await tx.fetch("withdraw_runs", database.clock(), run_ids):
        tx.on_commit(partial(observe_approval_end, row))
    await receipts.doubt(tx, run_ids)


async def _post(tx: Tx, database: Database, run: OpenRun, word: RunCommand, status: RunState) -> Row:
    row = await tx.row(
        "post_to_inbox", database.clock(), run.row["id"], word.command, word.step, word.actor, encode(word.data), status
    )
    assert row is not None
    return row


async def open_approvals(tx: Tx, database: Database, asks: list[tuple[UUID, UUID, str, ApprovalRequest]]) -> None:
    about = [ask for *_, ask in asks]
    await tx.fetch(
        "open_approvals", database.clock(),
        [UUID(a.id) for a in about], [tenant for tenant, *_ in asks], [run for _, run, *_ in asks],
        [a.step for a in about], [a.tier for a in about], [a.two_person for a in about], [a.summary for a in about],
        [encode(a.action) for a in about], [a.digest for a in about], [by for _, _, by, _ in asks],
        [a.expires_in for a in about], [a.kind for a in about], [encode(list(a.rule_ids)) for a in about],
        [a.reason for a in about], [a.reason_required for a in about], [a.policy_digest for a in about],
        [encode(list(a.approvers)) for a in about], [encode(list(a.escalate_to)) for a in about],
        [a.escalate_after for a in about], [UUID(a.receipt_id) if a.receipt_id else None for a in about],
    )  # fmt: skip
