"""Delivering commands: a command changes a run that no worker holds, or is left for the worker that holds it."""

from collections.abc import Sequence
from functools import partial

import orjson

from interlock.engine import expression_answers
from interlock.engine.ingress import event_subscriptions
from interlock.engine.proof.instrumentation import observe_run_end
from interlock.engine.workflows import unread
from interlock.engine.writing.change import OpenApproval, RunChange, WrittenRow
from interlock.engine.writing.commit import LATER, SOONER, commit
from interlock.engine.writing.effects import effects_of
from interlock.engine.writing.load import OpenRun, empty_journal
from interlock.ids import RunId, TenantId
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
    cause_of_command,
    encode,
    final_release,
    release_for,
    requeue,
)
from interlock.lifecycle import RUN, STEP, RunEvent, RunReason, RunState
from interlock.store import sql
from interlock.store.pool import Executor, RetryTransaction, Tx
from interlock.store.records import LockedRun, QueueMove, RunRecord

_WAITING = (RunState.WAITING_APPROVAL, RunState.WAITING_EXTERNAL)


async def put_back(tx: Tx, run: OpenRun) -> RunRecord:
    """Put the run back as it was, because the command changed nothing."""
    if run.queued is not None:
        await _requeue(tx, run.row, run.queued.is_new, run.queued.reclaimed)
    return run.row


async def deliver_command(tx: Tx, run: OpenRun, command: RunCommand) -> RunRecord:
    """Apply a command, or leave it for the worker that holds the run. Return the run's new row."""
    if run.journal is not None:
        apply_command(run.journal, command, in_flight=False)
        return await save_progress(tx, run)
    if run.row.lease_worker is not None:
        status = RunState.CANCELING if command.command == CommandType.CANCEL else run.status
        return await _post(tx, run, command, status)
    return await _leave_to_a_worker(tx, run, command)


async def _leave_to_a_worker(tx: Tx, run: OpenRun, command: RunCommand) -> RunRecord:
    """Queue the run with the command. No worker holds it, but commands wait for it or this process cannot read it."""
    status, released = run.status, run.status
    entries: list[Entry] = []
    if command.command == CommandType.CANCEL:
        status = RunState.CANCELING
    elif status in _WAITING:
        status = released = RunState.RUNNING
        cause = cause_of_command(command.actor, command.data, requested_by=run.row.requested_by)
        entries.append(Entry(
            run.row.seq + 1, EntryType.RUN_TRANSITION, ENGINE, from_state=run.status, event=RunEvent.RESUME,
            to_state=status, data={"cause": cause},
        ))  # fmt: skip
    await _commit(tx, RunChange(_row(run.row), entries, LeaseRelease(released), run.row.seq + len(entries)))
    posted = await _post(tx, run, command, status)
    await _requeue(tx, run.row, status == RunState.PENDING, run.queued is not None and run.queued.reclaimed)
    return posted


async def save_progress(tx: Tx, run: OpenRun) -> RunRecord:
    """Save the new entries of the journal, if there are any, and let the run go on."""
    journal = run.journal
    assert journal is not None
    if journal.status in RUN.terminal:
        return await save(tx, run, final_release(journal))
    if not journal.unsaved:
        return await put_back(tx, run)
    return await go_on(tx, run)


async def go_on(tx: Tx, run: OpenRun) -> RunRecord:
    """Open the run's next gate, queue it or end it."""
    journal = run.journal
    assert journal is not None
    following = await _advance(tx, run, journal)
    match following.then:
        case None:
            release = requeue(journal)
        case InterruptInFlight(None):
            release = LeaseRelease(journal.status, queue=True)
        case InterruptInFlight() if journal.undos:
            # A worker released the run after a step had started. A worker settles that step and then undoes the others.
            release = requeue(journal)
        case InterruptInFlight(ending):
            assert ending is not None
            release = release_for(journal, ending)
        case RunOutcome(RunEvent.SUCCEED) if journal.status == RunState.PENDING:
            # All steps were skipped or carried over. A run that was never claimed cannot succeed, so a worker ends it.
            release = requeue(journal)
        case Suspend() if _has_news(journal):
            release = requeue(journal)
        case then:
            release = release_for(journal, then)
    return await save(tx, run, release, following.approvals)


