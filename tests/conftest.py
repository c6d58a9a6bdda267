"""Fixtures: a real PostgreSQL per test process, a fresh database per test, time that tests move."""

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.migrate import migrate
from interlock.store.pool import Database
from tests.rig import Clock, Rig

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """No test sees the settings of whoever runs it."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("INTERLOCK_")}
    yield
    os.environ.update(kept)


@pytest.fixture(autouse=True)
def _own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server started by an earlier test in this process may have asked for shared ones."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)


def _fast_place() -> str | None:
    """In memory where there is room: half of a test's time is the making of its database."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    return str(memory) if roomy else None


@pytest.fixture(scope="session")
def server() -> Iterator[embedded.Joined]:
    """One PostgreSQL for the whole test process."""
    base = Path(tempfile.mkdtemp(prefix="interlock-tests-", dir=_fast_place()))
    server = embedded.start(base)
    yield server
    server.leave()
    shutil.rmtree(base, ignore_errors=True)


def url_of(server: embedded.Joined, name: str) -> str:
    return server.url.replace("@/postgres?", f"@/{name}?")


@pytest.fixture(scope="session")
def template(server: embedded.Joined) -> str:
    """A migrated database that every test's own is copied from."""

    async def make() -> None:
        connection = await asyncpg.connect(server.url)
        # What tests assert does not depend on a power cut.
        await connection.execute("ALTER SYSTEM SET fsync = off")
        await connection.execute("ALTER SYSTEM SET max_connections = 200")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.execute("CREATE DATABASE interlock_template")
        await connection.close()
        database = await Database(url_of(server, "interlock_template"), Settings(), size=1).open()
        await migrate(database)
        await database.close()

    asyncio.run(make())
    return "interlock_template"


@pytest.fixture
async def url(server: embedded.Joined, template: str) -> AsyncIterator[str]:
    """A fresh database of this test's own."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    admin: Any = await asyncpg.connect(server.url)
    await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield url_of(server, name)
    await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(lease_seconds=5, poll_seconds=0.2, data_dir=tmp_path / "data")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def database(url: str, settings: Settings, clock: Clock) -> AsyncIterator[Database]:
    database = await Database(url, settings, clock=clock, size=8).open()
    yield database
    await database.close()


@pytest.fixture
async def rig(database: Database, settings: Settings, clock: Clock) -> AsyncIterator[Rig]:
    """An engine with a worker that tests switch on, and time that tests move."""
    rig = await Rig.make(database, settings, clock)
    yield rig
    await rig.close()
