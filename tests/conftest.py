"""Fixtures: a real PostgreSQL per test process, a fresh database per test, and time that tests move."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from interlock import tracing
from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.pool import Database
from interlock.testing import ManualClock, Scratch
from interlock.testing.plugin import engine
from tests.fixed_time import FixedScratch, fixed_process_time
from tests.rig import Rig
from tests.time_limit import pytest_addoption, pytest_runtest_protocol

__all__ = ["engine", "pytest_addoption", "pytest_runtest_protocol"]


# The same examples in every run. `HYPOTHESIS_PROFILE=default` searches for others.
# No deadline and no check of the speed either: they fail on a busy machine.
hypothesis.settings.register_profile(
    "deterministic", derandomize=True, database=None, deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """Hide the settings of the user who runs the tests."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("INTERLOCK_")}
    yield
    os.environ.update(kept)


@pytest.fixture(scope="session", autouse=True)
def _own_signal_dispositions() -> None:
    """A shell starts a background job with SIGINT ignored, and nohup ignores SIGHUP. Processes inherit that, so a
    test that sends itself a SIGINT would wait for ever. With these handlers, processes that the tests start get the
    default again.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _chosen_postgres() -> None:
    """Use another PostgreSQL than the wheel's, to test Interlock with that version."""
    if chosen := os.environ.get("POSTGRES_BIN"):
        embedded.find_binaries = lambda: Path(chosen)


@pytest.fixture(autouse=True)
def _own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test's server in this process may have enabled shared metrics."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)


@pytest.fixture(autouse=True)
def _fixed_time() -> Iterator[None]:
    """Start each test at the same instant, so that no test crosses the end of an hour or a month by chance.

    Tests that start processes override this with `machine_time`: processes ask the machine's clock.
    """
    with fixed_process_time():
        yield


@pytest.fixture(scope="session")
def interlock_scratch() -> Iterator[Scratch]:
    """One PostgreSQL for the whole test process."""
    scratch = FixedScratch()
    yield scratch
    scratch.close()


@pytest.fixture(scope="session")
def server(interlock_scratch: Scratch) -> embedded.Joined:
    """One PostgreSQL for the whole test process."""
    return interlock_scratch.server


def url_of(server: embedded.Joined, name: str) -> str:
    return server.url.replace("@/postgres?", f"@/{name}?")


@pytest.fixture(scope="session")
def template(interlock_scratch: Scratch) -> str:
    """A migrated database, the template for every test's database."""
    return asyncio.run(interlock_scratch.prepare())


@pytest.fixture
async def url(interlock_scratch: Scratch) -> AsyncIterator[str]:
    """A fresh database for this test."""
    url = await interlock_scratch.fresh()
    yield url
    await interlock_scratch.drop(url)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(lease_seconds=5, poll_seconds=0.2, data_dir=tmp_path / "data")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def database(url: str, settings: Settings, clock: ManualClock) -> AsyncIterator[Database]:
    database = await Database(url, settings, clock=clock, size=8).open()
    yield database
    await database.close()


@pytest.fixture
async def rig(database: Database, settings: Settings, clock: ManualClock) -> AsyncIterator[Rig]:
    """An engine with a worker that tests switch on, and time that tests move."""
    rig = await Rig.make(database, settings, clock)
    yield rig
    await rig.close()


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    """The spans that the engine exports during the test."""
    exporter = InMemorySpanExporter()
    made = tracing.Spans(SimpleSpanProcessor(exporter))
    tracing.use(made)
    yield exporter
    tracing.use(None)
    made.close()
