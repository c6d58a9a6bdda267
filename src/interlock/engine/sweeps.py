"""Sweeps: what any process does from time to time so that nothing is forgotten. Any number may sweep at once."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

from interlock.engine import approvals, audit, events, outbox, runs, sessions
from interlock.engine.leases import reclaim_lost
from interlock.engine.observe import observe_woken
from interlock.engine.workflows import Plans
from interlock.governance.keys import SigningKey
from interlock.ids import floor_of
from interlock.store.migrate import ensure_partitions
from interlock.store.pool import Database, Tx
from interlock.telemetry import log, metrics

_BATCH = 200
_FORGET_BATCH = 1000
_TIMER = "system:timer"


async def wake_due(database: Database) -> int:
    """Runs whose timer is due go back to the queue."""
    total = 0
    while woken := await database.fetch("wake_runs", database.clock(), _BATCH, _TIMER, None, None, None):
        observe_woken(woken, _TIMER)
        total += len(woken)
        if len(woken) < _BATCH:
            break
    return total


async def seconds_to_next(database: Database) -> float | None:
    seconds: float | None = await database.value("next_due", database.clock())
    return seconds


async def enforce_deadlines(database: Database, plans: Plans) -> int:
    """Approvals to be mentioned again or that nobody decided, runs that took too long, events that did not come.

    One transaction each: a bad row stops no other.
    """
    late = await database.fetch("expired_approvals", database.clock(), _BATCH)
    overdue = await database.fetch("overdue_runs", database.clock(), _BATCH)
    quiet = await database.fetch("approvals_to_mention", database.clock(), _BATCH)
    missed = await database.fetch("overdue_waits", database.clock(), _BATCH)
    jobs: list[Callable[[Tx], Awaitable[object]]] = []
    jobs += [partial(_expire, database, plans, row["tenant_id"], row["id"]) for row in late]
    jobs += [partial(_time_out, database, plans, row["tenant_id"], row["id"]) for row in overdue]
    jobs += [partial(_mention, database, plans, row["tenant_id"], row["id"]) for row in quiet]
    jobs += [partial(_miss, database, plans, row["tenant_id"], row["run_id"], row["step"]) for row in missed]
    for job in jobs:
        try:
            await database.command(job)
        except Exception as error:
            log.error("sweep_failed", exc_info=error)
    return len(jobs)


async def _expire(database: Database, plans: Plans, tenant_id: UUID, approval_id: UUID, tx: Tx) -> None:
    await approvals.expire(tx, database, plans, tenant_id, approval_id)


async def _mention(database: Database, plans: Plans, tenant_id: UUID, approval_id: UUID, tx: Tx) -> None:
    await approvals.mention(tx, database, plans, tenant_id, approval_id)


async def _time_out(database: Database, plans: Plans, tenant_id: UUID, run_id: UUID, tx: Tx) -> None:
    await runs.time_out(tx, database, plans, tenant_id, run_id)


async def _miss(database: Database, plans: Plans, tenant_id: UUID, run_id: UUID, step: str, tx: Tx) -> None:
    await events.time_out(tx, database, plans, tenant_id, run_id, step)


async def recount_lanes(database: Database) -> int:
    """In-flight counts are kept with the leases, in the same transactions; a difference is a bug, and is mended."""
    drifted = 0
    for lane in await database.fetch("lanes_in_use"):

        async def recount(tx: Tx, lane_id: object = lane["id"]) -> bool:
            before = await tx.row("lock_lane", lane_id)
            after = await tx.value("recount_lane", lane_id)
            if after is not None:
                assert before is not None
                log.error("lane_drift", lane_id=str(lane_id), counted=before["in_flight"], leases=after)
            return after is not None

        drifted += await database.command(recount)
    drifted += await _let_in_the_forgotten(database)
    metrics.lane_drift.inc(drifted)
    return drifted


async def _let_in_the_forgotten(database: Database) -> int:
    """Whoever frees a place lets the next one in, in the same transaction; a run that finds room now was forgotten."""
    found = 0
    for row in await database.fetch("workflows_held_back"):
        late: int = (await database.fetch("let_in", [row["tenant_id"]], [row["workflow"]]))[0]["let_in"]
        if late:
            log.error("held_back_drift", tenant_id=str(row["tenant_id"]), workflow=row["workflow"], runs=late)
        found += late
    return found


async def tend(database: Database, key: SigningKey | None = None) -> None:
    """Housekeeping: old idempotency records, events, messages and counts; the journal's months that come and go."""
    await forget_keys(database)
    while await events.forget_expired(database):
        pass
    await outbox.tidy(database)
    await database.fetch("forget_ended", database.clock())
    async with database.connection() as connection:
        await ensure_partitions(connection, database.clock() or datetime.now(UTC))
    if database.settings.retention_days is not None:
        await _drop_old_months(database, database.settings.retention_days, key)


async def forget_keys(database: Database) -> int:
    """In batches, each a short transaction, until none is left: a busy day leaves many."""
    total = 0
    while gone := len(await database.fetch("forget_expired_keys", database.clock(), _FORGET_BATCH)):
        total += gone
        if gone < _FORGET_BATCH:
            break
    return total


async def _drop_old_months(database: Database, days: int, key: SigningKey | None) -> None:
    """A month goes when all its runs have ended, are sealed and have their evidence; and its going is signed first."""
    now = database.clock() or datetime.now(UTC)
    for row in await database.fetch("entry_partitions"):
        name = row["name"]
        year, month = int(name[6:10]), int(name[10:12])
        end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
        if (now - end).days < days:
            continue
        floor = floor_of(end)
        if why := await _keeps(database, floor, key):
            log.info("retention_waits", partition=name, why=why)
            continue
        await sessions.forget(database, floor)  # before the journal, which is what brings us here again
        async with database.connection() as connection:
            await connection.execute(f"DROP TABLE {name}")
        log.info("retention_dropped", partition=name)


async def _keeps(database: Database, floor: UUID, key: SigningKey | None) -> str | None:
    """Why the entries of the runs below `floor` must stay for now."""
    if open_runs := await database.value("open_runs_below", floor):
        return f"{open_runs} runs have not ended"
    # In this order: what is sealed after the second look would have its evidence due after it.
    if await database.value("unsealed_below", floor):
        return "some entries are not sealed yet"
    if await database.value("evidence_due_below", floor):
        return "some runs have no evidence yet"
    if key is None:
        return "the signing key is not here; where it is, it will be done"
    return None if await audit.release(database, key, floor) else "another process is sealing"


__all__ = ["enforce_deadlines", "reclaim_lost", "recount_lanes", "seconds_to_next", "tend", "wake_due"]
