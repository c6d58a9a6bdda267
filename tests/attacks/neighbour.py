"""What another tenant notices during an attack: `GET /healthz` and a run of one step, timed.

A median does not show a single freeze. `LoopWatch` does: it measures for how long the event loop does not run.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

# On a busy machine a single request can take this long even if our code is correct.
_FLOOR_SECONDS = 0.25
# No handler may block the event loop for longer, not even once.
MOST_HELD_SECONDS = 0.5
_BEAT_SECONDS = 0.01

Probe = Callable[[], Awaitable[None]]


class LoopWatch:
    """Measures how long a computation, a blocking call, or a thread with the GIL blocks the event loop.

    A task wants to run every 10 ms, by the monotonic clock. The time that the loop's thread waited for a processor
    does not count: on a loaded machine it says nothing about our code.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.waited_file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._is_known = self.waited_file.exists()  # Linux only

    async def watch(self) -> None:
        while True:
            began, waited = time.monotonic(), self._waited()
            try:
                await asyncio.sleep(_BEAT_SECONDS)
            finally:  # also for a freeze during which the watch ends
                held = time.monotonic() - began - _BEAT_SECONDS - (self._waited() - waited)
                self.longest = max(self.longest, held)

    def _waited(self) -> float:
        """Return for how many seconds of its life this thread has waited for a processor."""
        return int(self.waited_file.read_text().split()[1]) / 1e9 if self._is_known else 0.0


@dataclass(slots=True)
class Neighbour:
    """`idle` is the median without an attack. During an attack, the median may be ten times as long, or the floor."""

    probes: dict[str, Probe]
    idle: dict[str, float] = field(default_factory=dict)
    attacked: dict[str, list[float]] = field(default_factory=dict)
    loop: LoopWatch = field(default_factory=LoopWatch)

    async def rest(self, times: int = 10) -> None:
        """Measure each probe without an attack."""
        for name, probe in self.probes.items():
            await probe()  # the first probe also pays for connections
            self.idle[name] = statistics.median([await _timed(probe) for _ in range(times)])

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Probe for as long as the block lasts."""
        self.attacked = {name: [] for name in self.probes}
        self.loop = LoopWatch()
        tasks = [asyncio.create_task(self._repeat(name)) for name in self.probes]
        tasks.append(asyncio.create_task(self.loop.watch()))
        await asyncio.sleep(0)  # let all of them start
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            for each in found:
                if isinstance(each, Exception):
                    raise each

    async def _repeat(self, name: str) -> None:
        while True:
            began = time.monotonic()
            self.attacked[name].append(0.0)  # counts also if the attack ends before the answer arrives
            try:
                await self.probes[name]()
            finally:
                self.attacked[name][-1] = time.monotonic() - began
            await asyncio.sleep(0.01)

    def notices_nothing(self) -> None:
        for name, idle in self.idle.items():
            took, allowed = statistics.median(self.attacked[name]), max(10 * idle, _FLOOR_SECONDS)
            assert took <= allowed, f"{name} took {took:.3f} s, idle {idle:.3f} s"
        assert self.loop.longest <= MOST_HELD_SECONDS, f"the event loop was held for {self.loop.longest:.3f} s"


async def _timed(probe: Probe) -> float:
    began = time.monotonic()
    await probe()
    return time.monotonic() - began
