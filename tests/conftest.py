"""Fixtures: a real PostgreSQL per test process, a fresh database per test, time that tests move."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from interlock import tracing
from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.pool import Database
from interlock.testing import Clock, Scratch
from interlock.testing.plugin import engine, interlock_scratch
from tests.rig import Rig

__all__ = ["engine", "interlock_scratch"]


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """No test sees the settings of whoever runs it."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("INTERLOCK_")}
    yield
    os.environ.update(kept)


@pytest.fixture(scope="session", autouse=True)
def _chosen_postgres() -> None:
    """Another PostgreSQL than the wheel's, for whoever wants to know whether it does."""
    if chosen := os.environ.get("POSTGRES_BIN"):
        embedded.find_binaries = lambda: Path(chosen)


@pytest.fixture(autouse=True)
def _own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server started by an earlier test in this process may have asked for shared ones."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)


@pytest.fixture(scope="session")
def server(interlock_scratch: Scratch) -> embedded.Joined:
    """One PostgreSQL for the whole test process."""
    return interlock_scratch.server


def url_of(server: embedded.Joined, name: str) -> str:
    return server.url.replace("@/postgres?", f"@/{name}?")


@pytest.fixture(scope="session")
def template(interlock_scratch: Scratch) -> str:
    """A migrated database that every test's own is copied from."""
    return asyncio.run(interlock_scratch.prepare())


@pytest.fixture
async def url(interlock_scratch: Scratch) -> AsyncIterator[str]:
    """A fresh database of this test's own."""
    url = await interlock_scratch.fresh()
    yield url
    await interlock_scratch.drop(url)


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


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    """The spans that are sent while the test lasts."""
    exporter = InMemorySpanExporter()
    made = tracing.Spans(SimpleSpanProcessor(exporter))
    tracing.use(made)
    yield exporter
    tracing.use(None)
    made.close()
