"""Memory: how much of it this process has, and what a worker does that has too much."""

import ctypes
import ctypes.util
import gc
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.engine import leases
from interlock.lifecycle import WorkerEvent, WorkerState

if TYPE_CHECKING:
    from interlock.worker.loop import Worker

_STATM = Path("/proc/self/statm")
# A worker that went over its limit goes on when it is below this part of it; one that does not get there in time,
# though it holds no run any more, is replaced.
_ENOUGH_MEMORY = 0.9
_MEMORY_PATIENCE_SECONDS = 10.0


class MemoryLimit:
    """Over its limit a worker is paused: it takes no more runs and gives back those that it has. When it is below the
    limit again it goes on; if it cannot get there, it ends."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        # Since when it is paused for want of memory and holds no run.
        self._short_since: float | None = None

    async def mind(self) -> None:
        worker, limit = self._worker, self._worker.settings.worker_memory_mb
        if limit is None:
            return
        is_running = worker.orders.status == WorkerState.RUNNING
        if self._short_since is None:
            if is_running and (used := resident_mb()) > limit:
                await self._order(WorkerEvent.PAUSE, f"memory: {used:.0f} MB used, {limit} MB allowed")
                self._short_since = time.monotonic()
            return
        if worker.drivers:
            self._short_since = time.monotonic()
            return
        give_back()
        if is_running:
            self._short_since = None  # somebody else had it go on
        elif (used := resident_mb()) < limit * _ENOUGH_MEMORY:
            await self._order(WorkerEvent.RESUME, f"memory: {used:.0f} MB used")
            self._short_since = None
        elif time.monotonic() - self._short_since > _MEMORY_PATIENCE_SECONDS:
            why = f"memory: {used:.0f} MB used with nothing to do, {limit} MB allowed"
            await self._order(WorkerEvent.TERMINATE, why)

    async def _order(self, event: WorkerEvent, why: str) -> None:
        await leases.move_worker(self._worker.database, self._worker.me.id, event, why)
        self._worker.suspect()  # it obeys what the answer to its next heartbeat says


def resident_mb() -> float:
    """What is in memory now; where the system does not say, the most that ever was."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 1e6 if sys.platform == "darwin" else most / 1e3


def give_back() -> None:
    """Python keeps what it freed for itself, and so does the C library; the system should have it."""
    gc.collect()
    library = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if trim is not None:
        trim(0)