async def _advance(tx: Tx, run: OpenRun, journal: Journal) -> NextActions:
    """Return the next actions. Apply events that arrived before their step subscribed."""
    requests: list[ApprovalRequest] = []
    while True:
        following = advance(journal, run.row.now)
        requests += following.approvals
        await expression_answers.answer(run.row.tenant_id, following.elsewhere)
        waiting = [(run.row.tenant_id, run.row.id, each) for each in following.subscriptions]
        arrived = await event_subscriptions.begin(tx, waiting) if waiting else []
        for _, command in arrived:
            apply_command(journal, command, in_flight=False)
        if not arrived and not following.elsewhere:
            following.approvals = requests
            return following


def _has_news(journal: Journal) -> bool:
    """Return whether a step of a flow has ended. Only the flow's own code can continue from there."""
    return journal.plan.flow is not None and any(
        entry.step is not None and entry.to_state in STEP.terminal for entry in journal.unsaved
    )


# ---------------------------------------------------------------- saving


async def save(tx: Tx, run: OpenRun, release: LeaseRelease, requests: Sequence[ApprovalRequest] = ()) -> LockedRun:
    """Write the journal's new entries and the new values of the run's row, which this transaction has locked."""
    journal, row = run.journal, run.row
    assert journal is not None
    entries = [*journal.take_unsaved(), *([release.entry] if release.entry else ())]
    follows = effects_of(
        entries, release.reason, has_children=journal.has_children(), has_parent=row.parent_run_id is not None
    )
    await _commit(tx, RunChange(
        _row(row), entries, release, entries[-1].seq if entries else journal.seq, journal.cost_usd(),
        (*(OpenApproval(request) for request in requests), *follows),
        reclaimed=run.queued is not None and run.queued.reclaimed,
    ))  # fmt: skip
    saved = await sql.lock_run(tx, tenant_id=row.tenant_id, run_id=row.id)
    assert saved is not None
    if release.reason is not None:
        assert saved.completed_at is not None and saved.duration_ms is not None
        tx.on_commit(
            partial(
                observe_run_end, saved, saved.status, release.reason, ended=saved.completed_at,
                duration_ms=saved.duration_ms,
            )
        )  # fmt: skip
    return saved


def _row(row: LockedRun) -> WrittenRow:
    return WrittenRow(
        row.id,
        row.tenant_id,
        row.lease_token,
        row.status,
        row.requested_by,
        row.parent_run_id is not None,
        row.queue_id,
    )


async def _commit(tx: Tx, change: RunChange) -> None:
    [result] = await commit(tx, [change], None)
    if not result.kept:
        raise RetryTransaction("the run changed although its row was locked")


async def _requeue(tx: Tx, row: LockedRun, is_new: bool, reclaimed: bool) -> None:
    limited = row.workflow if row.has_concurrency_limit else None
    move = QueueMove(row.tenant_id, row.id, None, row.queue_id, limited, LATER if is_new else SOONER, is_new, reclaimed)
    await sql.requeue_run(tx, move=move)


async def _post(tx: Tx, run: OpenRun, command: RunCommand, status: RunState) -> RunRecord:
    return await sql.post_command(
        tx, run_id=run.row.id, command=command.command, step=command.step, actor=command.actor,
        data=encode(command.data), status=status,
    )  # fmt: skip


async def commands_for(db: Executor, run_id: RunId) -> list[RunCommand]:
    """Return the commands that wait for the run. They stay until the write that carries their results is committed."""
    return [
        RunCommand(CommandType(row.command), row.actor, orjson.loads(row.data), row.step, row.id)
        for row in await sql.pending_commands(db, run_ids=[run_id])
    ]


async def fail_unreadable(tx: Tx, tenant_id: TenantId, run_id: RunId, actor: str, why: str) -> None:
    """Fail a run that no worker can read, regardless of its commands. Its effects are not undone."""
    queued = await sql.unqueue_run(tx, tenant_id=tenant_id, run_id=run_id)
    row = await sql.lock_run(tx, tenant_id=tenant_id, run_id=run_id)
    assert row is not None
    run = OpenRun(row, None, queued)
    if row.lease_worker is not None or row.status in RUN.terminal:
        await put_back(tx, run)  # another process holds it or has ended it
        return
    last = await sql.last_seq(tx, run_id=run_id)
    run.journal = empty_journal(row, unread(row.workflow)).at(row.status, last)
    await sql.discard_commands(tx, run_id=run_id)
    error = {"type": "Unreadable", "message": why, "code": "RUN_RESUME_FAILED"}
    outcome = RunOutcome(RunEvent.FAIL, RunReason.RESUME_FAILED, error)
    await save(tx, run, release_for(run.journal, outcome, actor=actor))
    await sql.signal_children(tx, run_ids=[run_id])
