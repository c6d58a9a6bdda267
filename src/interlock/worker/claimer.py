"""Getting runs: a worker claims batches from the queue, and offers a dispatch slot for a run that skips the queue."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

from interlock.engine.queueing import leases
from interlock.engine.queueing.workers import DEFAULT_LABEL
from interlock.errors import Unavailable
from interlock.ids import RunId
from interlock.store.notify import channel_name
from interlock.store.pool import TRANSIENT, Tx, behind_pooler, connect, connection_options
from interlock.store.records import DispatchSlot
from interlock.telemetry import log
from interlock.timeouts import wait_for_event

if TYPE_CHECKING:
    from interlock.worker.worker import Worker

# Used when there is work but other workers have locked its queues.
_BUSY_RETRY_SECONDS = 0.003
# Rounds of the event loop that newly claimed runs get to start their tools before the next SQL statement.
_HEAD_START = 4
# A worker with at least this capacity always keeps one place as its dispatch slot. A smaller worker offers a slot only
# while it is idle.
_MANY_PLACES = 20
# A worker claims when a quarter of its places is free. With fewer free places it waits this long for more and then
# claims anyway, because the runs in the other places may stay for hours.
_BITE_PATIENCE_SECONDS = 0.02
# A worker that replaces a lost one first claims this many runs. The limit doubles after each interval.
_FIRST_RUNS = 4
_DOUBLES_AFTER_SECONDS = 1.0

_AWAY: tuple[type[Exception], ...] = (Unavailable, *TRANSIENT)


class SlowStart:
    """Limits how many runs the replacement of a lost worker may hold: a few first, then twice as many every second.

    The cause of the missed heartbeats may persist. Taking all runs at once would make this worker miss its heartbeats
    too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        self._since = self._clock()

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def most(self, capacity: int) -> int:
        if self._since is None:
            return capacity
        doublings = int((self._clock() - self._since) / _DOUBLES_AFTER_SECONDS)
        most = _FIRST_RUNS << min(doublings, 30)
        if most >= capacity:
            self._since = None
        return min(most, capacity)


