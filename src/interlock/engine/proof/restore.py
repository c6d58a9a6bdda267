"""Detect that the database was restored to an earlier moment, and begin a new epoch.

Effects after that moment exist, but the database has neither their steps nor their receipts. Runs that were open then
would repeat them. In a new epoch their writes are held for people, unless the tool is idempotent or can report itself
what happened (see `Journal.may_have_done`).
"""

import contextlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson

from interlock.engine.queueing.leases import reclaim_lost
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log

_FILE = "database.seen"
WENT_BACK = (
    "The database is at an earlier moment than this process has seen. If it was restored, stop all processes and run "
    "`interlock db restored`. Until then this machine's workers claim no runs, its schedules start nothing and it "
    "sends no messages."
)
_WHY_PAUSED = "the database was restored; check which runs of this schedule were lost or may repeat, then resume it"


@dataclass(frozen=True, slots=True)
class Epoch:
    number: int
    restored_to: datetime
    runs: int
    schedules: list[str]


async def restored_to(database: Database) -> datetime:
    """Return the latest moment that the database knows of."""
    found: datetime = await database.value("last_known_moment")
    return found


async def begin_epoch(database: Database) -> Epoch:
    """Begin a new epoch: take back every lease, mark every open run, and pause every schedule."""
    moment = await restored_to(database)
    await database.fetch("disown_workers")
    await reclaim_lost(database)

    async def work(tx: Tx) -> Epoch:
        number = await tx.value("begin_epoch", moment)
        shown = f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        runs = await tx.fetch("mark_restored", shown, number)
        paused = await tx.fetch("pause_all_schedules", _WHY_PAUSED)
        return Epoch(number, moment, len(runs), sorted(row["name"] for row in paused))

    epoch = await database.run_in_transaction(work)
    log.info("epoch_began", number=epoch.number, restored_to=moment.isoformat(), runs=epoch.runs)
    return epoch


# ---------------------------------------------------------------- detection


async def look(database: Database, data_dir: Path) -> None:
    """Compare the database with its last known state, and remember the newest checkpoint.

    The file belongs to the machine: every process on the same data reads and writes it.
    """
    now = await database.row("newest_checkpoint")
    assert now is not None
    seen = _read(data_dir / _FILE)
    if seen is None or not _is_same(seen, now) or await _still_has(database, seen):
        database.went_back = None
        _remember(data_dir / _FILE, now)
        return
    if database.went_back is None:
        log.error("database_went_back", detail=WENT_BACK)
    database.went_back = WENT_BACK


def _is_same(seen: dict[str, Any], now: Row) -> bool:
    """Return whether both are the same database in the same epoch. Otherwise the remembered state does not apply."""
    return (seen["database"], seen["epoch"]) == (str(now["database"]), now["epoch"])


async def _still_has(database: Database, seen: dict[str, Any]) -> bool:
    found: bool = await database.value(
        "has_checkpoint", UUID(seen["tenant_id"]), seen["number"], bytes.fromhex(seen["head"])
    )
    return found


def _remember(file: Path, now: Row) -> None:
    if now["number"] is None:
        return
    said = {name: str(now[name]) for name in ("database", "tenant_id")}
    said |= {"epoch": now["epoch"], "number": now["number"], "head": now["head"].hex()}
    file.parent.mkdir(parents=True, exist_ok=True)
    being_written = file.with_name(f"{file.name}.{os.getpid()}")
    being_written.write_bytes(orjson.dumps(said))
    being_written.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said: dict[str, Any] = orjson.loads(file.read_bytes())
        return {name: said[name] for name in ("database", "epoch", "tenant_id", "number", "head")}
    return None
