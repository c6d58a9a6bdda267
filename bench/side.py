"""The two sides of every comparison, as the measurements see them."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from bench.stage import Stage


class Side(Protocol):
    """A client on one side, any number of workers on the other."""

    def workers(self, count: int, counter: str | None = None) -> AbstractAsyncContextManager[None]:
        """Run this number of worker processes for as long as the block lasts. They count their steps in `counter`."""

    async def enqueue(self, runs: int, steps: int) -> None:
        """Start `runs` runs of `steps` steps each, in as few statements as possible."""

    async def completed(self) -> int:
        """Return how many runs have ended, according to the store."""

    async def tidy(self) -> None:
        """Remove the enqueued rows, so that the server has nothing left to clean up."""


class IdleSide(Protocol):
    """One idle worker, and a client that starts a run and waits for its end."""

    async def run_one(self, steps: int) -> list[float]:
        """Return when each step finished, on the machine's clock."""


OpenSide = Callable[[Stage], AbstractAsyncContextManager[Side]]
OpenIdleSide = Callable[[Stage], AbstractAsyncContextManager[IdleSide]]