class Claimer:
    """Claims runs for a worker. `channel` carries the notifications for runs dispatched to the worker's slot."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.channel = f"worker_{uuid4().hex}"
        # Whether the dispatch slot is open. A run may arrive there at any moment, so its place counts as taken.
        self._has_seat = False
        # How often that changed. A database answer describes the slot at the time of the query.
        self.changes = 0
        # Wakes the claimer. `_may_claim` is set too if the queue may have work; otherwise only capacity was freed.
        self._stir = asyncio.Event()
        self._may_claim = True
        # The database may assign us runs that we do not know: another component reported it (`_forgot`), or a claim was
        # interrupted and its answer lost (`_unsure`).
        self._forgot = False
        self._unsure = False
        # The queue has no work for us. Until that changes, the write that frees the last place also opens the slot.
        self._is_resting = False
        # Runs that we took up while a query for the runs leased to us is in progress.
        self._meanwhile: set[RunId] | None = None
        # Runs found by that query. The notification of their dispatch may still arrive, perhaps after they are done.
        self._found: deque[RunId] = deque(maxlen=1000)
        # The index of the pool to ask first; the pools take turns.
        self._turn = 0
        self.slow_start = SlowStart()

    # ------------------------------------------------------------ what others tell it

    def look(self) -> None:
        """Note that the queue may have work."""
        self._may_claim = True
        self._stir.set()

    def stir(self) -> None:
        """Note that capacity was freed or the load changed."""
        self._stir.set()

    def remember(self) -> None:
        """Note that the database may have leased runs to us that we do not know of."""
        self._forgot = True
        self.look()

    def forget_seat(self) -> None:
        self._note_seat(False)
        self._stir.set()

    def seat_is(self, is_open: bool, changes: int) -> None:
        """Apply the slot state that the database reported. `changes` is the change count when the query was sent."""
        if changes != self.changes:
            return
        if is_open != self._has_seat:
            self._note_seat(is_open)
        self._stir.set()

    def _note_seat(self, is_open: bool) -> None:
        self._has_seat = is_open
        self.changes += 1

    def took(self, run_id: RunId) -> None:
        if self._meanwhile is not None:
            self._meanwhile.add(run_id)

    def on_seated(self, payload: str) -> None:
        """Start the run that was dispatched to the slot; `payload` is its row.

        An empty payload means that the row was too large to send, or that notifications may have been missed.
        """
        worker = self._worker
        if not payload:
            self.remember()
        elif worker.is_alive and (row := leases.dispatched(payload, worker.me)) is not None:
            self._note_seat(False)
            if row.id not in self._found:
                worker.start_driver([row])

    @property
    def is_full(self) -> bool:
        return self._room < 1

    @property
    def room(self) -> int:
        """Return the free places for queued runs.

        A slot that is open only because the worker is idle counts as free.
        """
        worker = self._worker
        if worker.trials.alone is not None:
            return 0
        return self.slow_start.most(worker.capacity) - len(worker.drivers) - self._always_seats

    @property
    def _room(self) -> int:
        """Return the free places for queued runs, without the place of an open slot."""
        return self.room - (self._has_seat and not self._always_seats)

    @property
    def _may_seat(self) -> bool:
        worker = self._worker
        return worker.may_begin and DEFAULT_LABEL in worker.pools() and not worker.draining

    @property
    def _always_seats(self) -> bool:
        worker = self._worker
        return worker.capacity >= _MANY_PLACES and self._may_seat and not behind_pooler(worker.database.url)

    # ------------------------------------------------------------ for as long as the worker lives

    async def run(self) -> None:
        worker, connection = self._worker, None
        self._has_seat = self._unsure = False
        try:
            while not worker.draining:
                try:
                    if connection is None or connection.is_closed():
                        connection = await connect(connection_options(worker.database))
                        if worker.look_back is not None:
                            await worker.look_back()  # a restore breaks every connection
                    await self._claim_forever(Tx(connection))
                except _AWAY as error:
                    log.warning("claim_retry", error=str(error) or type(error).__name__)
                    if connection is not None:
                        connection.terminate()
                    connection = None
                    await asyncio.sleep(0.2)
        finally:
            if connection is not None:
                connection.terminate()

    async def _claim_forever(self, tx: Tx) -> None:
        """Claim until the worker drains or the connection breaks."""
        worker = self._worker
        while not worker.draining:
            if (self._unsure or self._forgot) and worker.database.went_back is None:
                await self.take_up_forgotten(tx)
                self._unsure = False
            if not await self._enough_room(tx):
                break
            self._unsure = True
            pause = await self._claim(tx)
            self._unsure = False
            if pause:
                await self._sleep(tx, pause)

    async def leave(self) -> None:
        """Close the slot. Take up any run dispatched to it before that, so that it can be given back."""
        async with self._worker.database.connection() as connection:
            if self._has_seat and not await self._close_seat(Tx(connection)):
                await self.take_up_forgotten(Tx(connection))

    async def _enough_room(self, tx: Tx) -> bool:
        """Wait until a quarter of the places is free, because a claim costs nearly the same for one run as for many.

        Return False if the worker is draining and claims no more.
        """
        worker = self._worker
        bite = max(1, worker.capacity // 4)
        clock, since = asyncio.get_running_loop().time, float("inf")
        if self._has_seat and not self._always_seats and (worker.drivers or self._room < bite):
            await self._close_seat(tx)  # the slot was open because the worker was idle, and queued runs need its place
        while not worker.draining and worker.drivers and self._room < bite:
            if self._forgot and worker.database.went_back is None:
                await self.take_up_forgotten(tx)
                continue
            self._stir.clear()
            await self._open_seat(tx)
            if self.is_full:
                since = float("inf")
                await self._stir.wait()
                continue
            since = min(since, clock())
            if (left := since + _BITE_PATIENCE_SECONDS - clock()) <= 0:
                break
            await wait_for_event(self._stir, left)
        return not worker.draining

    async def _claim(self, tx: Tx) -> float:
        """Claim, and return how long to sleep: 0 if there may be more work, else until a notification."""
        worker = self._worker
        self._stir.clear()
        if worker.may_begin and self.is_full:
            return _BUSY_RETRY_SECONDS  # the run that took the slot has not arrived yet
        self._may_claim = False
        if not worker.may_begin:
            return worker.settings.poll_seconds
        pools = worker.pools()
        self._turn = first = (self._turn + 1) % len(pools)
        return min([await self._claim_from(tx, pool) for pool in pools[first:] + pools[:first] if self._room > 0])

    async def _claim_from(self, tx: Tx, pool: str) -> float:
        worker, poll_seconds = self._worker, self._worker.settings.poll_seconds
        runs = await leases.claim(tx, worker.me, self._room, pool, worker.tenants)
        if runs is None:
            return poll_seconds
        worker.start_driver(runs)
        if not runs:
            return _BUSY_RETRY_SECONDS
        for _ in range(_HEAD_START):
            await asyncio.sleep(0)
        return 0.0

    async def take_up_forgotten(self, tx: Tx) -> None:
        """Take up runs that the database leases to us but we do not hold: an answer was lost, or a driver failed."""
        worker = self._worker
        self._forgot = False
        self._meanwhile = set(worker.drivers)  # one of them may be leaving at this moment
        try:
            held = await leases.leases_of(tx, worker.me)
            known = self._meanwhile
        finally:
            self._meanwhile = None
        rows = [row for row in held if row.id not in known]
        self._found.extend(row.id for row in rows)
        worker.start_driver(rows)

    # ------------------------------------------------------------ nothing to claim

    async def _sleep(self, tx: Tx, seconds: float) -> None:
        """Sleep until there may be something to claim."""
        if seconds < self._worker.settings.poll_seconds:
            await wait_for_event(self._stir, seconds)
            return
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        self._is_resting = True
        try:
            while not self._may_claim and not self._worker.draining and (left := until - clock()) > 0:
                self._stir.clear()
                await self._open_seat(tx)
                await wait_for_event(self._stir, left)
        finally:
            self._is_resting = False

    def seat_after(self, leaving: set[RunId]) -> DispatchSlot | None:
        """Return the dispatch slot to open in the write that releases these runs, or None."""
        return self._seat_to_open(len(self._worker.drivers.keys() - leaving))

    async def _open_seat(self, tx: Tx) -> None:
        if (seat := self._seat_to_open(len(self._worker.drivers))) is not None:
            await leases.offer_slot(tx, seat)

    def _seat_to_open(self, holding: int) -> DispatchSlot | None:
        """Return a slot if a place is free, given the number of runs held, and if notifications arrive.

        The slot counts as open from now on: a run may be dispatched to it before the database's answer arrives.
        """
        worker = self._worker
        if self._has_seat or not self._may_seat or not worker.has_notifications:
            return None
        if self._always_seats:
            free = holding < self.slow_start.most(worker.capacity)
        else:
            free = not holding and self._is_resting and not self._may_claim
        if not free:
            return None
        self._note_seat(True)
        channel = channel_name(worker.settings, self.channel)
        return DispatchSlot(worker.me.id, worker.me.actor, channel, worker.tenants)

    async def _close_seat(self, tx: Tx) -> bool:
        """Return False if a run was already dispatched to the slot; it arrives soon."""
        if not await leases.close_slot(tx, self._worker.me):
            return False
        self._note_seat(False)
        return True
