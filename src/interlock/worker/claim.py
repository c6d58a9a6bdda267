"""Getting runs: a worker claims them from the queue in batches, and keeps a seat for one that need not queue."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from interlock.engine import leases
from interlock.engine.workers import DEFAULT_LABEL
from interlock.lifecycle import WorkerState
from interlock.store.pool import TRANSIENT, Tx, behind_pooler, connect, connection_options
from interlock.telemetry import log
from interlock.waiting import either

if TYPE_CHECKING:
    from interlock.worker.loop import Worker

# When there is work but its lanes are locked by others at this moment.
_BUSY_RETRY_SECONDS = 0.003
# How many rounds of the event loop runs that were just claimed get, to come to their tools, before the next statement.
_HEAD_START = 4
# A worker with so many places always keeps one of them as its seat, whatever waits in the queue; a smaller one only
# while it has nothing to do.
_MANY_PLACES = 20
# A worker claims when a quarter of its places is free. If fewer are, it waits so long for more of them and then claims
# for those, since the runs in the other places may stay for hours.
_BITE_PATIENCE_SECONDS = 0.02


class Claimer:
    """`channel`: where the worker hears of a run that was put on its seat."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.channel = f"interlock_{uuid4().hex}"
        # Whether the seat is open. Then the next run may be put there at any moment, so its place counts as taken.
        self._has_seat = False
        # How often that changed. An answer of the database is about the seat as it was when the question was sent.
        self.changes = 0
        # Wakes the claimer; `_may_claim` is set too when there may be work in the queue, and not only more room here.
        self._stir = asyncio.Event()
        self._may_claim = True
        # The database may think that more runs are ours than we know of: somebody said so (`_forgot`), or a claim was
        # cut off and its answer was lost (`_unsure`).
        self._forgot = False
        self._unsure = False
        # The queue has nothing for us. Until that changes, the seat is opened with the write that frees the last place.
        self._is_resting = False
        # While we ask the database which runs it thinks are ours: those that we took up since the question was sent.
        self._meanwhile: set[UUID] | None = None
        # Runs that were found by asking. The notification that they were put on our seat may still come, perhaps when
        # they are done.
        self._found: deque[UUID] = deque(maxlen=1000)
        # Which pool is asked first; the pools take turns.
        self._turn = 0

    # ------------------------------------------------------------ what others tell it

    def look(self) -> None:
        """There may be something to claim."""
        self._may_claim = True
        self._stir.set()

    def stir(self) -> None:
        """There is more room, or less to do."""
        self._stir.set()

    def remember(self) -> None:
        """The database may think that more is ours than we know of."""
        self._forgot = True
        self.look()

    def forget_seat(self) -> None:
        self._note_seat(False)
        self._stir.set()

    def seat_is(self, is_open: bool, changes: int) -> None:
        """What the database says about the seat. `changes` is how often it had changed when the question was sent."""
        if changes != self.changes:
            return
        if is_open != self._has_seat:
            self._note_seat(is_open)
        self._stir.set()

    def _note_seat(self, is_open: bool) -> None:
        self._has_seat = is_open
        self.changes += 1

    def took(self, run_id: UUID) -> None:
        if self._meanwhile is not None:
            self._meanwhile.add(run_id)

    def on_seated(self, payload: str) -> None:
        """A run was put on the seat, and this is its row. If it is empty, the row was too large to be sent, or
        notifications may have been missed."""
        worker = self._worker
        if not payload:
            self.remember()
        elif worker.is_alive and (row := leases.seated(payload, worker.me)) is not None:
            self._note_seat(False)
            if row["id"] not in self._found:
                worker.take_up([row])

    @property
    def is_full(self) -> bool:
        return self._room < 1

    @property
    def room(self) -> int:
        """Free places for runs of the queue, if a seat that is only open for want of work is closed for them."""
        return self._worker.capacity - len(self._worker.drivers) - self._always_seats

    @property
    def _room(self) -> int:
        """Free places for runs of the queue, as things are."""
        return self.room - (self._has_seat and not self._always_seats)

    @property
    def _may_seat(self) -> bool:
        worker = self._worker
        return worker.orders.status == WorkerState.RUNNING and DEFAULT_LABEL in worker.pools() and not worker.draining

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
                    await self._claim_forever(Tx(connection))
                except TRANSIENT as error:
                    log.warning("claim_retry", error=str(error) or type(error).__name__)
                    if connection is not None:
                        connection.terminate()
                    connection = None
                    await asyncio.sleep(0.2)
        finally:
            if connection is not None:
                connection.terminate()

    async def _claim_forever(self, tx: Tx) -> None:
        """Until the worker drains, or the connection breaks."""
        worker = self._worker
        while not worker.draining:
            if self._unsure or self._forgot:
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
        """Nothing more may come: the seat goes, and what was put on it meanwhile is taken up to be given back."""
        async with self._worker.database.connection() as connection:
            if self._has_seat and not await self._close_seat(Tx(connection)):
                await self.take_up_forgotten(Tx(connection))

    async def _enough_room(self, tx: Tx) -> bool:
        """Wait until a quarter of the places is free, since a claim costs nearly the same for one run as for many.

        False: the worker drains, and claims nothing any more.
        """
        worker = self._worker
        bite = max(1, worker.capacity // 4)
        clock, since = asyncio.get_running_loop().time, float("inf")
        if self._has_seat and not self._always_seats and (worker.drivers or self._room < bite):
            await self._close_seat(tx)  # it was open for want of work, and its place is needed for runs of the queue
        while not worker.draining and worker.drivers and self._room < bite:
            if self._forgot:
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
            await either(self._stir, left)
        return not worker.draining

    async def _claim(self, tx: Tx) -> float:
        """Claim, and say how long to sleep: not at all while there may be more, else until a notification."""
        worker = self._worker
        self._stir.clear()
        if worker.orders.status == WorkerState.RUNNING and self.is_full:
            return _BUSY_RETRY_SECONDS  # the run that took the seat is on its way
        self._may_claim = False
        if worker.orders.status != WorkerState.RUNNING:
            return worker.settings.poll_seconds
        pools = worker.pools()
        self._turn = first = (self._turn + 1) % len(pools)
        return min([await self._claim_from(tx, pool) for pool in pools[first:] + pools[:first] if self._room > 0])

    async def _claim_from(self, tx: Tx, pool: str) -> float:
        worker, poll_seconds = self._worker, self._worker.settings.poll_seconds
        claim = await leases.claim(tx, worker.database.clock(), worker.me, self._room, pool, worker.tenants)
        worker.take_up(claim.runs)
        if claim.dry:
            for _ in range(_HEAD_START):
                await asyncio.sleep(0)
            if not await leases.rest(tx, claim.dry):
                return 0.0 if claim.runs else _BUSY_RETRY_SECONDS
        if len(claim.dry) < claim.lanes:
            return 0.0
        # Either there is no more work, or the lanes that have some are locked at this moment by whoever changes them.
        if not await tx.value("work_is_waiting_in", [pool], worker.tenants):
            return poll_seconds
        return 0.0 if claim.runs else _BUSY_RETRY_SECONDS

    async def take_up_forgotten(self, tx: Tx) -> None:
        """What the database thinks that we hold and we do not: an answer was lost on its way, or a driver failed."""
        worker = self._worker
        self._forgot = False
        self._meanwhile = set(worker.drivers)  # one of them may be leaving at this moment
        try:
            held = await leases.leases_of(tx, worker.database.clock(), worker.me)
            known = self._meanwhile
        finally:
            self._meanwhile = None
        rows = [row for row in held if row["id"] not in known]
        self._found.extend(row["id"] for row in rows)
        worker.take_up(rows)

    # ------------------------------------------------------------ nothing to claim

    async def _sleep(self, tx: Tx, seconds: float) -> None:
        """Until there may be something to claim."""
        if seconds < self._worker.settings.poll_seconds:
            await either(self._stir, seconds)
            return
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        self._is_resting = True
        try:
            while not self._may_claim and not self._worker.draining and (left := until - clock()) > 0:
                self._stir.clear()
                await self._open_seat(tx)
                await either(self._stir, left)
        finally:
            self._is_resting = False

    def seat_after(self, leaving: set[UUID]) -> leases.Seat | None:
        """The seat to open with the write with which these runs leave, if there is one to open."""
        return self._seat_to_open(len(self._worker.drivers.keys() - leaving))

    async def _open_seat(self, tx: Tx) -> None:
        if (seat := self._seat_to_open(len(self._worker.drivers))) is not None:
            await leases.open_seat(tx, self._worker.me, seat)

    def _seat_to_open(self, holding: int) -> leases.Seat | None:
        """A seat if there is a place for one, given how many runs we hold, and if notifications reach us. It counts as
        open from now on: a run may be put there before the answer comes that says so."""
        worker = self._worker
        if self._has_seat or not self._may_seat or not worker.hears:
            return None
        if self._always_seats:
            free = holding < worker.capacity
        else:
            free = not holding and self._is_resting and not self._may_claim
        if not free:
            return None
        self._note_seat(True)
        return leases.Seat(worker.me.actor, self.channel, worker.tenants)

    async def _close_seat(self, tx: Tx) -> bool:
        """False: a run was put there, and is on its way to us."""
        if not await leases.close_seat(tx, self._worker.me):
            return False
        self._note_seat(False)
        return True
