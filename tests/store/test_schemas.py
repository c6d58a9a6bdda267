"""Everything of an installation is in one schema of the database: several installations can share one."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from interlock.ids import floor_of
from interlock.settings import Settings
from interlock.store import embedded, notify, sql
from interlock.store.migrate import _month as month_after
from interlock.store.migrate import ensure_partitions, migrate, status
from interlock.store.notify import Listener
from interlock.store.pool import Database
from interlock.testing import ManualClock
from tests.conftest import url_of
from tests.fixed_time import machine_time as _fixed_time
from tests.rig import Rig

__all__ = ["_fixed_time"]

_numbers = itertools.count()
CHANNELS = (
    notify.READY, notify.RUN, notify.RUN_COMMAND, notify.POLICY, notify.OUTBOX, notify.KEYS, notify.WORKER,
)  # fmt: skip


@pytest.fixture
async def empty_url(server: embedded.Joined) -> AsyncIterator[str]:
    """A database without any objects."""
    name = f"schemas_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(server.url)
    await admin.execute(f"CREATE DATABASE {name}")
    yield url_of(server, name)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


def settings_of(schema: str, path: Path) -> Settings:
    return Settings(database_schema=schema, data_dir=path / schema, lease_seconds=5, poll_seconds=0.2)


@asynccontextmanager
async def installation(url: str, schema: str, path: Path) -> AsyncIterator[Rig]:
    """A migrated installation in this schema, with a tool and a workflow of its own."""
    settings = settings_of(schema, path)
    database = await Database(url, settings, size=8).open()
    await migrate(database)
    rig = await Rig.make(database, settings, ManualClock())

    @rig.tool("t.who")
    async def who() -> str:
        return schema

    await rig.apply("{name: work, steps: [{id: a, tool: t.who}, {id: gate, approval: {}}, {id: b, tool: t.who}]}")
    try:
        yield rig
    finally:
        await rig.close()
        await database.close()


@pytest.fixture
async def two(empty_url: str, tmp_path: Path) -> AsyncIterator[tuple[Rig, Rig]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(installation(empty_url, "first", tmp_path))
        second = await stack.enter_async_context(installation(empty_url, "second", tmp_path))
        yield first, second


async def outcome(rig: Rig, run_id: Any) -> tuple[str, str]:
    """Return the run's status and the output of its last step."""
    found = await rig.run(run_id)
    return found["status"], found["step"]["b"]["output"]


# ---------------------------------------------------------------- nothing outside of it

_OUTSIDE = """
SELECT kind || ' ' || nspname || '.' || name
  FROM (
    SELECT 'relation' AS kind, relname AS name, relnamespace AS namespace FROM pg_class
    UNION ALL SELECT 'function', proname, pronamespace FROM pg_proc
    UNION ALL SELECT 'type', typname, typnamespace FROM pg_type
    UNION ALL SELECT 'operator', oprname, oprnamespace FROM pg_operator
    UNION ALL SELECT 'collation', collname, collnamespace FROM pg_collation
  ) AS object JOIN pg_namespace ON pg_namespace.oid = namespace
 WHERE nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast', $1) AND nspname !~ '^pg_(toast_)?temp_'
UNION ALL
SELECT 'schema ' || nspname FROM pg_namespace
 WHERE nspname NOT IN ('public', 'information_schema', $1) AND nspname !~ '^pg_'
UNION ALL
SELECT 'extension ' || extname FROM pg_extension WHERE extname <> 'plpgsql'
"""


async def outside(url: str, schema: str) -> list[str]:
    """Return what the database has besides this schema and what belongs to PostgreSQL."""
    connection = await asyncpg.connect(url)
    found = [row[0] for row in await connection.fetch(_OUTSIDE, schema)]
    await connection.close()
    return found


