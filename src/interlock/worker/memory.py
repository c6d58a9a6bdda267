"""Memory: how much this process uses, and what a worker does above its limit."""

import ctypes
import ctypes.util
import gc
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.engine.queueing import leases
from interlock.lifecycle import WorkerEvent, WorkerState

if TYPE_CHECKING:
    from interlock.worker.worker import Worker

_STATM = Path("/proc/self/statm")
# A worker above its limit resumes below this fraction of it. A worker that holds no run and does not get there in time
# is replaced.
_ENOUGH_MEMORY = 0.9
_MEMORY_PATIENCE_SECONDS = 10.0


class MemoryLimit:
    """Pauses a worker above its memory limit: it claims no runs and gives back those it has.

    Below the limit it resumes. If it cannot get there, it ends.
    """

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        # Since when the worker is paused for lack of memory and holds no run.
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
            self._short_since = None  # another order resumed the worker
        elif (used := resident_mb()) < limit * _ENOUGH_MEMORY:
            await self._order(WorkerEvent.RESUME, f"memory: {used:.0f} MB used")
            self._short_since = None
        elif time.monotonic() - self._short_since > _MEMORY_PATIENCE_SECONDS:
            why = f"memory: {used:.0f} MB used with nothing to do, {limit} MB allowed"
            await self._order(WorkerEvent.TERMINATE, why)

    async def _order(self, event: WorkerEvent, why: str) -> None:
        await leases.move_worker(self._worker.database, self._worker.me.id, event, why)
        self._worker.recheck_lease()  # the worker obeys the answer to its next heartbeat


def resident_mb() -> float:
    """Return the resident memory now, or its maximum so far where the system does not report the current value."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 1e6 if sys.platform == "darwin" else most / 1e3


def give_back() -> None:
    """Return freed memory to the system. Python and the C library would otherwise keep it."""
    gc.collect()
    library = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if trim is not None:
        trim(0)
