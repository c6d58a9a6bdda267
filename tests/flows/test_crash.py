"""A flow resumes after any crash at the same step, and repeats no unrepeatable step."""

import asyncio
import time
from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from interlock import Context, FlowContext
from interlock.lifecycle import RunState
from interlock.settings import Settings
from interlock.worker.run_driver import Driver
from interlock.worker.worker import Worker
from tests.governed.conftest import lose
from tests.rig import Rig


class Steps:
    """Tools that block for ever, once, at the configured steps; and their calls before and after."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.inside = asyncio.Event()
        self.stuck: set[int] = set()
        self.begun: Counter[int] = Counter()
        self.done: Counter[int] = Counter()

        @rig.tool("t.read")
        async def read(n: int) -> int:
            return await self.body(n)

        @rig.tool("t.write", writes=True, risk="low", idempotent=True)
        async def write(n: int) -> int:
            return await self.body(n)

    async def body(self, n: int) -> int:
        self.begun[n] += 1
        if n in self.stuck:
            self.stuck.discard(n)
            if not self.stuck:
                self.inside.set()
            await asyncio.Event().wait()
        self.done[n] += 1
        return n

    async def die_in(self, *steps: int) -> None:
        """Run a worker that is killed inside these steps, and the sweep that notices."""
        self.stuck.update(steps)
        self.inside.clear()
        worker = Worker(self.rig.database, self.rig.settings, tools=self.rig.tools, capacity=2)
        task = asyncio.create_task(worker.run(asyncio.Event()))
        await asyncio.wait_for(self.inside.wait(), 20)
        await lose(self.rig, task)


async def test_a_flow_whose_worker_dies_at_every_step_does_each_of_them(rig: Rig) -> None:
    steps, count = Steps(rig), 30

    @rig.flow("long")
    async def long(ctx: FlowContext) -> Any:
        seen = []
        for n in range(count):
            ctx.random()
            seen.append(await ctx.call("t.write" if n % 3 == 0 else "t.read", n=n))
        return seen

    run_id = await rig.start("long")
    for n in range(count):
        await steps.die_in(n)
    run = await rig.work_until(run_id)
    assert (run["status"], run["result"]) == ("succeeded", list(range(count))), run["error"]
    assert steps.done == Counter(range(count))
    assert steps.begun == Counter(dict.fromkeys(range(count), 2))
    assert run["resume_count"] == count


async def test_what_was_begun_side_by_side_is_taken_up_by_branch(rig: Rig) -> None:
    """Branches that finish in one order and replay in another find their own steps."""
    steps = Steps(rig)

    @rig.flow("branches")
    async def branches(ctx: FlowContext) -> Any:
        async def branch(first: int) -> list[Any]:
            return [await ctx.call("t.read", n=first + at) for at in range(3)]

        return await ctx.gather(*(branch(10 * b) for b in range(4)))

    run_id = await rig.start("branches")
    await steps.die_in(31, 0, 11, 22)
    await steps.die_in(32, 1, 11)
    run = await rig.work_until(run_id)
    assert run["result"] == [[10 * b, 10 * b + 1, 10 * b + 2] for b in range(4)], run["error"]
    assert steps.done == Counter({n: 1 for row in run["result"] for n in row})


async def test_the_two_hundredth_step_is_resumed_in_less_than_50_ms(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From claiming the run to calling the tool, with the journal read from the database."""
    steps = Steps(rig)
    took: list[float] = []
    began: dict[UUID, float] = {}
    drive = Driver.drive

    async def timed(self: Driver) -> None:
        began[self.run.lease.run_id] = time.perf_counter()
        await drive(self)

    monkeypatch.setattr(Driver, "drive", timed)

    @rig.tool("t.last")
    async def last(ctx: Context) -> None:
        took.append(time.perf_counter() - began[ctx.run_id])

    @rig.flow("two-hundred")
    async def two_hundred(ctx: FlowContext) -> Any:
        for n in range(198):
            await ctx.call("t.read", n=n)
        await ctx.approve("go", tier="low")
        await ctx.call("t.last")

    runs = [await rig.start("two-hundred") for _ in range(3)]
    async with rig.worker():
        for run_id in runs:
            await rig.until(run_id, "waiting_approval")
    for run_id in runs:
        await rig.approve(run_id)
        assert (await rig.work_until(run_id))["status"] == "succeeded"
    assert steps.done == Counter(dict.fromkeys(range(198), 3))
    assert min(took) < 0.05, took


async def test_a_waiting_flow_leaves_nothing_in_the_worker(rig: Rig) -> None:
    closed: list[int] = []

    @rig.flow("sleeper")
    async def sleeper(ctx: FlowContext, input: dict[str, int]) -> None:
        try:
            await ctx.sleep("30d")
        finally:
            closed.append(input["n"])

    async with rig.worker() as worker:
        runs = [await rig.start("sleeper", {"n": n}) for n in range(20)]
        for run_id in runs:
            run = await rig.until(run_id, RunState.WAITING_EXTERNAL)
            assert run["status"] == "waiting_external"
        await worker.idle()
    assert sorted(closed) == list(range(20))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"max_reclaims": 3})