@pytest.mark.parametrize("schema", ["interlock", "other"])
async def test_no_table_type_or_function_is_outside_the_schema(empty_url: str, tmp_path: Path, schema: str) -> None:
    async with installation(empty_url, schema, tmp_path) as rig:
        run_id = await rig.start("work")
        await rig.work_until(run_id, "waiting_approval")
        await rig.sweep()
    assert await outside(empty_url, schema) == []


async def test_an_object_outside_the_schema_would_be_found(empty_url: str) -> None:
    connection = await asyncpg.connect(empty_url)
    await connection.execute("CREATE FUNCTION one() RETURNS int LANGUAGE sql RETURN 1; CREATE DOMAIN d AS text")
    await connection.execute("CREATE SCHEMA beside")
    await connection.close()
    assert set(await outside(empty_url, "interlock")) >= {"function public.one", "type public.d", "schema beside"}


# ---------------------------------------------------------------- two in one database


async def test_two_installations_in_one_database_run_their_own_workflows(two: tuple[Rig, Rig]) -> None:
    first, second = two
    async with first.worker(), second.worker():
        runs = [(rig, await rig.start("work")) for rig in (first, second, first)]
        for rig, run_id in runs:
            await rig.until(run_id, "waiting_approval")
            await rig.approve(run_id, who=await rig.person("ann", "approver"))
            await rig.until(run_id)
    assert [await outcome(*run) for run in runs] == [
        ("succeeded", "first"), ("succeeded", "second"), ("succeeded", "first"),
    ]  # fmt: skip


async def rows(rig: Rig) -> dict[str, int]:
    """Return the number of rows in each table of the installation."""
    schema = rig.settings.database_schema
    tables = await rig.sql(
        "SELECT relname FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind IN ('r', 'p')"
        " AND NOT relispartition ORDER BY 1", schema,
    )  # fmt: skip
    return {
        table["relname"]: (await rig.sql(f"SELECT count(*) FROM {schema}.{table['relname']}"))[0][0] for table in tables
    }


async def test_what_one_installation_writes_changes_no_row_of_the_other(two: tuple[Rig, Rig]) -> None:
    first, second = two
    before = await rows(second)
    run_id = await first.start("work")
    async with first.worker():
        await first.until(run_id, "waiting_approval")
        await first.approve(run_id, who=await first.person("ann", "approver"))
        await first.until(run_id)
    await first.sweep()
    await first.prove()
    assert await rows(second) == before
    after = await rows(first)
    assert after["run"] == 1 and after["journal_entry"] > 5 and after["checkpoint"] > 0
    row = await sql.get_run(second.database, tenant_id=first.admin.tenant_id, run_id=run_id)
    assert row is None


async def test_a_worker_of_one_installation_leaves_the_backlog_of_the_other(two: tuple[Rig, Rig]) -> None:
    first, second = two
    theirs = await second.start("work")
    mine = await first.start("work")
    await first.work_until(mine, "waiting_approval")
    assert (await second.run(theirs))["status"] == "pending"
    assert await second.sql("SELECT FROM interlock.worker") == []


class Heard(dict[str, list[str]]):
    """Notifications by channel. The first of each channel says that the listener has begun."""

    def __init__(self, database: Database) -> None:
        super().__init__({channel: [] for channel in CHANNELS})
        self._ends = asyncio.Event()
        self._database = database
        self._listener = Listener(database, {channel: self._handler(channel) for channel in CHANNELS})

    def _handler(self, channel: str) -> Any:
        def hear(payload: str) -> None:
            if payload == "the end":
                self._ends.set()
            elif self._listener.listening.is_set():
                self[channel].append(payload)

        return hear

    async def __aenter__(self) -> "Heard":
        await self._listener.start()
        await asyncio.wait_for(self._listener.listening.wait(), 10)
        return self

    async def everything(self) -> dict[str, list[str]]:
        """Return what was heard of all that was committed before this call: notifications arrive in that order."""
        channel = notify.channel_name(self._database.settings, notify.RUN)
        await self._database.pool.execute("SELECT pg_notify($1, 'the end')", channel)
        await asyncio.wait_for(self._ends.wait(), 10)
        return dict(self)

    async def __aexit__(self, *_: object) -> None:
        await self._listener.stop()


