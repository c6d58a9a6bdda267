"""Migrations: forward only, one transaction each, under one lock, so that any number of processes may start at once.

Functions and triggers are not in migrations but in `functions/` and `triggers.sql`: each migrate replaces them all if
one of them changed.
"""

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
from interlock.store.queries import in_schema
from interlock.telemetry import log
from interlock.timeouts import wait_for_event

_OLDEST_SERVER = 15


@dataclass(frozen=True, slots=True)
class Migration:
    name: str
    text: str

    @property
    def digest(self) -> str:
        return _sha256(self.text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def migrations() -> list[Migration]:
    folder = files("interlock.store").joinpath("migrations")
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".sql")), key=lambda p: p.name)
    return [Migration(p.name.removesuffix(".sql"), p.read_text(encoding="utf-8")) for p in paths]


def functions() -> str:
    """Return the statements that replace all functions and triggers."""
    store = files("interlock.store")
    paths = sorted((p for p in store.joinpath("functions").iterdir() if p.name.endswith(".sql")), key=lambda p: p.name)
    return "\n".join(p.read_text(encoding="utf-8") for p in [*paths, store.joinpath("triggers.sql")])


async def migrate(database: Database) -> list[str]:
    """Apply the pending migrations and return their names, with `functions` if those were replaced."""
    schema = database.settings.database_schema

    async def attempt() -> list[str]:
        async with database.without_timeouts() as connection:
            _check_version(connection.get_server_version())
            return await _migrate(connection, schema)

    return await retrying(attempt, database.settings.database_patience_seconds)


async def _migrate(connection: Any, schema: str) -> list[str]:
    applied_now: list[str] = []
    while True:
        async with connection.transaction():
            # Another process may take minutes over a long migration; wait for it, not for lock_timeout.
            await connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0")
            await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"{schema}.migration")
            await _create_schema(connection, schema)
            pending = await _pending(connection, schema)
            if not pending:
                if await _replace_functions(connection, schema):
                    applied_now.append(FUNCTIONS)
                await ensure_partitions(connection, schema)
                return applied_now
            await connection.execute(in_schema(pending[0].text, schema))
            await connection.execute(
                in_schema("INSERT INTO interlock.migration (name, digest, applied_at) VALUES ($1, $2, now())", schema),
                pending[0].name,
                pending[0].digest,
            )
            applied_now.append(pending[0].name)


async def _create_schema(connection: Any, schema: str) -> None:
    # Not IF NOT EXISTS, which needs the right to create a schema even if it exists.
    if not await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema):
        await connection.execute(f"CREATE SCHEMA {schema}")
    await connection.execute(
        in_schema(
            "CREATE TABLE IF NOT EXISTS interlock.migration"
            " (name text PRIMARY KEY, digest text NOT NULL, applied_at timestamptz NOT NULL)",
            schema,
        )
    )


async def _pending(connection: Any, schema: str) -> list[Migration]:
    query = in_schema("SELECT name, digest FROM interlock.migration", schema)
    applied = {r["name"]: r["digest"] for r in await connection.fetch(query)}
    _refuse_unknown(applied)
    known = migrations()
    for migration in known:
        if applied.get(migration.name, migration.digest) != migration.digest:
            raise Conflict(f"migration {migration.name} was changed after it was applied", code="MIGRATION_CHANGED")
    return [m for m in known if m.name not in applied]


# The row of the functions and triggers beside those of the migrations.
FUNCTIONS = "functions"


async def _replace_functions(connection: Any, schema: str) -> bool:
    """Replace all functions and triggers, unless the database has these. Return whether it was done."""
    text = functions()
    digest = _sha256(text)
    query = in_schema("SELECT digest FROM interlock.migration WHERE name = $1", schema)
    if await connection.fetchval(query, FUNCTIONS) == digest:
        return False
    # The functions call each other, so their bodies are checked when they are first called.
    await connection.execute("SET LOCAL check_function_bodies = off")
    await connection.execute(in_schema(text, schema))
    await connection.execute(
        in_schema(
            "INSERT INTO interlock.migration (name, digest, applied_at) VALUES ($1, $2, now())"
            " ON CONFLICT (name) DO UPDATE SET digest = excluded.digest, applied_at = excluded.applied_at",
            schema,
        ),
        FUNCTIONS,
        digest,
    )
    return True


def _refuse_unknown(applied: Iterable[str]) -> None:
    """Raise if the database has migrations of a newer version, or of an older one that this version cannot continue."""
    if unknown := set(applied) - {m.name for m in migrations()} - {FUNCTIONS}:
        raise Conflict(
            f"the database was migrated by another version of Interlock ({', '.join(sorted(unknown))}), "
            "which this one does not know; use that version, or another database",
            code="DATABASE_OF_ANOTHER_VERSION",
        )


# For a large table, PostgreSQL's estimate, which takes no time; for a small one, which may lack an estimate, a count.
_ABOUT_SO_MANY_RUNS = """
    SELECT greatest(reltuples, (SELECT count(*) FROM (SELECT FROM interlock.run LIMIT 10000) AS few))::bigint
      FROM pg_class WHERE oid = 'interlock.run'::regclass"""


async def status(database: Database) -> dict[str, Any]:
    schema = database.settings.database_schema
    async with database.connection() as connection:
        _check_version(connection.get_server_version())
        try:
            query = in_schema("SELECT name, digest FROM interlock.migration ORDER BY name", schema)
            applied = {r["name"]: r["digest"] for r in await connection.fetch(query)}
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            applied = {}
        pending = [m.name for m in migrations() if m.name not in applied]
        if applied.get(FUNCTIONS) != _sha256(functions()):
            pending.append(FUNCTIONS)
        has_runs = await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{schema}.run")
        return {
            "server_version": await connection.fetchval("SHOW server_version"),
            "schema": schema,
            "applied": [name for name in applied if name not in pending],
            "pending": pending,
            "size_bytes": await connection.fetchval("SELECT pg_database_size(current_database())"),
            "runs": await connection.fetchval(in_schema(_ABOUT_SO_MANY_RUNS, schema)) if has_runs else 0,
        }


_MONTHS = """
    SELECT child.relname AS name FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid
     WHERE inhparent = 'interlock.journal_entry'::regclass
    UNION ALL
    SELECT name FROM interlock.journal_month WHERE detached_at IS NOT NULL"""


async def ensure_partitions(connection: Any, schema: str, at: datetime | None = None) -> None:
    """Create the journal's months (last, current and two more), so that no entry goes to the default partition.

    The current month is that of the database's clock, not of this process's.
    """
    now = at or await connection.fetchval("SELECT now()")
    existing = {r["name"] for r in await connection.fetch(in_schema(_MONTHS, schema))}
    for ahead in range(-1, 3):
        begin = _month(now, ahead)
        name = f"journal_entry_{begin:%Y%m}"
        if name in existing:
            continue
        low, high = floor_of(begin), floor_of(_month(now, ahead + 1))
        try:
            # Both or neither: the journal's trigger that refuses TRUNCATE does not fire for a single partition.
            async with connection.transaction():
                month = f"""
                    CREATE TABLE IF NOT EXISTS interlock.{name} PARTITION OF interlock.journal_entry
                      FOR VALUES FROM ('{low}') TO ('{high}');
                    CREATE OR REPLACE TRIGGER journal_entry_keep BEFORE TRUNCATE ON interlock.{name} FOR EACH STATEMENT
                      EXECUTE FUNCTION interlock.refuse_rewrite()"""
                await connection.execute(in_schema(month, schema))
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
