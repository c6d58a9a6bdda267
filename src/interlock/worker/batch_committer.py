"""The batch committer: commits the entries of many runs in one transaction."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import asyncpg

from interlock.engine.queueing.leases import WorkerIdentity
from interlock.engine.writing.change import RunChange
from interlock.engine.writing.commit import UNACCEPTABLE, CommitResult, commit, has_effects, result_of_earlier
from interlock.ids import RunId
from interlock.store.pool import TRANSIENT, Database, Tx, backoff, connect, connection_options
from interlock.store.records import DispatchSlot
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
        self, database: Database, me: WorkerIdentity,
        offer_slot: Callable[[set[RunId]], DispatchSlot | None] = lambda _: None,
        withdraw_slot: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`offer_slot` returns the dispatch slot to open in the write that releases these runs, if any.

        `withdraw_slot` is called if that slot was not opened.
        """
        self._database = database
        self._me = me
        self._offer_slot, self._withdraw_slot = offer_slot, withdraw_slot
        self._was_alone = False
        self._waiting: list[tuple[RunChange, asyncio.Future[CommitResult]]] = []
        self._bells = [asyncio.Event() for _ in range(_CONNECTIONS)]
        self._busy = [False] * _CONNECTIONS
        self._committing: set[RunId] = set()

    def put(self, write: RunChange) -> "asyncio.Future[CommitResult]":
        future: asyncio.Future[CommitResult] = asyncio.get_running_loop().create_future()
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
                    await commit(Tx(await connection.open()), [], self._me.id)
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
                    self._committing.difference_update(write.row.run_id for write, _ in batch)
                    self._busy[number] = False
        finally:
            connection.close()

    def _take_batch(self) -> "list[tuple[RunChange, asyncio.Future[CommitResult]]]":
        """Return half of the waiting writes, so that steps continue during both commits.

        The other connection takes the other half. A run that arrived through a dispatch slot is committed first and
        alone, because a client waits for its answer and a batch takes longer. At most every second commit does this, so
        that many such runs cannot block the others.
        """
        if not self._was_alone:
            for number, item in enumerate(self._waiting):
                row = item[0].row
                if row.is_dispatched and row.run_id not in self._committing:
                    self._committing.add(row.run_id)
                    self._was_alone = True
                    return [self._waiting.pop(number)]
        self._was_alone = False
        size = min(max(len(self._waiting) // _CONNECTIONS, _LEAST_WRITES), _MOST_WRITES)
        batch: list[tuple[RunChange, asyncio.Future[CommitResult]]] = []
        later: list[tuple[RunChange, asyncio.Future[CommitResult]]] = []
        taken = set(self._committing)
        for item in self._waiting:
            run_id = item[0].row.run_id
            if len(batch) < size and run_id not in taken:
                batch.append(item)
                self._committing.add(run_id)
            else:
                later.append(item)
            taken.add(run_id)
        self._waiting = later
        return batch

    async def _flush(
        self, connection: "_CommitConnection", batch: "list[tuple[RunChange, asyncio.Future[CommitResult]]]"
    ) -> None:
        writes, slot = [write for write, _ in batch], None
        if leaving := {write.row.run_id for write in writes if write.release is not None}:
            slot = self._offer_slot(leaving)
        try:
            answers = await self._commit_whatever_happens(connection, writes, slot)
        except UNACCEPTABLE as error:
            if slot is not None:
                self._withdraw_slot()
            if len(batch) > 1:
                for one in batch:
                    await self._flush(connection, [one])
                return
            log.error("write_unacceptable", run_id=str(writes[0].row.run_id), error=str(error))
            if not batch[0][1].done():
                batch[0][1].set_exception(Unacceptable(str(error)))
            return
        if slot is not None and not all(a.kept for w, a in zip(writes, answers, strict=True) if w.release):
            self._withdraw_slot()  # the slot was not opened
        metrics.flush_size.observe(sum(len(w.entries) for w in writes))
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _commit_whatever_happens(
        self, connection: "_CommitConnection", writes: list[RunChange], slot: DispatchSlot | None
    ) -> list[CommitResult]:
        """Commit the writes, and retry after a lost connection.

        First check whether the previous attempt was committed.
        """
        failures, tries, asked_again = 0, 0, False
        while True:
            try:
                opened = await connection.open()
                if tries and (answers := await result_of_earlier(Tx(opened), writes, self._me.id)) is not None:
                    return answers
                tries += 1
                return await self._commit(opened, writes, slot)
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

    async def _commit(self, opened: Any, writes: list[RunChange], slot: DispatchSlot | None) -> list[CommitResult]:
        """Commit with one statement in the ordinary case, or in a transaction if there are effects to store."""
        if not has_effects(writes):
            return await commit(Tx(opened), writes, self._me.id, slot)
        async with self._database.begin(opened) as tx:
            return await commit(tx, writes, self._me.id, slot)


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
