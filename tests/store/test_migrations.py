"""Migrations: any number of processes may start at once, and none touches a database of an unknown version."""

import asyncio
import itertools
import os
import re
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import asyncpg
import pytest
import structlog

from interlock import clock
from interlock.errors import Conflict, Unavailable
from interlock.ids import floor_of
from interlock.settings import Settings
from interlock.store import embedded, pool
from interlock.store import migrate as migrations
from interlock.store.migrate import Migration, migrate, status, wait_until_migrated
from interlock.store.pool import Database, connection_options
from tests.chaos.processes import until
from tests.conftest import url_of
from tests.rig import Rig
from tests.store.functions import BODIES

_numbers = itertools.count()
ALL = [*(m.name for m in migrations.migrations()), migrations.FUNCTIONS]


@pytest.fixture
async def empty_url(server: embedded.Joined) -> AsyncIterator[str]:
    """A database without any objects."""
    name = f"empty_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(server.url)
    await admin.execute(f"CREATE DATABASE {name}")
    yield url_of(server, name)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture
async def empty(empty_url: str) -> AsyncIterator[Database]:
    database = await Database(empty_url, Settings(), size=2).open()
    yield database
    await database.close()


async def test_an_empty_database_gets_everything_once(empty: Database) -> None:
    assert (await status(empty))["pending"] == ALL
    assert await migrate(empty) == ALL
    assert await migrate(empty) == []
    found = await status(empty)
    assert (found["applied"], found["pending"], found["runs"]) == (ALL, [], 0)


async def test_the_runs_of_a_database_that_was_never_analyzed_are_counted(rig: Rig) -> None:
    await rig.apply("{name: gate, steps: [{id: ask, approval: {tier: low, summary: ok}}]}")
    await rig.start("gate")
    assert (await status(rig.database))["runs"] == 1


async def test_two_that_migrate_at_once_both_succeed_and_each_migration_is_applied_once(empty_url: str) -> None:
    databases = [await Database(empty_url, Settings(), size=2).open() for _ in range(3)]
    applied = await asyncio.gather(*(migrate(database) for database in databases))
    assert sorted(itertools.chain(*applied)) == ALL
    assert await databases[0].pool.fetchval("SELECT count(*) FROM interlock.migration") == len(ALL)
    for database in databases:
        await database.close()


