"""Sweeps: periodic work so that nothing is forgotten. Any process may sweep, and any number at once."""

from collections.abc import Awaitable, Callable
from functools import partial

from interlock.audit.keys import SigningKey
from interlock.engine import outbox
from interlock.engine.approvals import approvals
from interlock.engine.ingress import external_events
from interlock.engine.proof import retention
from interlock.engine.proof.instrumentation import observe_resumed
from interlock.engine.queueing.leases import reclaim_lost
from interlock.engine.runs import runs
from interlock.engine.workflows import Plans
from interlock.ids import ApprovalId, RunId, TenantId
from interlock.store import sql
from interlock.store.migrate import ensure_partitions
from interlock.store.pool import Database, Tx
from interlock.telemetry import log, metrics

_BATCH = 200
_FORGET_BATCH = 1000
_TIMER = "system:timer"


async def resume_due(database: Database) -> int:
    """Requeue the runs whose timer is due."""
    total = 0
    while resumed := await sql.resume_due_runs(database, most=_BATCH, actor=_TIMER):
        observe_resumed(resumed, _TIMER)
        total += len(resumed)
        if len(resumed) < _BATCH:
            break
    return total


async def seconds_to_next(database: Database) -> float | None:
    seconds: float | None = await database.value("next_due")
    return seconds


async def enforce_deadlines(database: Database, plans: Plans) -> int:
    """Process approvals to remind, escalate or expire, runs that took too long, and events that did not arrive.

    One transaction each: a bad row stops no other.
    """
    late = await database.fetch("expired_approvals", _BATCH)
    overdue = await database.fetch("overdue_runs", _BATCH)
    quiet = await database.fetch("approvals_to_mention", _BATCH)
    missed = await database.fetch("overdue_waits", _BATCH)
    jobs: list[Callable[[Tx], Awaitable[object]]] = []
    jobs += [partial(_expire, plans, row["tenant_id"], row["id"]) for row in late]
    jobs += [partial(_time_out, plans, row["tenant_id"], row["id"]) for row in overdue]
    jobs += [partial(_mention, plans, row["tenant_id"], row["id"]) for row in quiet]
    jobs += [partial(_miss, plans, row["tenant_id"], row["run_id"], row["step"]) for row in missed]
    for job in jobs:
        try:
            await database.run_in_transaction(job)
        except Exception as error:
            log.error("sweep_failed", exc_info=error)
    return len(jobs)


async def _expire(plans: Plans, tenant_id: TenantId, approval_id: ApprovalId, tx: Tx) -> None:
    await approvals.expire(tx, plans, tenant_id, approval_id)


async def _mention(plans: Plans, tenant_id: TenantId, approval_id: ApprovalId, tx: Tx) -> None:
    await approvals.remind_or_escalate(tx, plans, tenant_id, approval_id)


async def _time_out(plans: Plans, tenant_id: TenantId, run_id: RunId, tx: Tx) -> None:
    await runs.time_out(tx, plans, tenant_id, run_id)


async def _miss(plans: Plans, tenant_id: TenantId, run_id: RunId, step: str, tx: Tx) -> None:
    await external_events.time_out(tx, plans, tenant_id, run_id, step)


async def recount_queues(database: Database) -> int:
    """Recount the in-flight counts. They change in the transactions of the leases, so a difference is a bug.

    A difference is logged and corrected.
    """
    drifted = 0
    for queue_id in await sql.queues_in_use(database):
        if (wrong := await sql.recount_queue(database, queue_id=queue_id)) is not None:
            log.error("queue_drift", queue_id=str(queue_id), counted=wrong.before, leases=wrong.after)
            drifted += 1
    metrics.queue_drift.inc(drifted)
    return drifted


async def admit_blocked(database: Database) -> int:
    """Admit runs of capped workflows that have room. Return the number of such workflows.

    The transaction that frees a place also admits the next run, but skips a run that a command has locked. If that
    command then fails, this sweep admits the run.
    """
    found = await sql.workflows_with_room(database)
    if found:
        await sql.admit_blocked(
            database, tenant_ids=[each.tenant_id for each in found], workflows=[each.workflow for each in found]
        )
    return len(found)


async def tend(database: Database, key: SigningKey | None = None) -> None:
    """Create, detach and drop months of the journal; delete old idempotency records, events, messages and counts.

    Nothing is deleted while the clocks of this process and of the database differ.
    """
    async with database.connection() as connection:
        await ensure_partitions(connection, database.settings.database_schema)
    if not await retention.may_delete(database):
        return
    await forget_keys(database)
    while await external_events.forget_expired(database):
        pass
    await outbox.tidy(database)
    await database.fetch("forget_ended")
    await retention.tend(database, key)


async def forget_keys(database: Database) -> int:
    """Delete expired records in batches, each a short transaction, until none is left: a busy day leaves many."""
    total = 0
    while gone := len(await database.fetch("forget_expired_keys", _FORGET_BATCH)):
        total += gone
        if gone < _FORGET_BATCH:
            break
    return total


__all__ = [
    "admit_blocked",
    "enforce_deadlines",
    "reclaim_lost",
    "recount_queues",
    "resume_due",
    "seconds_to_next",
    "tend",
]
