"""Fixtures for pytest: `pytest_plugins = ["interlock.testing.plugin"]`, and `engine` is there."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from interlock.testing.engine import Engine
from interlock.testing.scratch import Scratch


@pytest.fixture(scope="session")
def interlock_scratch() -> Iterator[Scratch]:
    """One PostgreSQL for the whole test process."""
    scratch = Scratch()
    yield scratch
    scratch.close()


@pytest_asyncio.fixture
async def engine(interlock_scratch: Scratch) -> AsyncIterator[Engine]:
    """An engine of this test's own, with the tools and flows that its module imported."""
    async with Engine.open(interlock_scratch) as engine:
        yield engine