async def test_a_migration_that_fails_leaves_nothing_behind(empty: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations.migrations()
    broken = Migration("9999_broken", "CREATE TABLE interlock.half_made (); SELECT 1 / 0")
    monkeypatch.setattr(migrations, "migrations", lambda: [*known, broken])
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(empty)
    assert (await status(empty))["pending"] == ["9999_broken", migrations.FUNCTIONS]
    assert await empty.pool.fetchval("SELECT to_regclass('interlock.half_made')") is None


async def test_a_migration_that_was_changed_afterwards_is_refused(database: Database) -> None:
    await database.pool.execute("UPDATE interlock.migration SET digest = 'other'")
    with pytest.raises(Conflict, match=f"migration {ALL[0]} was changed") as caught:
        await migrate(database)
    assert caught.value.code == "MIGRATION_CHANGED"


@pytest.mark.parametrize("unknown", ["9999_future", "0001_of_long_ago"])
async def test_a_database_of_another_version_is_refused(database: Database, unknown: str) -> None:
    await database.pool.execute("INSERT INTO interlock.migration VALUES ($1, 'x', now())", unknown)
    with pytest.raises(Conflict, match=f"by another version of Interlock \\({unknown}\\), which this one") as caught:
        await migrate(database)
    assert caught.value.code == "DATABASE_OF_ANOTHER_VERSION"


async def test_a_server_that_is_too_old_is_refused_at_once(empty: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_OLDEST_SERVER", 99)
    with pytest.raises(Unavailable, match="is too old; Interlock needs 15 or newer") as caught:
        await migrate(empty)
    assert caught.value.code == "DATABASE_TOO_OLD"
    assert await empty.pool.fetchval("SELECT to_regnamespace('interlock')") is None


def test_postgresql_14_is_too_old_and_15_is_not() -> None:
    class Version:
        def __init__(self, major: int) -> None:
            self.major = major

    with pytest.raises(Unavailable):
        migrations._check_version(Version(14))
    migrations._check_version(Version(15))


async def test_who_looks_in_the_midst_of_migrating_is_told_how_far_it_is(
    empty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations.migrations()
    stuck = Migration(known[1].name, "SELECT 1 / 0")
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "migrations", lambda: [known[0], stuck, *known[2:]])
        with pytest.raises(asyncpg.DivisionByZeroError):
            await migrate(empty)
    found = await status(empty)
    assert (found["applied"], found["pending"], found["runs"]) == (ALL[:1], ALL[1:], 0)


async def test_a_worker_waits_until_somebody_has_migrated(empty: Database) -> None:
    waiting = asyncio.create_task(wait_until_migrated(empty, asyncio.Event()))
    await migrate(empty)
    await asyncio.wait_for(waiting, 5)


async def test_a_worker_that_waits_for_a_migration_says_so_and_ends_when_it_is_told_to(empty: Database) -> None:
    stop = asyncio.Event()
    with structlog.testing.capture_logs() as logs:
        waiting = asyncio.create_task(wait_until_migrated(empty, stop))
        await until(lambda: bool(logs), "it has looked")
        stop.set()
        await asyncio.wait_for(waiting, 5)
    assert [line["event"] for line in logs] == ["waits_for_migration"]
    assert logs[0]["missing"] == len(ALL)


async def test_a_broken_connection_ends_nobody_who_waits_for_a_migration(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = [ConnectionResetError("the server went away")] * 2
    answers: list[Any] = [*away, {"applied": [], "pending": []}]
    database.settings.database_patience_seconds = 0.001
    monkeypatch.setattr(migrations, "status", AsyncMock(side_effect=answers))
    await asyncio.wait_for(wait_until_migrated(database, asyncio.Event()), 5)


async def test_whoever_looks_at_a_server_that_is_too_old_is_told_so(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "_OLDEST_SERVER", 99)
    for look in (status(database), wait_until_migrated(database, asyncio.Event())):
        with pytest.raises(Unavailable, match="too old; Interlock needs") as caught:
            await asyncio.wait_for(look, 5)
        assert caught.value.code == "DATABASE_TOO_OLD"


async def test_a_worker_refuses_a_database_of_another_version(database: Database) -> None:
    await database.pool.execute("INSERT INTO interlock.migration VALUES ('9999_future', 'x', now())")
    with pytest.raises(Conflict, match="by another version of Interlock \\(9999_future\\), which this one") as caught:
        await asyncio.wait_for(wait_until_migrated(database, asyncio.Event()), 5)
    assert caught.value.code == "DATABASE_OF_ANOTHER_VERSION"


async def test_a_migration_and_whoever_waits_for_it_take_as_long_as_it_takes(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = connection_options  # as with a statement_timeout of nearly nothing, less the five seconds
    monkeypatch.setattr(pool, "connection_options", lambda database: hasty(database) | {"command_timeout": 0.2})
    slow = Migration("9999_slow", "SELECT pg_sleep(0.5)")
    monkeypatch.setattr(migrations, "migrations", lambda: [slow])
    monkeypatch.setattr(migrations, "functions", lambda: "SELECT 1")
    monkeypatch.setattr(migrations, "ensure_partitions", AsyncMock())
    databases = [await Database(empty_url, Settings(database_patience_seconds=0.1), size=2).open() for _ in range(2)]
    applied = await asyncio.gather(*(migrate(database) for database in databases))
    assert sorted(itertools.chain(*applied)) == ["9999_slow", migrations.FUNCTIONS]
    for database in databases:
        await database.close()


# ---------------------------------------------------------------- functions


async def bodies(database: Database) -> dict[str, str]:
    """Return the functions of the database, by name."""
    rows = await database.pool.fetch(
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'interlock'::regnamespace ORDER BY proname"
    )
    return {row["proname"]: re.sub(r"^ *--.*\n", "", row["prosrc"], flags=re.MULTILINE).strip() for row in rows}


async def test_the_functions_of_a_database_are_those_of_the_files(empty: Database) -> None:
    await migrate(empty)
    assert await bodies(empty) == {name: body.strip() for name, body in sorted(BODIES.items())}


def test_no_migration_has_the_body_of_a_function() -> None:
    for migration in migrations.migrations():
        assert bodies_in(migration.text) == [], migration.name
    assert bodies_in("CREATE FUNCTION one() RETURNS int LANGUAGE sql RETURN 1") == ["FUNCTION"]
    assert bodies_in("DO $$ BEGIN NULL; END $$") == ["$$", "$$"]


def bodies_in(text: str) -> list[str]:
    statements = re.sub(r"^ *--.*\n", "", text, flags=re.MULTILINE)
    return re.findall(r"\bFUNCTION\b|\bPROCEDURE\b|\bTRIGGER\b|\$\w*\$", statements)


async def test_functions_are_replaced_when_they_differ_from_those_that_were_applied(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await bodies(database)
    more = (
        "CREATE OR REPLACE FUNCTION interlock.key_of(actor text) RETURNS uuid LANGUAGE sql AS $$ SELECT NULL::uuid $$;"
    )
    with monkeypatch.context() as patch:
        text = migrations.functions()
        patch.setattr(migrations, "functions", lambda: text + more)
        assert (await status(database))["pending"] == [migrations.FUNCTIONS]
        assert await migrate(database) == [migrations.FUNCTIONS]
        assert await migrate(database) == []
        assert (await bodies(database))["key_of"] == "SELECT NULL::uuid"
    assert (await status(database))["pending"] == [migrations.FUNCTIONS]
    assert await migrate(database) == [migrations.FUNCTIONS]
    # The template's now() can be moved; every migrate puts the real one back.
    assert await bodies(database) == before | {"now": BODIES["now"].strip()}
    assert (await status(database))["pending"] == []


async def test_a_broken_function_leaves_those_that_were_there(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await bodies(database)
    text = migrations.functions()
    monkeypatch.setattr(migrations, "functions", lambda: text + "SELECT 1 / 0;")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(database)
    assert await bodies(database) == before


async def test_the_triggers_still_work_after_the_functions_were_replaced(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    triggers = "SELECT tgrelid::regclass::text, tgname FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1, 2"
    before = await database.pool.fetch(triggers)
    text = migrations.functions()
    monkeypatch.setattr(migrations, "functions", lambda: text + " ")
    await migrate(database)
    assert await database.pool.fetch(triggers) == before
    with pytest.raises(asyncpg.CheckViolationError, match="append-only"):
        await database.pool.execute("TRUNCATE interlock.journal_entry")


# ---------------------------------------------------------------- the months of the journal


async def months_of(database: Database) -> set[str]:
    return {row["name"] for row in await database.fetch("journal_months", 7)}


async def test_entries_of_today_and_of_next_month_never_land_in_the_rest_partition(database: Database) -> None:
    before = await months_of(database)
    assert len(before) == 4
    async with database.pool.acquire() as connection:
        now = await connection.fetchval("SELECT now()")
        await migrations.ensure_partitions(connection, "interlock", now)
        assert await months_of(database) == before
        await migrations.ensure_partitions(connection, "interlock", now.replace(year=now.year + 1, month=12))
    after = await months_of(database)
    assert after - before == {f"journal_entry_{now.year + 1}11", f"journal_entry_{now.year + 1}12"} | {
        f"journal_entry_{now.year + 2}01",
        f"journal_entry_{now.year + 2}02",
    }


async def test_entries_that_came_before_their_month_keep_nobody_from_starting(database: Database) -> None:
    """A machine's clock was far ahead: its runs have ids of a month that did not exist yet."""
    now = clock.now()
    early = migrations._month(now, 13)
    entry = """INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, token, actor)
               VALUES ($1, 1, $1, now(), 'x', 0, 'x')"""
    await database.pool.execute(entry, floor_of(early))
    async with database.pool.acquire() as connection:
        await migrations.ensure_partitions(connection, "interlock", migrations._month(now, 12))
    names = await months_of(database)
    assert f"journal_entry_{early:%Y%m}" not in names
    assert {f"journal_entry_{migrations._month(now, ahead):%Y%m}" for ahead in (11, 12, 14)} <= names
    assert await database.pool.fetchval("SELECT count(*) FROM interlock.journal_entry_rest") == 1


async def test_a_month_that_cannot_be_made_for_another_reason_is_not_passed_over(database: Database) -> None:
    now = migrations._month(clock.now(), 20)
    low, high = floor_of(now), floor_of(migrations._month(now, 1))
    await database.pool.execute(
        f"CREATE TABLE odd PARTITION OF interlock.journal_entry FOR VALUES FROM ('{low}') TO ('{high}')"
    )
    async with database.pool.acquire() as connection:
        with pytest.raises(asyncpg.InvalidObjectDefinitionError, match="overlap"):
            await migrations.ensure_partitions(connection, "interlock", now)
