"""Fixtures: workers that are driven by hand, and jobs for them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import pytest

from interlock.engine.access.principal import Principal
from interlock.engine.queueing import jobs, leases
from interlock.ids import uuid7
from interlock.lifecycle import WorkerEvent
from interlock.worker.worker import Worker
from tests.rig import Hold, Rig

ONE = "{name: one, steps: [{id: a, tool: t.hold}]}"
TWO = "{name: two, steps: [{id: a, tool: t.hold}, {id: b, tool: t.after}]}"


class Shop:
    """A rig with a tool that holds, and helpers that describe what a test is about."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.hold, self.after = rig, Hold(), 0
        self._stack = AsyncExitStack()

        @rig.tool("t.hold")
        async def hold() -> None:
            await self.hold()

        @rig.tool("t.after")
        async def after() -> None:
            self.after += 1

    async def worker(self, **serves: Any) -> Worker:
        """A registered worker that takes work until the test ends."""
        worker = await self._stack.enter_async_context(self.rig.worker(**serves))
        await until(lambda: self._is_running(worker))
        return worker

    async def _is_running(self, worker: Worker) -> bool:
        return worker.me is not leases.UNREGISTERED and (await self.status(worker.me.id)) == "running"

    async def silent_worker(self) -> UUID:
        """A registered worker that claims nothing and never sends heartbeats."""
        me = await leases.register(self.rig.database, capacity=5, lease_seconds=30)
        await leases.move_worker(self.rig.database, me.id, WorkerEvent.START)
        return me.id

    async def status(self, worker_id: UUID) -> str:
        (row,) = await self.rig.sql("SELECT status FROM interlock.worker WHERE id = $1", worker_id)
        return str(row["status"])

    async def job(self, workflow: str = "one", runs: int = 1, **more: Any) -> UUID:
        return await self.job_of(self.rig.admin, workflow, runs, **more)

    async def job_of(self, who: Principal, workflow: str = "one", runs: int = 1, **more: Any) -> UUID:
        asked = jobs.JobRequest(uuid7(), "a task", workflow, [{"n": n} for n in range(runs)], **more)
        new = await jobs.prepare(self.rig.plans, who, asked)
        await self.rig.database.run_in_transaction(lambda tx: jobs.submit(tx, who, new))
        return new.id

    async def job_row(self, job_id: UUID) -> Any:
        (row,) = await self.rig.sql("SELECT * FROM interlock.job WHERE id = $1", job_id)
        return row

    async def reserved(self, job_id: UUID) -> set[UUID]:
        return {row["id"] for row in await self.rig.sql("SELECT id FROM interlock.worker WHERE job_id = $1", job_id)}

    async def job_until(self, job_id: UUID, status: str, seconds: float = 20) -> Any:
        async def there() -> Any:
            await self.rig.sweep()
            row = await self.job_row(job_id)
            return row if row["status"] == status else None

        return await until(there, seconds)

    async def close(self) -> None:
        self.hold.release.set()
        await self._stack.aclose()


async def until(found: Callable[[], Awaitable[Any]], seconds: float = 20) -> Any:
    """Repeat until the answer is true: workers are tasks of this process, and each repetition lets them continue."""
    async with asyncio.timeout(seconds):
        while not (answer := await found()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return answer


@pytest.fixture
async def shop(rig: Rig) -> AsyncIterator[Shop]:
    shop = Shop(rig)
    await rig.apply(ONE)
    await rig.apply(TWO)
    yield shop
    await shop.close()
