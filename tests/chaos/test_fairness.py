"""Lanes under real load: a neighbour's backlog costs little, caps hold, and each tenant gets its weight."""

import asyncio
import statistics
import time

import pytest

from interlock.client import AsyncClient
from interlock.engine.access.principal import Principal
from tests.chaos.oracles import assert_ratio, most_at_once
from tests.chaos.processes import Yard, ask, start_runs, until, until_all_ended, worker_of, workflow
from tests.rig import Rig

# Ratios of measured times and counts need an otherwise idle machine.
pytestmark = pytest.mark.chaos

ONE = "name: one\nsteps:\n  - {id: s1, tool: chaos.nothing}\n"


# ---------------------------------------------------------------- a neighbour's backlog


async def latencies(client: AsyncClient, number: int) -> list[float]:
    """Return how long single runs take from request to answer, in milliseconds."""
    took = []
    for _ in range(number):
        began = time.perf_counter()
        run = await client.start("one", wait=30)
        took.append((time.perf_counter() - began) * 1000)
        assert run.status == "succeeded"
    return took


async def compare_latencies(rig: Rig, yard: Yard, backlog: int) -> float:
    """Return the median latency beside a backlog, as a multiple of the median on an idle system."""
    other = await rig.tenant("other")
    for who in (rig.admin, other):
        await rig.apply(ONE, who)
    yard.server(lease_seconds=60)
    worker = yard.worker(lease_seconds=60)
    await worker_of(rig, worker)
    async with AsyncClient(await yard.address(), await rig.key("other", "operator", other.tenant_id)) as client:
        await latencies(client, 5)
        idle = await latencies(client, 30)
        worker.pause()
        await start_runs(rig, "one", backlog)
        worker.go_on()
        await until(lambda: _is_busy(rig), "the backlog is being worked on", pause=0.005)
        loaded = await latencies(client, 30)
        left = (
            await rig.sql("SELECT count(*) AS n FROM interlock.ready_run WHERE tenant_id = $1", rig.admin.tenant_id)
        )[0]["n"]
    assert left > 0, "the backlog was gone before the measurement was over"
    ratio = statistics.median(loaded) / statistics.median(idle)
    print(f"{backlog} ready: {_shown(idle)} ms idle, {_shown(loaded)} ms loaded, {ratio:.1f} times; {left} left")
    return ratio


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


async def _is_busy(rig: Rig) -> bool:
    rows = await rig.sql("SELECT in_flight FROM interlock.queue WHERE tenant_id = $1", rig.admin.tenant_id)
    return bool(rows[0]["in_flight"] > 0)


async def test_a_neighbours_backlog_delays_a_run_by_less_than_ten_times(rig: Rig, yard: Yard) -> None:
    assert await compare_latencies(rig, yard, backlog=10_000) < 10


async def test_a_neighbours_huge_backlog_delays_a_run_by_less_than_ten_times(rig: Rig, yard: Yard) -> None:
    assert await compare_latencies(rig, yard, backlog=100_000) < 10


# ---------------------------------------------------------------- caps


async def never_more_than(rig: Rig, yard: Yard, cap: int, runs: int) -> None:
    """Check the cap by the tools' own records and by the leases, while two workers have room for forty runs."""
    capped = await rig.tenant("capped", max_concurrency=cap)
    free = rig.admin
    for who in (capped, free):
        await rig.apply(workflow("two", 2), who)
    workers = [yard.worker(concurrency=20), yard.worker(concurrency=20)]
    for worker in workers:
        await worker_of(rig, worker)
    await start_runs(rig, "two", runs, {"ms": 5}, capped)
    await start_runs(rig, "two", runs, {"ms": 5}, free)
    sampled = await _sample(rig, capped, 2 * runs)

    ours = {
        str(row["id"]) for row in await ask(rig, "SELECT id FROM interlock.run WHERE tenant_id = $1", capped.tenant_id)
    }
    executions = yard.executions()
    in_tools = most_at_once(line for line in executions if line.run_id in ours)
    free_in_tools = most_at_once(line for line in executions if line.run_id not in ours)
    print(
        f"cap {cap}: at most {in_tools} in tools, {max(sampled)} leases in {len(sampled)} samples; {free_in_tools} free"
    )
    assert in_tools == cap and max(sampled) <= cap
    assert free_in_tools > cap, "nobody wanted more than the cap; the test showed nothing"
    assert len({line.pid for line in executions if line.run_id in ours}) == 2


async def _sample(rig: Rig, who: Principal, runs: int) -> list[int]:
    async def all_ended() -> bool:
        return not await rig.sql("SELECT FROM interlock.run WHERE completed_at IS NULL LIMIT 1")

    sampled = []
    deadline = time.monotonic() + 60
    while not await all_ended():
        assert time.monotonic() < deadline, f"{runs} runs did not end"
        rows = await rig.sql(
            "SELECT count(*) AS leases, max(in_flight) AS in_flight FROM interlock.queue"
            " JOIN interlock.run ON run.tenant_id = queue.tenant_id AND lease_worker IS NOT NULL"
            " WHERE queue.tenant_id = $1",
            who.tenant_id,
        )
        sampled.append(rows[0]["leases"])
        await asyncio.sleep(0.003)
    return sampled


async def test_a_cap_is_never_exceeded(rig: Rig, yard: Yard) -> None:
    await never_more_than(rig, yard, cap=3, runs=150)


async def test_a_cap_is_never_exceeded_by_thousands(rig: Rig, yard: Yard) -> None:
    await never_more_than(rig, yard, cap=3, runs=4000)


# ---------------------------------------------------------------- weights


async def share(rig: Rig, yard: Yard, concurrency: int, runs: int, workers: int = 1) -> None:
    """Run two lanes that always have work, and count which runs end first while both have some left."""
    light, heavy = await rig.tenant("light", weight=1), await rig.tenant("heavy", weight=3)
    for who in (light, heavy):
        await rig.apply(ONE, who)
        await start_runs(rig, "one", runs, who=who)
    for _ in range(workers):
        yard.worker(concurrency=concurrency)
    await until_all_ended(rig, 2 * runs, seconds=120)
    counted = runs  # the heavy lane had at least a quarter of its runs left then
    rows = await ask(
        rig,
        "SELECT tenant_id, count(*) AS n"
        " FROM (SELECT tenant_id FROM interlock.run ORDER BY completed_at LIMIT $1) AS first GROUP BY tenant_id",
        counted,
    )
    got = {row["tenant_id"]: row["n"] for row in rows}
    print(f"concurrency {concurrency}: {got.get(heavy.tenant_id)}:{got.get(light.tenant_id)} of {counted}")
    assert_ratio(got.get(heavy.tenant_id, 0), got.get(light.tenant_id, 0), 3, 0.1)


@pytest.mark.parametrize("concurrency", [3, 20, 100])
async def test_weights_are_shares(rig: Rig, yard: Yard, concurrency: int) -> None:
    await share(rig, yard, concurrency, runs=max(1000, 50 * concurrency))


@pytest.mark.parametrize("concurrency", [2, 7, 30, 100])
async def test_weights_are_shares_between_two_workers(rig: Rig, yard: Yard, concurrency: int) -> None:
    await share(rig, yard, concurrency, runs=max(2000, 200 * concurrency), workers=2)
