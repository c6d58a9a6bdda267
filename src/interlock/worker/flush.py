"""The flusher: what finished while the last commit was under way is committed together."""

import asyncio
from typing import Any

import asyncpg

from interlock.engine.append import UNACCEPTABLE, Answer, Write, append, was_written
from interlock.engine.leases import Me
from interlock.engine.outside import observe
from interlock.store.pool import TRANSIENT, Database, connection_options
from interlock.telemetry import log, metrics

_MOST_WRITES = 256


class Unacceptable(Exception):
    """The database refused what is in a write, not who wrote it."""


class Flusher:
    """One connection and one statement at a time, so a run's writes stay in the order they were put in."""

    def __init__(self, database: Database, me: Me) -> None:
        self._database = database
        self._me = me
        self._waiting: list[tuple[Write, asyncio.Future[Answer]]] = []
        self._filled = asyncio.Event()
        self._connection: Any = None

    def put(self, write: Write) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, future))
        self._filled.set()
        return future

    async def run(self) -> None:
        try:
            while True:
                await self._filled.wait()
                # Let the steps that are about to finish get into this commit too.
                await asyncio.sleep(0)
                batch, self._waiting = self._waiting[:_MOST_WRITES], self._waiting[_MOST_WRITES:]
                if not self._waiting:
                    self._filled.clear()
                if batch:
                    await self._flush(batch)
        finally:
            if self._connection is not None:
                self._connection.terminate()

    async def _flush(self, batch: list[tuple[Write, "asyncio.Future[Answer]"]]) -> None:
        writes = [write for write, _ in batch]
        try:
            answers = await self._append_whatever_happens(writes)
        except UNACCEPTABLE as error:
            if len(batch) > 1:
                for one in batch:
                    await self._flush([one])
                return
            log.error("append_unacceptable", run_id=str(writes[0].lease.run_id), error=str(error))
            if not batch[0][1].done():
                batch[0][1].set_exception(Unacceptable(str(error)))
            return
        metrics.flush_size.observe(sum(len(w.entries) for w in writes))
        for (write, future), answer in zip(batch, answers, strict=True):
            if answer.kept:
                observe(write.lease.workflow, write.entries, None)
            if not future.done():
                future.set_result(answer)

    async def _append_whatever_happens(self, writes: list[Write]) -> list[Answer]:
        """Survives a lost connection: first finds out whether the last try was committed."""
        delay, tried = 0.02, False
        while True:
            try:
                if self._connection is None or self._connection.is_closed():
                    self._connection = await asyncpg.connect(**connection_options(self._database))
                if tried and (answers := await was_written(self._connection, self._me, writes)) is not None:
                    return answers
                tried = True
                return await append(self._database, self._connection, self._me, writes)
            except TRANSIENT as error:
                log.warning("flush_retry", error=str(error) or type(error).__name__, writes=len(writes))
                if self._connection is not None and not isinstance(error, asyncpg.DeadlockDetectedError):
                    self._connection.terminate()
                    self._connection = None
                await asyncio.sleep(delay)
                delay = min(delay * 2, 1.0)
