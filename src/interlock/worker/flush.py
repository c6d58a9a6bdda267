"""The flusher: what finished while the last commit was under way is committed together."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg

from interlock.engine.append import UNACCEPTABLE, Answer, Write, append, was_written
from interlock.engine.leases import Me, Seat
from interlock.engine.observe import observe_entries
from interlock.store.pool import TRANSIENT, Database, connect, connection_options
from interlock.telemetry import log, metrics
from interlock.waiting import either

_MOST_WRITES = 128
_LEAST_WRITES = 32
_CONNECTIONS = 2
# The first commit on a connection takes ten times as long as the next, so an empty one is made while there is time.
_WARM_UP_AFTER_SECONDS = 0.25


class Unacceptable(Exception):
    """The database refused what is in a write, not who wrote it."""


class Flusher:
    """Two connections take turns: while one commits, the steps it does not hold go on and fill the other's batch.

    A run is in one commit at a time: its entries become visible in the order of their numbers, without gaps. While
    there is little to do the same connection does it all, and the server has what it needs at hand.
    """

    def __init__(
        self, database: Database, me: Me, seat: Callable[[set[UUID]], Seat | None] = lambda _: None,
        unseat: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`seat` is asked which seat to open with the write with which these runs leave; `unseat` is told that it was
        not opened."""
        self._database = database
        self._me = me
        self._seat, self._unseat = seat, unseat
        self._was_alone = False
        self._waiting: list[tuple[Write, asyncio.Future[Answer]]] = []
        self._bells = [asyncio.Event() for _ in range(_CONNECTIONS)]
        self._busy = [False] * _CONNECTIONS
        self._committing: set[UUID] = set()

    def put(self, write: Write) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, future))
        self._ring()
        return future

    def _ring(self) -> None:
        """Wake the first connection that is free. If none is, the one that is done first looks again by itself."""
        for bell, busy in zip(self._bells, self._busy, strict=True):
            if not busy:
                bell.set()
                return

    async def run(self) -> None:
        await asyncio.gather(*(self._commit_forever(n, _Connection(self._database)) for n in range(_CONNECTIONS)))

    async def _commit_forever(self, number: int, connection: "_Connection") -> None:
        bell = self._bells[number]
        try:
            await either(bell, _WARM_UP_AFTER_SECONDS)
            if not bell.is_set():
                with contextlib.suppress(*TRANSIENT):
                    await append(self._database, await connection.open(), self._me, [])
            while True:
                await bell.wait()
                # Let the steps that are about to finish get into this commit too.
                await asyncio.sleep(0)
                batch = self._take_batch()
                if not batch:
                    bell.clear()
                    continue
                self._busy[number] = True
                if self._waiting:
                    self._ring()
                try:
                    await self._flush(connection, batch)
                finally:
                    self._committing.difference_update(write.lease.run_id for write, _ in batch)
                    self._busy[number] = False
        finally:
            connection.close()

    def _take_batch(self) -> "list[tuple[Write, asyncio.Future[Answer]]]":
        """Half of what waits: the other half is for the other connection, so that steps go on during both commits.

        A run that came by the seat is committed first and alone, since somebody waits for its answer, and a batch takes
        longer. That is done every second time at most: there may be many of those too.
        """
        if not self._was_alone:
            for number, item in enumerate(self._waiting):
                lease = item[0].lease
                if lease.seated and lease.run_id not in self._committing:
                    self._committing.add(lease.run_id)
                    self._was_alone = True
                    return [self._waiting.pop(number)]
        self._was_alone = False
        size = min(max(len(self._waiting) // _CONNECTIONS, _LEAST_WRITES), _MOST_WRITES)
        batch: list[tuple[Write, asyncio.Future[Answer]]] = []
        later: list[tuple[Write, asyncio.Future[Answer]]] = []
        taken = set(self._committing)
        for item in self._waiting:
            run_id = item[0].lease.run_id
            if len(batch) < size and run_id not in taken:
                batch.append(item)
                self._committing.add(run_id)
            else:
                later.append(item)
            taken.add(run_id)
        self._waiting = later
        return batch

    async def _flush(self, connection: "_Connection", batch: "list[tuple[Write, asyncio.Future[Answer]]]") -> None:
        writes = [write for write, _ in batch]
        if leaving := {write.lease.run_id for write in writes if write.leave is not None}:
            writes[0].seat = self._seat(leaving)
        try:
            answers = await self._append_whatever_happens(connection, writes)
        except UNACCEPTABLE as error:
            if writes[0].seat is not None:
                self._unseat()
            if len(batch) > 1:
                for one in batch:
                    await self._flush(connection, [one])
                return
            log.error("append_unacceptable", run_id=str(writes[0].lease.run_id), error=str(error))
            if not batch[0][1].done():
                batch[0][1].set_exception(Unacceptable(str(error)))
            return
        if writes[0].seat is not None and not all(a.kept for w, a in zip(writes, answers, strict=True) if w.leave):
            self._unseat()  # it was not opened
        metrics.flush_size.observe(sum(len(w.entries) for w in writes))
        for (write, future), answer in zip(batch, answers, strict=True):
            if answer.kept:
                observe_entries(write.lease.run_id, write.entries)
            if not future.done():
                future.set_result(answer)

    async def _append_whatever_happens(self, connection: "_Connection", writes: list[Write]) -> list[Answer]:
        """Survives a lost connection: first finds out whether the last try was committed."""
        delay, tries, asked_again = 0.02, 0, False
        while True:
            try:
                opened = await connection.open()
                if tries and (answers := await was_written(self._database, opened, self._me, writes)) is not None:
                    return answers
                tries += 1
                return await append(self._database, opened, self._me, writes)
            except UNACCEPTABLE as error:
                # The entries are there: an earlier try that was cut off for us may have gone on at the server, and
                # committed after we had asked whether it had. So ask once more.
                if tries < 2 or asked_again or not isinstance(error, asyncpg.UniqueViolationError):
                    raise
                asked_again = True
            except TRANSIENT as error:
                log.warning("flush_retry", error=str(error) or type(error).__name__, writes=len(writes))
                connection.close()
                await asyncio.sleep(delay)
                delay = min(delay * 2, 1.0)


class _Connection:
    """A connection that is made when it is needed and made again when it broke."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._opened: Any = None

    async def open(self) -> Any:
        if self._opened is None or self._opened.is_closed():
            self._opened = await connect(connection_options(self._database))
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.terminate()
            self._opened = None
