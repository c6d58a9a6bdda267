"""The batch committer: commits the entries of many runs in one transaction."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg

from interlock.engine.proof.instrumentation import observe_entries
from interlock.engine.queueing.leases import DispatchSlot, WorkerIdentity
from interlock.engine.writing.journal_writer import UNACCEPTABLE, AppendResult, Write, append, was_written
from interlock.store.pool import TRANSIENT, Database, backoff, connect, connection_options
from interlock.telemetry import log, metrics
from interlock.timeouts import wait_for_event

_MOST_WRITES = 128
_LEAST_WRITES = 32
_CONNECTIONS = 2
# The first commit on a new connection takes ten times as long as later ones, so make an empty one while idle.
_WARM_UP_AFTER_SECONDS = 0.25


class Unacceptable(Exception):
    """The database rejected the content of a write, not the writer's lease."""


class Flusher:
    """Commits writes over two connections.

    While one connection commits, the steps of other runs continue and fill the next batch. A run is in one commit at a
    time, so its entries become visible in order and without gaps. Under low load the same connection commits
    everything, so that the server's caches for it stay warm.
    """

    def __init__(
        self, database: Database, me: WorkerIdentity, seat: Callable[[set[UUID]], DispatchSlot | None] = lambda _: None,
        unseat: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`seat` returns the dispatch slot to offer in the write that releases these runs, if any.

        `unseat` is called if that slot was not opened.
        """
        self._database = database
        self._me = me
        self._seat, self._unseat = seat, unseat
        self._was_alone = False
        self._waiting: list[tuple[Write, asyncio.Future[AppendResult]]] = []
        self._bells = [asyncio.Event() for _ in range(_CONNECTIONS)]
        self._busy = [False] * _CONNECTIONS
        self._committing: set[UUID] = set()

    def put(self, write: Write) -> "asyncio.Future[AppendResult]":
        future: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, future))
        self._ring()
        return future

    def _ring(self) -> None:
        """Wake the first free connection. If both are busy, the first to finish checks the queue itself."""
        for bell, busy in zip(self._bells, self._busy, strict=True):
            if not busy:
                bell.set()
                return

    async def run(self) -> None:
        await asyncio.gather(*(self._commit_forever(n, _CommitConnection(self._database)) for n in range(_CONNECTIONS)))

    async def _commit_forever(self, number: int, connection: "_CommitConnection") -> None:
        bell = self._bells[number]
        try:
            await wait_for_event(bell, _WARM_UP_AFTER_SECONDS)
            if not bell.is_set():
                with contextlib.suppress(*TRANSIENT):
                    await append(self._database, await connection.open(), self._me, [])
            while True:
                await bell.wait()
                # Let steps that are about to finish join this commit.
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

    def _take_batch(self) -> "list[tuple[Write, asyncio.Future[AppendResult]]]":
        """Return half of the waiting writes, so that steps continue during both commits.

        The other connection takes the other half. A run that arrived through a dispatch slot is committed first and
        alone, because a client waits for its answer and a batch takes longer. At most every second commit does this, so
        that many such runs cannot block the others.
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
        batch: list[tuple[Write, asyncio.Future[AppendResult]]] = []
        later: list[tuple[Write, asyncio.Future[AppendResult]]] = []
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

    async def _flush(
        self, connection: "_CommitConnection", batch: "list[tuple[Write, asyncio.Future[AppendResult]]]"
    ) -> None:
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
            self._unseat()  # the slot was not opened
        metrics.flush_size.observe(sum(len(w.entries) for w in writes))
        for (write, future), answer in zip(batch, answers, strict=True):
            if answer.kept:
                observe_entries(write.lease.run_id, write.entries)
            if not future.done():
                future.set_result(answer)

    async def _append_whatever_happens(
        self, connection: "_CommitConnection", writes: list[Write]
    ) -> list[AppendResult]:
        """Append the writes, and retry after a lost connection.

        First check whether the previous attempt was committed.
        """
        failures, tries, asked_again = 0, 0, False
        while True:
            try:
                opened = await connection.open()
                if tries and (answers := await was_written(self._database, opened, self._me, writes)) is not None:
                    return answers
                tries += 1
                return await append(self._database, opened, self._me, writes)
            except UNACCEPTABLE as error:
                # The entries already exist: the server may have committed an earlier attempt after we lost the
                # connection and checked. Check once more.
                if tries < 2 or asked_again or not isinstance(error, asyncpg.UniqueViolationError):
                    raise
                asked_again = True
            except TRANSIENT as error:
                log.warning("flush_retry", error=str(error) or type(error).__name__, writes=len(writes))
                connection.close()
                await asyncio.sleep(backoff(error, failures))
                failures += 1


class _CommitConnection:
    """A connection that opens on first use and reopens after a failure."""

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
