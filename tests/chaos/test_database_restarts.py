"""PostgreSQL outages under load: no accepted run is lost, and no process needs a restart."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from interlock.client import ApiError, AsyncClient, Unreachable
from interlock.engine.queueing.sweeps import recount_queues
from interlock.settings import Settings
from interlock.store.migrate import migrate
from interlock.store.pool import Database
from interlock.testing import ManualClock
from tests.chaos.oracles import assert_done_again_only_after_a_loss, assert_gap_free, assert_sound
from tests.chaos.processes import (
    LEASE_SECONDS,
    Outages,
    Yard,
    ask,
    journal,
    start_runs,
    steps_of,
    until,
    until_all_ended,
    worker_of,
    workflow,
)
from tests.rig import Rig


@pytest.fixture
async def outages(base: Path) -> AsyncIterator[Outages]:
    outages = await asyncio.to_thread(Outages, base / "own")
    yield outages
    await asyncio.to_thread(outages.close)


@pytest.fixture
async def own(outages: Outages, settings: Settings) -> AsyncIterator[Rig]:
    """A rig on the PostgreSQL that this test stops."""
    database = await Database(outages.url, settings, size=4).open()
    await migrate(database)
    rig = await Rig.make(database, settings, ManualClock())
    yield rig
    await rig.close()
    await database.close()


class Load:
    """Clients that start runs, each with its own idempotency key, and repeat a request until it is acknowledged."""

    def __init__(self, client: AsyncClient, ms: float) -> None:
        self._client, self._ms = client, ms
        self.acknowledged: dict[str, str] = {}
        self.refusals = 0
        self._numbers = iter(range(10**9))
        self._enough = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, clients: int) -> None:
        self._tasks = [asyncio.create_task(self._start_runs()) for _ in range(clients)]

    async def end(self) -> None:
        self._enough = True
        await asyncio.gather(*self._tasks)

    async def _start_runs(self) -> None:
        while not self._enough:
            key = f"key-{next(self._numbers)}"
            self.acknowledged[key] = await self._start_one(key)

    async def _start_one(self, key: str) -> str:
        while True:
            try:
                run = await self._client.start("three", {"ms": self._ms, "key": key}, idempotency_key=key)
                return run.id
            except ApiError as error:
                if error.status not in (409, 503):
                    raise
            except Unreachable:
                pass
            self.refusals += 1
            await asyncio.sleep(0.1)


async def hurt_under_load(
    rig: Rig, yard: Yard, hurt: Callable[[], Awaitable[None]], *, seconds: float, clients: int = 4
) -> None:
    """Expose a server, two workers, clients and a follower to `hurt`. Afterwards no run may be missing."""
    await rig.apply(workflow("three", 3))
    await rig.apply(workflow("long", 30))
    processes = [yard.server(), yard.worker(concurrency=20), yard.worker(concurrency=20)]
    address = await yard.address()
    for worker in processes[1:]:
        await worker_of(rig, worker)
    async with AsyncClient(address, rig.admin_key) as client:
        load = Load(client, ms=5)
        followed = await client.start("long", {"ms": 1000 * seconds / 30})
        following = asyncio.create_task(_follow(client, followed.id))
        load.begin(clients)
        await until(lambda: len(load.acknowledged) >= 20, "20 runs were acknowledged")
        await hurt()
        acknowledged = len(load.acknowledged)
        await until(lambda: len(load.acknowledged) >= acknowledged + 20, "the clients get on", 60)
        await load.end()
        await until_all_ended(rig, len(load.acknowledged) + 1, seconds=60)
        events = await asyncio.wait_for(following, 60)

        assert all(process.is_alive for process in processes), [process.said()[-2000:] for process in processes]
        await _assert_nothing_was_lost(rig, yard, load)
        assert_gap_free([event.seq for event in events])
        assert [event.model_dump() for event in events] == await _journal_of(client, followed.id)
        print(f"{len(load.acknowledged)} runs, {load.refusals} refusals, {len(events)} events followed")


async def _follow(client: AsyncClient, run_id: str) -> list[Any]:
    return [event async for event in client.follow(run_id)]


async def _journal_of(client: AsyncClient, run_id: str) -> list[dict[str, Any]]:
    return [event.model_dump() for event in (await client.events(run_id, limit=1000)).items]


async def _assert_nothing_was_lost(rig: Rig, yard: Yard, load: Load) -> None:
    runs = await ask(rig, "SELECT id, input->>'key' AS key, status FROM interlock.run WHERE workflow = 'three'")
    assert {row["key"]: str(row["id"]) for row in runs} == load.acknowledged
    assert len(runs) == len(load.acknowledged), "a key gave more than one run"
    assert {row["status"] for row in runs} == {"succeeded"}
    entries = await journal(rig)
    three = {str(row["id"]) for row in runs}
    assert_sound([e for e in entries if str(e["run_id"]) in three], steps_of(3), len(runs))
    assert_sound([e for e in entries if str(e["run_id"]) not in three], steps_of(30), 1)
    assert_done_again_only_after_a_loss(yard.executions(), entries)
    assert [
        tuple(row) for row in await ask(rig, "SELECT tenant_id, in_flight FROM interlock.queue WHERE in_flight <> 0")
    ] == []
    assert await recount_queues(rig.database) == 0


async def test_two_restarts_under_load_lose_nothing(own: Rig, outages: Outages, base: Path) -> None:
    async def twice() -> None:
        await outages.restart()
        await outages.restart()

    yard = Yard(base, outages.url)
    try:
        await hurt_under_load(own, yard, twice, seconds=4)
    finally:
        yard.close()


@pytest.mark.chaos
async def test_a_second_restart_in_the_middle_of_recovery_loses_nothing(own: Rig, outages: Outages, base: Path) -> None:
    async def hurt() -> None:
        await outages.restart_in_recovery()

    yard = Yard(base, outages.url)
    try:
        await hurt_under_load(own, yard, hurt, seconds=4)
    finally:
        yard.close()


@pytest.mark.chaos
async def test_an_outage_longer_than_the_lease_loses_nothing(own: Rig, outages: Outages, base: Path) -> None:
    async def hurt() -> None:
        await outages.stop()
        await asyncio.sleep(LEASE_SECONDS + 3)
        await outages.start()

    yard = Yard(base, outages.url)
    try:
        await hurt_under_load(own, yard, hurt, seconds=6)
    finally:
        yard.close()


@pytest.mark.chaos
async def test_restart_after_restart_loses_nothing(own: Rig, outages: Outages, base: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time()))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)

    async def outage() -> None:
        await outages.stop()
        await asyncio.sleep(rng.uniform(0, 3 * LEASE_SECONDS))
        await outages.start()

    async def hurt() -> None:
        for _ in range(12):
            await rng.choice([outages.restart, outages.restart, outages.restart_in_recovery, outage])()
            await asyncio.sleep(rng.uniform(0, 4))

    yard = Yard(base, outages.url)
    try:
        await hurt_under_load(own, yard, hurt, seconds=60, clients=8)
    finally:
        yard.close()


@pytest.mark.chaos
async def test_a_table_that_is_locked_for_long_ends_no_worker(rig: Rig, yard: Yard) -> None:
    """A psql session or a migration locks a table: the server is reachable but its statements fail for a while."""
    tables = ("queue", "worker", "ready_run", "run", "journal_entry", "run_command", "workflow")
    await rig.apply(workflow("three", 3))
    worker = yard.worker(lock_timeout_seconds=0.1, database_patience_seconds=0.3, lease_seconds=30)
    me = await worker_of(rig, worker)
    for number, table in enumerate(reversed(tables), 1):
        await start_runs(rig, "three", 10, {"ms": 60})
        connection: Any = await asyncpg.connect(rig.database.url)
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            await asyncio.sleep(0.5)
        await connection.close()
        await until_all_ended(rig, 10 * number, seconds=10)
    assert worker.is_alive, worker.said()
    assert await worker_of(rig, worker) == me
    assert_sound(await journal(rig), steps_of(3), 10 * len(tables))
