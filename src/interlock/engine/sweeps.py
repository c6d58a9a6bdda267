"""Sweeps: what any process does from time to time so that nothing is forgotten. Any number may sweep at once."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

from interlock.engine import approvals, runs
from interlock.engine.leases import reclaim_lost
from interlock.engine.workflows import Plans
from interlock.ids import floor_of
from interlock.store.migrate import ensure_partitions
from interlock.store.pool import Database, Tx
from interlock.telemetry import log, metrics

_BATCH = 200


async def wake_due(database: Database) -> int:
    """Runs whose timer is due go back to the queue."""
    total = 0
    while woken := len(await database.fetch("wake_due_runs", database.clock(), _BATCH)):
        total += woken
        if woken < _BATCH:
            break
    return total


async def seconds_to_next(database: Database) -> float | None:
    seconds: float | None = await database.value("next_due", database.clock())
    return seconds


async def enforce_deadlines(database: Database, plans: Plans) -> int:
    """Approvals that nobody decided, runs that took too long. One transaction each: a bad row stops no other."""
    late = await database.fetch("expired_approvals", database.clock(), _BATCH)
    overdue = await database.fetch("overdue_runs", database.clock(), _BATCH)
    jobs: list[Callable[[Tx], Awaitable[object]]] = []
    jobs += [partial(_expire, database, plans, row["tenant_id"], row["id"]) for row in late]
    jobs += [partial(_time_out, database, plans, row["tenant_id"], row["id"]) for row in overdue]
    for job in jobs:
        try:
            await database.command(job)
        except Exception as error:
            log.error("sweep_failed", exc_info=error)
    return len(jobs)


async def _expire(database: Database, plans: Plans, tenant_id: UUID, approval_id: UUID, tx: Tx) -> None:
    await approvals.expire(tx, database, plans, tenant_id, approval_id)


async def _time_out(database: Database, plans: Plans, tenant_id: UUID, run_id: UUID, tx: Tx) -> None:
    await runs.time_out(tx, database, plans, tenant_id, run_id)


async def recount_lanes(database: Database) -> int:
    """In-flight counts are kept with the leases, in the same transactions; a difference is a bug, and is mended."""
    drifted = 0
    for lane in await database.fetch("lanes_in_use"):

        async def recount(tx: Tx, tenant: object = lane["tenant_id"]) -> bool:
            before = await tx.row("lock_lane", tenant)
            after = await tx.value("recount_lane", tenant)
            if after is not None:
                assert before is not None
                log.error("lane_drift", tenant_id=str(tenant), counted=before["in_flight"], leases=after)
            return after is not None

        drifted += await database.command(recount)
    metrics.lane_drift.inc(drifted)
    return drifted


async def tend(database: Database) -> None:
    """Housekeeping: old idempotency records, the journal's coming months, and those that retention lets go."""
    await database.fetch("forget_expired_keys", database.clock(), 1000)
    async with database.pool.acquire() as connection:
        await ensure_partitions(connection, database.clock() or datetime.now(UTC))
    if database.settings.retention_days is not None:
        await _drop_old_months(database, database.settings.retention_days)


async def _drop_old_months(database: Database, days: int) -> None:
    now = database.clock() or datetime.now(UTC)
    for row in await database.fetch("entry_partitions"):
        name = row["name"]
        year, month = int(name[6:10]), int(name[10:12])
        end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
        if (now - end).days < days:
            continue
        async with database.pool.acquire() as connection:
            open_runs = await connection.fetchval(
                "SELECT count(*) FROM run WHERE id < $1 AND completed_at IS NULL", floor_of(end)
            )
            if open_runs:
                log.info("retention_waits", partition=name, open_runs=open_runs)
                continue
            await connection.execute(f"DROP TABLE {name}")
            log.info("retention_dropped", partition=name)


__all__ = ["enforce_deadlines", "reclaim_lost", "recount_lanes", "seconds_to_next", "tend", "wake_due"]
