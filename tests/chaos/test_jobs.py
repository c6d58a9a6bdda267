"""Jobs on supervised processes that are killed repeatedly, and the cancellation of a tree."""

import asyncio
import os
import random
import signal
import time
from typing import Any

import pytest

from interlock.engine.queueing import jobs
from interlock.ids import uuid7
from tests.chaos.processes import Yard, ask, until, workflow
from tests.rig import Rig
from tests.supervised.oracles import most_reserved_at_once, reservations

SECONDS = float(os.environ.get("CHAOS_SECONDS", "120"))
POOL = 10


async def submit(rig: Rig, runs: int = 1, ms: int = 100, **more: Any) -> Any:
    asked = jobs.JobRequest(uuid7(), "chaos", "work", [{"ms": ms}] * runs, **more)
    new = await jobs.prepare(rig.plans, rig.admin, asked)
    await rig.database.run_in_transaction(lambda tx: jobs.submit(tx, rig.admin, new))
    return new.id


async def pids(rig: Rig) -> list[int]:
    return [
        row["pid"]
        for row in await ask(rig, "SELECT pid FROM interlock.worker WHERE stopped_at IS NULL AND pid IS NOT NULL")
    ]


async def nothing_leaks(rig: Rig) -> None:
    async def clean() -> bool:
        left = await ask(rig, "SELECT 1 FROM interlock.worker WHERE job_id IS NOT NULL")
        lanes = await ask(rig, "SELECT 1 FROM interlock.queue WHERE queue_id IS NOT NULL OR in_flight <> 0")
        return not left and not lanes and not await ask(rig, "SELECT 1 FROM interlock.ready_run")

    await until(clean, "no reservation, lane or count is left", 30, pause=0.2)


@pytest.mark.chaos
async def test_twenty_jobs_for_ten_workers_that_are_killed_at_random(yard: Yard, rig: Rig) -> None:
    await rig.apply(workflow("work", 3))
    supervisor = yard.supervisor(POOL, concurrency=5)
    # `up` and `supervise` detect a crash loop by processes that die young, so the test kills workers that have worked.
    await until(lambda: pids(rig), "a worker is there", 120, pause=0.5)
    chance = random.Random(3)
    ids = [await submit(rig, runs=40, ms=2000, worker_count=chance.randint(1, 4)) for _ in range(20)]
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := await pids(rig):
            os.kill(chance.choice(found), signal.SIGKILL)
        rows = await ask(rig, "SELECT count(*) AS n FROM interlock.worker WHERE job_id IS NOT NULL")
        assert rows[0]["n"] <= POOL
        await asyncio.sleep(chance.uniform(2, 6))

    async def all_ended() -> bool:
        return not await ask(rig, "SELECT 1 FROM interlock.job WHERE completed_at IS NULL")

    await until(all_ended, "every job ended", 300, pause=0.5)
    rows = await ask(rig, "SELECT status, reason FROM interlock.job WHERE id = ANY($1)", ids)
    assert {row["status"] for row in rows} == {"completed"}, [tuple(row) for row in rows]
    lines = await ask(rig, "SELECT * FROM interlock.resource_event ORDER BY subject_id, seq")
    assert most_reserved_at_once(reservations(lines)) <= POOL
    await nothing_leaks(rig)
    supervisor.ask_to_end()
    assert await supervisor.ended(60) == 0
    assert yard.left_behind() == []


@pytest.mark.chaos
async def test_a_tree_of_depth_five_is_canceled_at_its_root(yard: Yard, rig: Rig) -> None:
    await rig.apply(workflow("work", 1))
    supervisor = yard.supervisor(3)
    await until(lambda: pids(rig), "a worker is there", 60, pause=0.5)
    root = await submit(rig, runs=3, ms=600_000)
    level = [root]
    for _ in range(5):
        level = [await submit(rig, ms=600_000, parent_job_id=parent) for parent in level for _ in range(3)]

    async def work_began() -> bool:
        return bool(await ask(rig, "SELECT 1 FROM interlock.run WHERE lease_worker IS NOT NULL"))

    await until(work_began, "its runs are under way", 30)
    began = time.monotonic()
    await rig.database.run_in_transaction(lambda tx: jobs.cancel(tx, rig.admin, root, reason="enough"))

    async def all_canceled() -> bool:
        left = await ask(rig, "SELECT 1 FROM interlock.job WHERE status <> 'canceled'")
        return not left and not await ask(rig, "SELECT 1 FROM interlock.run WHERE status <> 'canceled'")

    await until(all_canceled, "everything is canceled", 5)
    assert time.monotonic() - began < 5
    assert len(await ask(rig, "SELECT 1 FROM interlock.job")) == 364
    await nothing_leaks(rig)
    supervisor.ask_to_end()
    assert await supervisor.ended(60) == 0
    assert yard.left_behind() == []