async def test_an_installation_hears_no_notification_of_the_other(two: tuple[Rig, Rig]) -> None:
    first, second = two
    async with Heard(first.database) as of_first, Heard(second.database) as of_second:
        run_id = await first.start("work")
        async with first.worker():
            await first.until(run_id, "waiting_approval")
            await first.approve(run_id, who=await first.person("ann", "approver"))
            await first.until(run_id)
        assert await of_second.everything() == {channel: [] for channel in CHANNELS}
        heard = await of_first.everything()
    assert str(run_id) in heard[notify.RUN]
    assert heard[notify.READY]


async def test_background_work_of_one_installation_does_not_keep_the_other_from_its_own(two: tuple[Rig, Rig]) -> None:
    """The sealer and the allocation of workers exclude others of their own installation only."""
    first, second = two
    for name in ("lock_sealer", "try_allocate"):
        async with first.database.transaction() as tx, second.database.transaction() as other:
            assert await tx.value(name) is True
            assert await other.value(name) is True
            async with first.database.transaction() as again:
                assert await again.value(name) is False


async def test_retention_of_one_installation_leaves_the_months_of_the_other(two: tuple[Rig, Rig]) -> None:
    first, second = two
    async with first.database.connection() as connection:
        old = month_after(await connection.fetchval("SELECT now()"), -24)
        for rig in two:
            await ensure_partitions(connection, rig.settings.database_schema, month_after(old, 1))
    name, low, high = f"journal_entry_{old:%Y%m}", floor_of(old), floor_of(month_after(old, 1))

    async def months(rig: Rig) -> set[str]:
        tables = await rig.sql("SELECT schemaname FROM pg_tables WHERE tablename = $1", name)
        return {row["schemaname"] for row in tables}

    assert await first.database.value("detach_month", name, 30) is True
    assert await first.database.value("keep_month", name, low, high) is True
    assert await first.database.value("release_month", name) == name
    assert await first.database.value("detach_month", name, 30) is True
    assert await months(first) == {"first", "second"}
    assert await first.database.value("drop_month", name, 0) is True
    assert await months(first) == {"second"}
    assert name in {row["name"] for row in await second.database.fetch("months_to_detach", 30)}


# ---------------------------------------------------------------- the right to it


async def test_the_owner_of_the_schema_can_migrate_without_a_right_to_create_schemas(
    empty_url: str, server: embedded.Joined, tmp_path: Path
) -> None:
    user = f"owner_{uuid4().hex[:8]}"
    admin = await asyncpg.connect(empty_url)
    database_name = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"CREATE ROLE {user} LOGIN")
    try:
        await admin.execute(
            f"REVOKE ALL ON DATABASE {database_name} FROM PUBLIC; REVOKE ALL ON SCHEMA public FROM PUBLIC"
        )
        await admin.execute(f"GRANT CONNECT ON DATABASE {database_name} TO {user}")
        await admin.execute(f"CREATE SCHEMA interlock AUTHORIZATION {user}")
        url = empty_url.replace("//postgres@", f"//{user}@")
        async with installation(url, "interlock", tmp_path) as rig:
            run_id = await rig.start("work")
            await rig.work_until(run_id, "waiting_approval")
            assert await rig.database.pool.fetchval("SELECT current_user") == user
            assert (await status(rig.database))["pending"] == []
        # Another schema would be the administrator's to create.
        other = await Database(url, settings_of("other", tmp_path), size=2).open()
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await migrate(other)
        await other.close()
    finally:
        await admin.execute(f"REASSIGN OWNED BY {user} TO postgres; DROP OWNED BY {user}; DROP ROLE {user}")
        await admin.close()
