"""Fixtures for pytest: `pytest_plugins = ["interlock.testing.plugin"]` provides `engine`."""

from collections.abc import AsyncIterator, Generator, Iterator
from inspect import iscoroutinefunction
from typing import Any

import pytest
import pytest_asyncio

from interlock.testing.engine import Engine
from interlock.testing.postgres import Scratch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "real_tools(*patterns): let `engine` call these tools themselves, by name or pattern."
    )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark async tests that use an engine before pytest-asyncio looks for its marker: they need no `asyncio_mode`."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Function) and "engine" in item.fixturenames and iscoroutinefunction(item.obj):
            item.add_marker(pytest.mark.asyncio)
    return made


@pytest.fixture(scope="session")
def interlock_scratch() -> Iterator[Scratch]:
    """One PostgreSQL for the whole test process."""
    scratch = Scratch()
    yield scratch
    scratch.close()


@pytest_asyncio.fixture
async def engine(request: pytest.FixtureRequest, interlock_scratch: Scratch) -> AsyncIterator[Engine]:
    """An engine for one test, with the tools and flows that the test's module imported.

    It calls no tool that the test does not fake. The marker `real_tools` allows some.
    """
    async with Engine.open(interlock_scratch) as engine:
        for marker in request.node.iter_markers("real_tools"):
            engine.allow_real_tools(*marker.args)
        yield engine
