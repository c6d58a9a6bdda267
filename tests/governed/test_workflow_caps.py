"""A workflow's own cap limits its runs in flight, and does not affect other workflows."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import pytest
from tests.rig import Hold, ManualClock, Rig

from interlock.engine.queueing import sweeps
from interlock.engine.queueing.leases import reclaim_lost
from interlock.engine.runs import runs
from interlock.errors import Conflict
from interlock.store.pool import Tx
from interlock.worker.worker import Worker

SLOW = "{name: slow, caps: {max_concurrency: 3}, steps: [{id: a, tool: t.slow}]}"
FREE = "{name: free, steps: [{id: a, tool: t.free}]}"


class Crowd:
    """How many calls are inside a tool at once, and the maximum so far."""

    def __init__(self) -> None:
        self.now = self.most = self.entered = 0

    async def __call__(self) -> None:
        self.now, self.entered = self.now + 1, self.entered + 1
        self.most = max(self.most, self.now)
        for _ in range(20):
            await asyncio.sleep(0)
        self.now -= 1


async def in_flight(rig: Rig, workflow: str = "slow") -> int:
    rows = await rig.sql(
        "SELECT (SELECT count(*) FROM interlock.run WHERE lease_worker IS NOT NULL AND workflow = $1) AS leased",
        workflow,
    )
    leased: int = rows[0]["leased"]
    return leased


async def places(rig: Rig) -> tuple[int, int, int]:
    """Return the leased, ready and held-back runs."""
    (row,) = await rig.sql(
        "SELECT (SELECT count(*) FROM interlock.run WHERE lease_worker IS NOT NULL) AS leased,"
        " (SELECT count(*) FROM interlock.ready_run) AS ready, (SELECT count(*) FROM interlock.blocked_run) AS held"
    )
    return row["leased"], row["ready"], row["held"]


async def sampled(rig: Rig, most: int, ended: Any) -> list[int]:
    """Sample repeatedly until the end: the runs in flight never exceed the cap."""
    seen = []
    while not ended.done():
        seen.append(await in_flight(rig))
        assert seen[-1] <= most, seen
    await ended
    return seen


async def until_all_ended(rig: Rig, ids: list[UUID]) -> None:
    for run_id in ids:
        assert (await rig.until(run_id, seconds=60))["status"] == "succeeded"


async def start(rig: Rig, workflow: str, number: int) -> list[UUID]:
    news = [await runs.prepare(rig.plans, rig.admin, workflow) for _ in range(number)]
    await runs.start_many(rig.database, rig.admin, news)
    return [new.id for new in news]


@pytest.mark.parametrize("number", [120, pytest.param(3000, marks=pytest.mark.chaos)])
async def test_it_is_never_exceeded_and_others_pass_by(rig: Rig, number: int) -> None:
    crowd, free = Crowd(), Crowd()
    rig.tool("t.slow")(crowd.__call__)
    rig.tool("t.free")(free.__call__)
    await rig.apply(SLOW)
    await rig.apply(FREE)
    slow = await start(rig, "slow", number)
    others = await start(rig, "free", 40)
    assert await places(rig) == (0, 43, number - 3)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(rig.worker(capacity=10))
        ended = asyncio.create_task(until_all_ended(rig, slow + others))
        assert await sampled(rig, 3, ended)
    assert (crowd.most, crowd.entered, free.entered) == (3, number, 40)
    assert await places(rig) == (0, 0, 0)
    assert await sweeps.recount_queues(rig.database) == 0


async def test_they_go_in_the_order_they_came(rig: Rig) -> None:
    order: list[int] = []

    @rig.tool("t.note")
    async def note(n: int) -> None:
        order.append(n)

    await rig.apply('{name: one, caps: {max_concurrency: 1}, steps: [{id: a, tool: t.note, input: {n: "${input.n}"}}]}')
    ids = [await rig.start("one", {"n": n}) for n in range(10)]
    async with rig.worker():
        await until_all_ended(rig, ids)
    assert order == list(range(10))


async def test_a_run_that_waits_gives_its_place_away_and_takes_one_again(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.slow")
    async def slow() -> None:
        await hold()

    await rig.apply(
        "{name: gated, caps: {max_concurrency: 1}, steps: [{id: g, approval: {tier: low, summary: ok}},"
        " {id: a, tool: t.slow}]}"
    )
    first, second = await rig.start("gated"), await rig.start("gated")
    async with rig.worker():
        await rig.approve(first)
        await hold.inside()
        await rig.approve(second)
        assert await places(rig) == (1, 0, 1)
        assert (await rig.run(second))["status"] == "running"
        hold.release.set()
        await until_all_ended(rig, [first, second])
    assert await places(rig) == (0, 0, 0)


async def test_a_timer_that_is_due_waits_for_a_place_too(rig: Rig, clock: ManualClock) -> None:
    hold = Hold()

    @rig.tool("t.slow")
    async def slow() -> None:
        await hold()

    clock.freeze()
    await rig.apply(
        "{name: nap, caps: {max_concurrency: 1}, steps: [{id: w, wait: {duration: 1m}}, {id: a, tool: t.slow}]}"
    )
    ids = [await rig.start("nap") for _ in range(3)]
    clock.advance(61)
    assert await sweeps.resume_due(rig.database) == 3
    assert await places(rig) == (0, 1, 2)
    hold.release.set()
    async with rig.worker():
        await until_all_ended(rig, ids)
    assert await places(rig) == (0, 0, 0)


async def test_who_is_canceled_in_the_queue_lets_the_next_one_in(rig: Rig) -> None:
    rig.tool("t.slow")(Crowd().__call__)
    await rig.apply(SLOW.replace("3", "1"))
    first, second, third = await start(rig, "slow", 3)
    await rig.cancel(second)  # held back: it had no place
    assert await places(rig) == (0, 1, 1)
    await rig.cancel(first)
    assert [row["run_id"] for row in await rig.sql("SELECT run_id FROM interlock.ready_run")] == [third]
    # A command that fails leaves the run in its place.
    with pytest.raises(Conflict):
        await rig.approve(third)
    assert await places(rig) == (0, 1, 0)
    async with rig.worker():
        await until_all_ended(rig, [third])


async def test_a_lost_worker_keeps_the_places_of_its_runs_until_others_have_them(rig: Rig, clock: ManualClock) -> None:
    rig.tool("t.slow")(Crowd().__call__)
    await rig.apply(SLOW)
    ids = await start(rig, "slow", 5)
    clock.freeze()
    _, claimed = await rig.claim_by_hand(room=10)
    assert len(claimed) == 3
    clock.advance(60)
    assert await reclaim_lost(rig.database) == 3
    ids += await start(rig, "slow", 1)
    assert await places(rig) == (0, 3, 3)
    async with rig.worker():
        ended = asyncio.create_task(until_all_ended(rig, ids))
        await sampled(rig, 3, ended)
    assert await places(rig) == (0, 0, 0)


async def test_a_run_that_is_given_back_keeps_its_place(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold()

    @rig.tool("t.slow")
    async def slow() -> None:
        await hold()

    await rig.apply("{name: two, caps: {max_concurrency: 1}, steps: [{id: a, tool: t.slow}, {id: b, tool: t.slow}]}")
    ids = await start(rig, "two", 2)
    draining = Worker._drain

    async def release_lease(worker: Worker, claiming: Any) -> None:
        asyncio.get_running_loop().call_soon(hold.release.set)  # by then the worker drains and releases the run
        await draining(worker, claiming)

    monkeypatch.setattr(Worker, "_drain", release_lease)
    async with rig.worker():
        await hold.inside()
    assert [row["run_id"] for row in await rig.sql("SELECT run_id FROM interlock.ready_run")] == [ids[0]]
    ids += await start(rig, "two", 1)
    assert await places(rig) == (0, 1, 2)
    async with rig.worker():
        await until_all_ended(rig, ids)


async def test_starts_at_the_same_moment_share_the_room(rig: Rig) -> None:
    rig.tool("t.slow")(Crowd().__call__)
    await rig.apply(SLOW)
    news = [await runs.prepare(rig.plans, rig.admin, "slow") for _ in range(3)]
    async with rig.database.connection() as connection, connection.transaction():
        await runs.start_many(Tx(connection), rig.admin, news)
        second = asyncio.create_task(start(rig, "slow", 3))
        waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        while not second.done() and not await rig.sql(waits):
            pass
    await second
    assert await places(rig) == (0, 3, 3)


async def test_another_version_changes_the_cap_for_those_that_wait(rig: Rig) -> None:
    rig.tool("t.slow")(Crowd().__call__)
    await rig.apply(SLOW)
    await start(rig, "slow", 10)
    await rig.apply(SLOW.replace("3", "5"))
    assert await places(rig) == (0, 5, 5)
    await rig.apply(SLOW.replace("3", "4"))  # no admitted run goes back
    assert await places(rig) == (0, 5, 5)
    await rig.apply(SLOW.replace("caps: {max_concurrency: 3}, ", ""))
    assert await places(rig) == (0, 10, 0)


async def test_usage_shows_what_a_capped_workflow_uses(rig: Rig) -> None:
    rig.tool("t.slow")(Crowd().__call__)
    await rig.apply(SLOW)
    await rig.apply(FREE)
    await start(rig, "slow", 7)
    await start(rig, "free", 2)
    await rig.claim_by_hand(room=2)
    (usage,) = (await rig.http().get("/api/usage")).json()["items"]
    assert usage["workflows"] == [{"workflow": "slow", "max_concurrency": 3, "in_flight": 2, "waiting": 5}]


# A release asks for admission inside the database: see `interlock.requeue_runs`.
_NOTE_ADMISSIONS = (
    "CREATE TABLE admission (workflow text)",
    "CREATE FUNCTION note_admission() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN INSERT INTO public.admission VALUES (new.workflow); RETURN NULL; END $$",
    "CREATE TRIGGER noted AFTER INSERT ON interlock.queue_change FOR EACH ROW"
    " WHEN (new.workflow IS NOT NULL) EXECUTE FUNCTION note_admission()",
)


async def test_it_costs_workflows_without_one_no_statement(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.tool("t.slow")(Crowd().__call__)
    rig.tool("t.free")(Crowd().__call__)
    await rig.apply(SLOW)
    await rig.apply(FREE)
    asked: dict[str, list[str]] = {"free": [], "slow": []}
    fetch = Tx.fetch
    for statement in _NOTE_ADMISSIONS:
        await rig.sql(statement)

    for workflow, said in asked.items():
        run_id = await rig.start(workflow)
        await rig.sql("DELETE FROM admission")

        async def noted(tx: Tx, name: str, *args: Any, said: list[str] = said) -> list[Any]:
            said.append(name)
            return await fetch(tx, name, *args)

        monkeypatch.setattr(Tx, "fetch", noted)
        await rig.work_until(run_id)
        said += [f"admit_blocked({row['workflow']})" for row in await rig.sql("SELECT workflow FROM admission")]
    assert "admit_blocked(slow)" in asked["slow"]
    assert not [name for name in asked["free"] if "admit_blocked" in name] and "write_runs" in asked["free"]


async def test_the_sweep_admits_a_run_that_finds_room(rig: Rig) -> None:
    rig.tool("t.slow")(Crowd().__call__)
    await rig.apply(SLOW)
    await start(rig, "slow", 5)
    await rig.sql(
        "DELETE FROM interlock.ready_run WHERE run_id = (SELECT min(run_id::text)::uuid FROM interlock.ready_run)"
    )
    assert await sweeps.admit_blocked(rig.database) == 1
    assert await places(rig) == (0, 3, 1)
    assert await sweeps.admit_blocked(rig.database) == 0


async def test_starting_and_ending_at_once_meets_in_no_deadlock(rig: Rig) -> None:
    """Starts, approvals and ends of a capped workflow, while a claim repeatedly marks the lane idle."""
    rig.tool("t.slow")(Crowd().__call__)
    await rig.apply(SLOW.replace("3", "1"))
    (before,) = await rig.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    async with rig.worker(), rig.worker():
        ids = await asyncio.gather(*(rig.start("slow") for _ in range(60)))
        await until_all_ended(rig, list(ids))
    (after,) = await rig.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert after["deadlocks"] == before["deadlocks"]
    assert await places(rig) == (0, 0, 0)
