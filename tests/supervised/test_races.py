"""Many jobs for few workers while workers are lost: all jobs end, no worker serves two, and nothing leaks."""

import asyncio
import random
from typing import Any

from interlock.engine.queueing import workers
from tests.rig import Rig
from tests.supervised.conftest import Shop
from tests.supervised.oracles import most_reserved_at_once, reservations
from tests.supervised.test_jobs import nothing_leaks


async def test_jobs_end_whatever_becomes_of_their_workers(shop: Shop, rig: Rig) -> None:
    @rig.tool("t.short")
    async def short() -> None:
        await asyncio.sleep(0.02)

    await rig.apply("{name: short, steps: [{id: a, tool: t.short}, {id: b, tool: t.short}]}")
    crew = [await shop.worker(capacity=5) for _ in range(4)]
    chance = random.Random(7)
    ids = [await shop.job("short", runs=6, worker_count=chance.randint(1, 3)) for _ in range(8)]

    async def hurt() -> None:
        """Declare workers lost, as a sweep does with silent workers; they register again under a new id."""
        while True:
            await asyncio.sleep(0.1)
            victim = chance.choice(crew)
            await workers.bury(rig.database, victim.me.id, workers.SWEEP, "chance")

    hurting = asyncio.create_task(hurt())
    try:
        async with asyncio.timeout(60):
            while await _open(rig):
                await rig.sweep()
                (row,) = await rig.sql("SELECT count(*) AS n FROM interlock.worker WHERE job_id IS NOT NULL")
                assert row["n"] <= len(crew)
                await asyncio.sleep(0.02)
    finally:
        hurting.cancel()
    rows = await rig.sql("SELECT status, reason FROM interlock.job WHERE id = ANY($1)", ids)
    assert {row["status"] for row in rows} == {"completed"}, [tuple(row) for row in rows]
    (runs,) = await rig.sql(
        "SELECT count(*) AS n, count(*) FILTER (WHERE status = 'succeeded') AS well FROM interlock.run"
    )
    assert (runs["n"], runs["well"]) == (48, 48)
    await nothing_leaks(rig)
    lines = await rig.sql("SELECT * FROM interlock.resource_event ORDER BY subject_id, seq")
    assert most_reserved_at_once(reservations(lines)) <= len(crew)


async def _open(rig: Rig) -> list[Any]:
    return await rig.sql("SELECT id FROM interlock.job WHERE completed_at IS NULL")
