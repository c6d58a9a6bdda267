"""Histories under contention (reliability V11): no number is used twice, and no allocator waits for another."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from interlock.engine.queueing import jobs
from interlock.lifecycle import WorkerEvent
from interlock.store.pool import Database
from tests.rig import Rig
from tests.supervised.conftest import Shop


@pytest.fixture
async def other(database: Database) -> AsyncIterator[Any]:
    """A session of another process, in a transaction."""
    connection: Any = await asyncpg.connect(database.url)
    await connection.execute("BEGIN")
    yield connection
    await connection.close()


async def test_a_statement_that_waited_for_a_worker_gives_the_number_after_that_of_the_other_session(
    shop: Shop, rig: Rig, other: Any
) -> None:
    worker = await shop.worker()
    await other.execute("SELECT FROM interlock.worker WHERE id = $1 FOR UPDATE", worker.me.id)
    await other.execute(
        "INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, actor)"
        " VALUES ($1, interlock.next_resource_event($1), 'worker', now(), 'worker_note', 'test')",
        worker.me.id,
    )
    moving = asyncio.create_task(_lose(rig, worker.me.id))
    waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%next_resource_event%'"
    async with asyncio.timeout(10):
        while not await rig.sql(waits):  # noqa: ASYNC110  it is for the server to say
            await asyncio.sleep(0)
    await other.execute("COMMIT")
    await moving
    lines = await rig.sql(
        "SELECT seq, type FROM interlock.resource_event WHERE subject_id = $1 ORDER BY seq", worker.me.id
    )
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["type"] for line in lines][-2:] == ["worker_note", "worker_transition"]


async def _lose(rig: Rig, worker_id: Any) -> None:
    """Send `move_worker` without the lock that its callers take first."""
    args = (worker_id, "terminated", "test", True, "running", WorkerEvent.TERMINATE, "test", None)
    await rig.database.fetch("move_worker", *args)


async def test_an_allocator_does_not_wait_for_another(shop: Shop, rig: Rig, other: Any) -> None:
    @rig.tool("t.short")
    async def short() -> None: ...

    await rig.apply("{name: short, steps: [{id: a, tool: t.short}]}")
    await shop.worker()
    job_id = await shop.job("short", runs=1, worker_count=1)
    await other.execute("SELECT pg_advisory_xact_lock(hashtextextended('interlock.allocate', 0))")
    async with asyncio.timeout(5):
        await jobs.tend(rig.database, rig.plans)
    [job] = await rig.sql("SELECT status FROM interlock.job WHERE id = $1", job_id)
    assert job["status"] == "pending"
    await other.execute("COMMIT")
    await jobs.tend(rig.database, rig.plans)
    [job] = await rig.sql("SELECT status FROM interlock.job WHERE id = $1", job_id)
    assert job["status"] == "running"
