"""The ceiling's worker, in a separate process: `python -m bench.ceiling_worker URL NUMBER COUNTER`."""

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import asyncpg
import uvloop

from bench.ceiling import APPEND, CLAIM
from bench.counter import Counter

_IN_FLIGHT = 400
_BATCH = 200
_FLUSHERS = 2


class CeilingWorker:
    def __init__(self, url: str, number: int, counter: Counter | None) -> None:
        self._url, self._number, self._counter = url, number, counter
        self._held = 0
        self._done: list[tuple[int, int, str, int]] = []
        self._wake, self._filled = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        listening: Any = await asyncpg.connect(self._url)
        await listening.add_listener("ready", lambda *_: self._wake.set())
        claiming: Any = await asyncpg.connect(self._url)
        flushing: list[Any] = [await asyncpg.connect(self._url) for _ in range(_FLUSHERS)]
        print("ready", flush=True)
        await asyncio.gather(self._claim_forever(claiming), *(self._flush_forever(one) for one in flushing))

    async def _claim_forever(self, connection: Any) -> None:
        claim = await connection.prepare(CLAIM)
        while True:
            self._wake.clear()
            room = min(_BATCH, _IN_FLIGHT - self._held)
            if self._held and room < _BATCH // 4:  # claim only large batches
                await self._wake.wait()
                continue
            rows = await claim.fetch(room, self._number)
            self._held += len(rows)
            for run_id, steps in rows:
                self._begin(run_id, 1, steps)
            if not rows:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), 1.0)

    def _begin(self, run_id: int, seq: int, steps: int) -> None:
        task = asyncio.create_task(self._step(run_id, seq, steps))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _step(self, run_id: int, seq: int, steps: int) -> None:
        self._done.append((run_id, seq, json.dumps(await self._noop(seq)), steps))
        self._filled.set()

    async def _noop(self, seq: int) -> dict[str, Any]:
        if self._counter is not None:
            self._counter.add()
        return {"i": seq, "ok": True, "t": time.time()}

    async def _flush_forever(self, connection: Any) -> None:
        append = await connection.prepare(APPEND)
        while True:
            await self._filled.wait()
            await asyncio.sleep(0)  # let steps that are about to finish join this batch
            batch, self._done = self._done[:_BATCH], self._done[_BATCH:]
            if not self._done:
                self._filled.clear()
            if batch:
                await self._flush(append, batch)

    async def _flush(self, append: Any, batch: list[tuple[int, int, str, int]]) -> None:
        ids, seqs, outputs, _ = zip(*batch, strict=True)
        going_on = {row[0] for row in await append.fetch(ids, seqs, outputs, self._number)}
        for run_id, seq, _, steps in batch:
            if seq < steps and run_id in going_on:
                self._begin(run_id, seq + 1, steps)
            else:
                self._held -= 1
        self._wake.set()


def main() -> None:
    url, number, counter = sys.argv[1:4]
    worker = CeilingWorker(url, int(number), Counter(counter) if counter else None)
    uvloop.run(worker.run())


if __name__ == "__main__":
    main()
