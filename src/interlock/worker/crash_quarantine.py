"""Crash quarantine: runs whose worker was lost restart one at a time, then two at a time, four and so on.

One of these runs may crash workers, or all of them together may exceed what a worker can handle. A step that has lost
two workers runs alone: its worker starts nothing else until the step ends or a time slice passes.
"""

import asyncio

from interlock.worker.leased_run import LeasedRun

_LOOK_SECONDS = 0.02


class Trials:
    """The trials of one worker. `alone` is the run that must run alone."""

    def __init__(self) -> None:
        self.alone: LeasedRun | None = None
        self._standing: list[LeasedRun] = []
        self._waiting: list[LeasedRun] = []
        self._most = 1

    def is_standing(self, run: LeasedRun) -> bool:
        return run in self._standing

    def has_room(self, *, alone: bool) -> bool:
        return not self._standing if alone else self.alone is None and len(self._standing) < self._most

    def begin(self, run: LeasedRun, *, alone: bool) -> None:
        self._standing.append(run)
        self.alone = run if alone else None

    def end(self, run: LeasedRun) -> None:
        """End the trial of a run that did no harm, and double the number of concurrent trials while any are left."""
        self._standing.remove(run)
        if self.alone is run:
            self.alone = None
        self._most = self._most * 2 if self._standing or self._waiting else 1

    async def wait(self, run: LeasedRun, *, alone: bool) -> None:
        self._waiting.append(run)
        try:
            while not self.has_room(alone=alone) and not _is_called(run):
                run.wake.clear()
                await run.wake.wait()
        finally:
            self._waiting.remove(run)


async def await_quarantine_slot(run: LeasedRun) -> None:
    """Wait until this run may restart beside the runs that are already on trial."""
    worker, trials = run.worker, run.worker.trials
    alone = any(fold.reclaims for fold in run.journal.unsettled())
    await trials.wait(run, alone=alone)
    if not trials.has_room(alone=alone):
        return
    trials.begin(run, alone=alone)
    if alone:
        await _until_nothing_acts(run)
    # End the trial after a time slice, so that other runs need not wait for the end of a long step.
    asyncio.get_running_loop().call_later(worker.settings.slice_seconds, end_trial, run)


async def _until_nothing_acts(run: LeasedRun) -> None:
    clock = asyncio.get_running_loop().time
    deadline = clock() + run.worker.settings.slice_seconds
    acts = run.worker.shop.lease.still_acting
    while acts() and clock() < deadline and not _is_called(run):  # noqa: ASYNC110  threads cannot set an event here
        await asyncio.sleep(_LOOK_SECONDS)


async def give_way(run: LeasedRun) -> None:
    """Start nothing while another run must run alone."""
    trials = run.worker.trials
    while trials.alone not in (None, run) and not _is_called(run):
        run.wake.clear()
        await run.wake.wait()


def end_trial(run: LeasedRun) -> None:
    if run.worker.trials.is_standing(run):
        run.worker.trials.end(run)
        for driver in run.worker.drivers.values():
            driver.run.wake.set()
        run.worker.claimer.look()


def _is_called(run: LeasedRun) -> bool:
    """Return True if a command waits for the run, or its worker ends or gives its runs back."""
    return run.has_commands or run.worker.should_release(run)
