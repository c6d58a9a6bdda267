"""Trial: of the steps that lost a second worker, one at a time is begun again here.

One of them may be what kills the workers. Side by side they would all reach the limit together.
"""

import asyncio

from interlock.worker.held import HeldRun


async def stand_trial(run: HeldRun) -> None:
    """Wait until no other such step is under way here."""
    worker = run.worker
    if not any(fold.reclaims for fold in run.journal.unsettled()):
        return
    while worker.on_trial is not None and not (run.mail or worker.draining):
        run.wake.clear()
        await run.wake.wait()
    if worker.on_trial is None:
        worker.on_trial = run
        # Long steps are not made to wait for each other to the end.
        asyncio.get_running_loop().call_later(worker.settings.slice_seconds, end_trial, run)


def end_trial(run: HeldRun) -> None:
    if run.worker.on_trial is run:
        run.worker.on_trial = None
        for driver in run.worker.drivers.values():
            driver.run.wake.set()
