"""Retention detaches whole months from the journal, and drops them after a grace time in which they can be restored.

The database's clock decides what is old enough, inside the statements that detach and drop. A process whose clock
differs much from the database's does nothing: one of the two is wrong, and a dropped month cannot be restored.
"""

import re
from datetime import UTC, datetime
from uuid import UUID

from interlock import clock
from interlock.audit.keys import SigningKey
from interlock.engine import sessions
from interlock.engine.proof import audit
from interlock.errors import Conflict, Invalid, NotFound
from interlock.ids import floor_of
from interlock.store.pool import Database, Row
from interlock.telemetry import log


async def may_delete(database: Database) -> bool:
    """Return whether the clocks of this process and of the database agree, after comparing them again."""
    await database.compare_clocks()
    if clock.is_wrong():
        log.error("deletes_nothing", detail=clock.difference())
    return not clock.is_wrong()


async def tend(database: Database, key: SigningKey | None) -> None:
    """Detach the months that are old enough, and drop those whose grace time is over."""
    settings = database.settings
    if settings.retention_days is None:
        return
    for row in await database.fetch("months_to_detach", settings.retention_days):
        await _detach(database, row["name"], settings.retention_days, key)
    for row in await database.fetch("months_to_drop", settings.retention_grace_days):
        await _drop(database, row["name"], settings.retention_grace_days)


async def _detach(database: Database, name: str, keep_days: int, key: SigningKey | None) -> None:
    """Detach a month once all its runs have ended, are sealed and have their evidence. Sign its removal first."""
    if why := await _keeps(database, _bounds(name)[1], key):
        log.info("retention_waits", partition=name, why=why)
    elif await database.value("detach_month", name, keep_days):
        log.warning(
            "retention_detached", partition=name, drops_after_days=database.settings.retention_grace_days,
            put_back_with=f"interlock db keep {month_of(name)}",
        )  # fmt: skip


async def _drop(database: Database, name: str, grace_days: int) -> None:
    await sessions.forget(database, _bounds(name)[1])  # before the month, whose row makes a later sweep return here
    if await database.value("drop_month", name, grace_days):
        log.warning("retention_dropped", partition=name)


async def _keeps(database: Database, floor: UUID, key: SigningKey | None) -> str | None:
    """Return why the entries of the runs below `floor` must stay for now."""
    if open_runs := await database.value("open_runs_below", floor):
        return f"{open_runs} runs have not ended"
    # In this order: an entry sealed after the first check would have its evidence due only after a reversed check.
    if await database.value("unsealed_below", floor):
        return "some entries are not sealed yet"
    if await database.value("evidence_due_below", floor):
        return "some runs have no evidence yet"
    if key is None:
        return "the signing key is not here; where it is, it will be done"
    return None if await audit.release(database, key, floor) else "another process is sealing"


# ---------------------------------------------------------------- operator commands


async def months(database: Database) -> list[Row]:
    return await database.fetch("journal_months", database.settings.retention_grace_days)


async def keep(database: Database, month: str) -> None:
    """Put a month back into the journal if retention detached it, and exclude it from retention from now on."""
    name = _partition(month)
    if not await database.value("keep_month", name, *_bounds(name)):
        raise NotFound(f"The journal has no month {month}. Retention has dropped it, or it never was.")
    log.info("retention_keeps", partition=name)


async def release(database: Database, month: str) -> None:
    """Let retention detach the month again when it is old enough."""
    if await database.value("release_month", _partition(month)) is None:
        raise Conflict(f"The month {month} is not kept: retention treats it like any other.", code="MONTH_NOT_KEPT")


def month_of(partition: str) -> str:
    return f"{partition[14:18]}-{partition[18:20]}"


def _partition(month: str) -> str:
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise Invalid(f"{month!r} is not a month. Write it like 2026-01.")
    return f"journal_entry_{month.replace('-', '')}"


def _bounds(partition: str) -> tuple[UUID, UUID]:
    year, month = int(partition[14:18]), int(partition[18:20])
    begin, end = datetime(year, month, 1, tzinfo=UTC), datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return floor_of(begin), floor_of(end)
