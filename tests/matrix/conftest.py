"""Short tracebacks: the default ones, with every local variable, take seconds to print."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(scope="session", autouse=True)
def _plain_tracebacks() -> Iterator[None]:
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])
    yield
    structlog.reset_defaults()
