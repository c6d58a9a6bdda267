"""Migrations: forward only, one transaction each, under one lock, so that any number of processes may start at once."""

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import asyncpg

from interlock.errors import Conflict, Unavailable
from interlock.ids import floor_of
from interlock.store.pool import Database, retrying
from interlock.telemetry import log
from interlock.timeouts import wait_for_event

_LOCK = 0x1B7E510C
_OLDEST_SERVER = 15


@dataclass(frozen=True, slots=True)
class Migration:
    name: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def migrations() -> list[Migration]:
    folder = files("interlock.store").joinpath("migrations")
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".sql")), key=lambda p: p.name)
    return [Migration(p.name.removesuffix(".sql"), p.read_text(encoding="utf-8")) for p in paths]


async def migrate(database: Database) -> list[str]:
    """Apply the pending migrations and return their names."""

    async def attempt() -> list[str]:
        async with database.without_timeouts() as connection:
            _check_version(connection.get_server_version())
            return await _migrate(connection)

    return await retrying(attempt, database.settings.database_patience_seconds)


async def _migrate(connection: Any) -> list[str]:
    applied_now: list[str] = []
    while True:
        async with connection.transaction():
            # Another process may take minutes over a long migration; wait for it, not for lock_timeout.
            await connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0")
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
            pending = await _pending(connection)
            if not pending:
                await ensure_partitions(connection)
                return applied_now
            await connection.execute(pending[0].text)
            await connection.execute(
                "INSERT INTO migration (name, digest, applied_at) VALUES ($1, $2, now())",
                pending[0].name,
                pending[0].digest,
            )
            applied_now.append(pending[0].name)


async def _pending(connection: Any) -> list[Migration]:
    await connection.execute(
        "CREATE TABLE IF NOT EXISTS migration"
        " (name text PRIMARY KEY, digest text NOT NULL, applied_at timestamptz NOT NULL)"
    )
    applied = {r["name"]: r["digest"] for r in await connection.fetch("SELECT name, digest FROM migration")}
    _refuse_unknown(applied)
    known = migrations()
    for migration in known:
        if applied.get(migration.name, migration.digest) != migration.digest:
            raise Conflict(f"migration {migration.name} was changed after it was applied", code="MIGRATION_CHANGED")
    return [m for m in known if m.name not in applied]


def _refuse_unknown(applied: Iterable[str]) -> None:
    """Raise if the database has migrations of a newer version, or of an older one that this version cannot continue."""
    if unknown := set(applied) - {m.name for m in migrations()}:
        raise Conflict(
            f"the database was migrated by another version of Interlock ({', '.join(sorted(unknown))}), "
            "which this one does not know; use that version, or another database",
            code="DATABASE_OF_ANOTHER_VERSION",
        )


# For a large table, PostgreSQL's estimate, which takes no time; for a small one, which may lack an estimate, a count.
_ABOUT_SO_MANY_RUNS = """
    SELECT greatest(reltuples, (SELECT count(*) FROM (SELECT FROM run LIMIT 10000) AS few))::bigint
      FROM pg_class WHERE oid = 'run'::regclass"""


async def status(database: Database) -> dict[str, Any]:
    async with database.connection() as connection:
        _check_version(connection.get_server_version())
        try:
            rows = await connection.fetch("SELECT name FROM migration ORDER BY name")
        except asyncpg.UndefinedTableError:
            rows = []
        applied = [r["name"] for r in rows]
        has_runs = await connection.fetchval("SELECT to_regclass('run') IS NOT NULL")
        return {
            "server_version": await connection.fetchval("SHOW server_version"),
            "applied": applied,
            "pending": [m.name for m in migrations() if m.name not in applied],
            "size_bytes": await connection.fetchval("SELECT pg_database_size(current_database())"),
            "runs": await connection.fetchval(_ABOUT_SO_MANY_RUNS) if has_runs else 0,
        }


async def ensure_partitions(connection: Any, at: datetime | None = None) -> None:
    """Create the journal's months (last, current and two more), so that no entry goes to the default partition.

    The current month is that of the database's clock, not of this process's.
    """
    now = at or await connection.fetchval("SELECT now()")
    existing = {
        r["name"]
        for r in await connection.fetch("""
        SELECT child.relname AS name FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid
         WHERE inhparent = 'entry'::regclass
        UNION ALL
        SELECT name FROM journal_month WHERE detached_at IS NOT NULL""")
    }
    for ahead in range(-1, 3):
        begin = _month(now, ahead)
        name = f"entry_{begin:%Y%m}"
        if name in existing:
            continue
        low, high = floor_of(begin), floor_of(_month(now, ahead + 1))
        try:
            # Both or neither: the journal's trigger that refuses TRUNCATE does not fire for a single partition.
            async with connection.transaction():
                await connection.execute(
                    f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF entry FOR VALUES FROM ('{low}') TO ('{high}');"
                    f"CREATE OR REPLACE TRIGGER entry_keep BEFORE TRUNCATE ON {name} FOR EACH STATEMENT"
                    " EXECUTE FUNCTION refuse_rewrite()"
                )
        except asyncpg.CheckViolationError:
            # A machine with a fast clock wrote entries of that month into the default partition, and they cannot be
            # moved. The whole month goes there, and stays when other months are dropped.
            log.warning("month_is_in_the_rest", partition=name)


def _month(now: datetime, ahead: int) -> datetime:
    months = now.year * 12 + now.month - 1 + ahead
    return datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)


def _check_version(version: Any) -> None:
    if version.major < _OLDEST_SERVER:
        raise Unavailable(
            f"PostgreSQL {version.major} is too old; Interlock needs 15 or newer", code="DATABASE_TOO_OLD"
        )


async def wait_until_migrated(database: Database, stop: asyncio.Event) -> None:
    """Wait until the database is migrated or `stop` is set, for workers that start before the server that migrates."""
    has_said = False
    while not stop.is_set():
        try:
            found = await retrying(lambda: status(database), database.settings.database_patience_seconds)
        except Unavailable as error:
            if error.code != Unavailable.code:
                raise  # migrated by a version that this one cannot use
            log.warning("waits_for_database", error=error.detail)
            continue
        _refuse_unknown(found["applied"])
        if not found["pending"]:
            return
        if not has_said:
            log.warning(
                "waits_for_migration", missing=len(found["pending"]), made_by="a server, or interlock db migrate"
            )
        has_said = True
        await wait_for_event(stop, 0.5)
