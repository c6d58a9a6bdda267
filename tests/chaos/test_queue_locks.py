"""Locks of a tenant's queue: eight clients cause no deadlock, and a frozen process blocks others only briefly (V10,
V5).

PostgreSQL itself counts the deadlocks. The tools count concurrent bodies in a file.
"""

import asyncio
import subprocess
import sys
import time
from typing import Any

import asyncpg
import pytest

from interlock.client import ApiError, AsyncClient
from interlock.engine.queueing.sweeps import recount_queues
from interlock.wire import Role
from tests.chaos.oracles import most_at_once
from tests.chaos.processes import Process, Yard, start_runs, until, until_all_ended, worker_of
from tests.rig import Rig

pytestmark = pytest.mark.chaos
CAPPED = "{name: capped, caps: {max_concurrency: 3}, steps: [{id: a, tool: chaos.counted, input: {ms: 40}}]}"
CLIENTS, SECONDS = 8, 8.0


async def deadlocks(rig: Rig) -> int:
    [row] = await rig.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    return int(row["deadlocks"])


async def start_and_cancel(client: AsyncClient, until: float) -> tuple[int, int]:
    """Cancel every second run at once, so that most cancels meet a run that the cap holds back."""
    started = canceled = 0
    while time.monotonic() < until:
        run = await client.start("capped")
        started += 1
        if started % 2:
            canceled += await _cancel(client, run.id)
    return started, canceled


async def _cancel(client: AsyncClient, run_id: str) -> bool:
    try:
        await client.cancel(run_id)
    except ApiError as error:
        if error.status != 409:
            raise
        return False  # it has ended
    return True


async def test_eight_clients_that_start_and_cancel_capped_runs_meet_in_no_deadlock(rig: Rig, yard: Yard) -> None:
    await rig.apply(CAPPED)
    before = await deadlocks(rig)
    yard.server()
    for worker in (yard.worker(concurrency=10), yard.worker(concurrency=10)):
        await worker_of(rig, worker)
    key = await rig.key("clients", Role.OPERATOR)
    async with AsyncClient(await yard.address(), key) as client:
        end = time.monotonic() + SECONDS
        counted = await asyncio.gather(*(start_and_cancel(client, end) for _ in range(CLIENTS)))
    started, canceled = (sum(numbers) for numbers in zip(*counted, strict=True))
    await until_all_ended(rig, started, seconds=120)
    most = most_at_once(yard.executions())
    print(f"{started} runs started, {canceled} canceled, at most {most} at work")
    assert started >= 50 and canceled >= 20, "there was hardly any load; the test showed nothing"
    assert most == 3
    ended = await rig.sql("SELECT status, count(*) AS n FROM interlock.run GROUP BY 1")
    assert {row["status"] for row in ended} == {"succeeded", "canceled"}
    assert await deadlocks(rig) == before
    said = "".join(process.said() for process in yard.processes)
    assert "deadlock" not in said
    assert await rig.sql("SELECT run_id FROM interlock.blocked_run") == [] and await recount_queues(rig.database) == 0


async def test_a_deadlock_is_counted(rig: Rig) -> None:
    """The oracle above can fail."""
    await rig.tenant("other")
    before = await deadlocks(rig)
    first, second = [row["id"] for row in await rig.sql("SELECT id FROM interlock.queue ORDER BY id LIMIT 2")]
    one, two = [await asyncpg.connect(rig.database.url) for _ in range(2)]
    lock = "SELECT FROM interlock.queue WHERE id = $1 FOR UPDATE"

    async def both(connection: Any, mine: Any, other: Any, ready: asyncio.Barrier) -> None:
        async with connection.transaction():
            await connection.execute(lock, mine)
            await ready.wait()
            await connection.execute(lock, other)

    ready = asyncio.Barrier(2)
    found = await asyncio.gather(
        both(one, first, second, ready), both(two, second, first, ready), return_exceptions=True
    )
    assert sum(isinstance(each, asyncpg.DeadlockDetectedError) for each in found) == 1
    for connection in (one, two):
        await connection.close()
    await until(lambda: _more_deadlocks(rig, before), "the deadlock is counted", 10)


async def _more_deadlocks(rig: Rig, before: int) -> bool:
    return await deadlocks(rig) > before


# ---------------------------------------------------------------- a frozen process

LEASE_SECONDS = 6.0
_HOLD_THE_QUEUE = """
import asyncio, sys, time
from interlock.settings import Settings
from interlock.store.pool import Database

async def main():
    database = await Database(sys.argv[1], Settings(lease_seconds=float(sys.argv[2]))).open()
    async with database.transaction() as tx:
        await tx.connection.execute("SELECT FROM interlock.queue FOR UPDATE")
        print("holds", flush=True)
        time.sleep(3600)

asyncio.run(main())
"""


async def test_a_process_that_freezes_in_a_transaction_stops_its_tenant_for_half_a_lease(rig: Rig, yard: Yard) -> None:
    """The database ended the session after 60 s, and the whole tenant stood still for as long."""
    await rig.apply(CAPPED)
    yard.server(lease_seconds=LEASE_SECONDS)
    worker = await worker_of(rig, yard.worker(lease_seconds=LEASE_SECONDS))
    address = await yard.address()
    log = yard.base / "frozen.log"
    command = [sys.executable, "-c", _HOLD_THE_QUEUE, rig.database.url, str(LEASE_SECONDS)]
    with log.open("wb") as output:
        popen = await asyncio.to_thread(subprocess.Popen, command, stdout=output, stderr=output, start_new_session=True)
    frozen = Process(popen, log)
    yard.processes.append(frozen)
    await until(lambda: "holds" in frozen.said(), "it holds the tenant's queue")
    frozen.pause()
    since = time.monotonic()
    async with AsyncClient(address, rig.admin_key) as client:
        await asyncio.gather(*(client.start("capped") for _ in range(10)))
        await until_all_ended(rig, 10, seconds=LEASE_SECONDS * 2)
    took = time.monotonic() - since
    print(f"10 runs ended {took:.1f} s after the process froze")
    assert took > 1, "the frozen process held nobody up; the test showed nothing"
    assert took < LEASE_SECONDS, "half a lease, and the time that ten runs take"
    assert [row["id"] for row in await rig.sql("SELECT id FROM interlock.worker WHERE stopped_at IS NULL")] == [
        worker.id
    ]
    assert most_at_once(yard.executions()) == 3
    await start_runs(rig, "capped", 1)
    await until_all_ended(rig, 11, seconds=10)
