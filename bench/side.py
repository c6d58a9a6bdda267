"""The two sides of every comparison, as the measurements see them."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from bench.stage import Stage


class Side(Protocol):
    """A client at one end, as many workers as wanted at the other."""

    def workers(self, count: int, counter: str | None = None) -> AbstractAsyncContextManager[None]:
        """So many worker processes, up for as long as the block lasts; they count their steps in that file."""

    async def enqueue(self, runs: int, steps: int) -> None:
        """Start so many runs of so many steps, in as few statements as it takes."""

    async def completed(self) -> int:
        """How many runs have ended, according to the store."""

    async def tidy(self) -> None:
        """Leave nothing for the server to clean up from what was enqueued."""


class IdleSide(Protocol):
    """One worker with nothing to do, and a client that starts a run and waits for its end."""

    async def run_one(self, steps: int) -> list[float]:
        """When each of its steps was done, on the machine's clock."""


OpenSide = Callable[[Stage], AbstractAsyncContextManager[Side]]
OpenIdleSide = Callable[[Stage], AbstractAsyncContextManager[IdleSide]]
