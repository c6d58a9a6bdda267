"""The flusher: what finished while the last commit was under way is committed together."""

import asyncio
from typing import Any
from uuid import UUID

import asyncpg

from interlock.engine.append import UNACCEPTABLE, Answer, Write, append, was_written
from interlock.engine.leases import Me
from interlock.engine.outside import observe
from interlock.store.pool import TRANSIENT, Database, connection_options
from interlock.telemetry import log, metrics

_MOST_WRITES = 128
_LEAST_WRITES = 32
_CONNECTIONS = 2


class Unacceptable(Exception):
    """The database refused what is in a write, not who wrote it."""


class Flusher:
    """Two connections take turns: while one commits, the steps it does not hold go on and fill the other's batch.

    A run is in one commit at a time: its entries become visible in the order of their numbers, without gaps.
    """

    def __init__(self, database: Database, me: Me) -> None:
        self._database = database
        self._me = me
        self._waiting: list[tuple[Write, asyncio.Future[Answer]]] = []
        self._filled = asyncio.Event()
        self._committing: set[UUID] = set()

    def put(self, write: Write) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, future))
        self._filled.set()
        return future

    async def run(self) -> None:
        await asyncio.gather(*(self._commit_forever(_Connection(self._database)) for _ in range(_CONNECTIONS)))

    async def _commit_forever(self, connection: "_Connection") -> None:
        try:
            while True:
                await self._filled.wait()
                # Let the steps that are about to finish get into this commit too.
                await asyncio.sleep(0)
                batch = self._take_batch()
                if not batch:
                    self._filled.clear()
                    continue
                try:
                    await self._flush(connection, batch)
                finally:
                    self._committing.difference_update(write.lease.run_id for write, _ in batch)
                    if self._waiting:
                        self._filled.set()
        finally:
            connection.close()

    def _take_batch(self) -> "list[tuple[Write, asyncio.Future[Answer]]]":
        """Half of many: the other half is the other connection's, and the steps overlap with both commits."""
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
        try:
            answers = await self._append_whatever_happens(connection, writes)
        except UNACCEPTABLE as error:
            if len(batch) > 1:
                for one in batch:
                    await self._flush(connection, [one])
                return
            log.error("append_unacceptable", run_id=str(writes[0].lease.run_id), error=str(error))
            if not batch[0][1].done():
                batch[0][1].set_exception(Unacceptable(str(error)))
            return
        metrics.flush_size.observe(sum(len(w.entries) for w in writes))
        for (write, future), answer in zip(batch, answers, strict=True):
            if answer.kept:
                observe(write.lease.run_id, write.lease.workflow, write.entries, None)
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
                # Cut off, an earlier try of ours may have gone on at the server and committed after we had asked.
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
            self._opened = await asyncpg.connect(**connection_options(self._database))
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.terminate()
            self._opened = None
