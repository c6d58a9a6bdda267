"""The sweeper: timers, schedules, deadlines, lost workers and housekeeping, in every process with a free event loop."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

from interlock.engine import sessions
from interlock.engine.access.key_store import Signing
from interlock.engine.ingress import schedules
from interlock.engine.proof import audit, evidence, restore
from interlock.engine.proof.evidence import EvidenceSigner
from interlock.engine.queueing import jobs, sweeps
from interlock.engine.queueing.leases import reclaim_lost
from interlock.engine.runs import run_signals
from interlock.engine.workflows import Plans
from interlock.errors import Unavailable
from interlock.settings import Settings
from interlock.store.pool import TRANSIENT, Database
from interlock.telemetry import log

_SEAL_SECONDS = 1.0


async def sweep_forever(database: Database, settings: Settings, signing: Signing) -> None:
    plans = Plans(database)
    with _logged_task():
        await restore.look(database, settings.data_dir)  # before schedules are evaluated
    await asyncio.gather(
        _timers(database, settings),
        _every(settings.poll_seconds / 4, lambda: run_signals.deliver(database, plans)),
        _every(settings.poll_seconds / 2, lambda: sessions.start_waiting(database, plans)),
        _every(min(settings.lease_seconds / 3, 5.0), lambda: reclaim_lost(database)),
        _every(1.0, lambda: sweeps.enforce_deadlines(database, plans)),
        _every(1.0, lambda: schedules.start_due(database, plans)),
        _every(0.5, lambda: jobs.tend(database, plans)),
        _every(settings.poll_seconds, lambda: sweeps.admit_blocked(database)),
        _every(60.0, lambda: sweeps.recount_queues(database)),
        _every(60.0, database.compare_clocks),
        _every(5.0, lambda: restore.look(database, settings.data_dir)),
        _every(300.0, lambda: sweeps.tend(database, signing.key())),
        _every(_SEAL_SECONDS, lambda: audit.seal_all(database, signing)),
    )


async def prove_forever(database: Database, notary: EvidenceSigner) -> None:
    """Make evidence of the runs that ended. Servers do this, because they also deliver it."""
    await _every(_SEAL_SECONDS, lambda: evidence.make_all_due(database, notary))


async def _timers(database: Database, settings: Settings) -> None:
    """Wake due timers.

    Sleep until the next is due, but at most one poll interval, because other processes set timers too.
    """
    while True:
        pause = settings.poll_seconds / 4
        with _logged_task():
            await sweeps.resume_due(database)
            following = await sweeps.seconds_to_next(database)
            pause = min(max(following or pause, 0.005), pause)
        await asyncio.sleep(pause)


async def _every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    # Start at a random offset, so that not all processes sweep at the same moment.
    await asyncio.sleep(random.random() * min(seconds, 1.0))
    while True:
        began = time.monotonic()
        with _logged_task():
            await work()
        await asyncio.sleep(max(seconds - (time.monotonic() - began), 0.01))


class _logged_task(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Log the failure of a sweep, so that it is retried and never ends the process."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or isinstance(error, asyncio.CancelledError) or not isinstance(error, Exception):
            return False
        if isinstance(error, (Unavailable, *TRANSIENT)):
            log.warning("sweep_waits", error=str(error))
        else:
            log.error("sweep_failed", exc_info=error)
        return True
