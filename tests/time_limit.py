"""Every test has a time limit: a test that waits for ever fails with all threads' stacks; later tests continue."""

import faulthandler
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_SECONDS = 120.0
_CHAOS_SECONDS = 900.0
# The exception can end in a task without an awaiting caller; then it is raised again.
_AGAIN_SECONDS = 5.0
# For code that no exception can stop: it catches everything, or never returns to Python.
_LAST_RESORT_SECONDS = 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-limit", type=float, default=_SECONDS, help="Seconds for each test; 0: no limit.")


def _limit_of(item: pytest.Item) -> float:
    limit: float = item.config.getoption("--time-limit")
    is_slow = item.get_closest_marker("chaos") is not None or "/chaos/" in str(item.path)
    return max(limit, _CHAOS_SECONDS) if limit and is_slow else limit


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The limit includes fixtures, whose setup can also wait for ever."""
    limit = _limit_of(item)
    if not limit:
        return (yield)

    def give_up(number: int, frame: Any) -> None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        pytest.fail(f"{item.nodeid} took longer than {limit:g} s (--time-limit)")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit, _AGAIN_SECONDS)
    faulthandler.dump_traceback_later(limit + _LAST_RESORT_SECONDS, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
