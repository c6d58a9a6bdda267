"""Driving runs: how a worker handles its runs, commands, deadlines and its own end."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from interlock import Context
from interlock.engine.access.principal import Principal
from interlock.engine.queueing import leases, sweeps
from interlock.engine.writing.change import Effect, OpenApproval, RunChange
from interlock.engine.writing.commit import commit
from interlock.engine.writing.load import empty_journal
from interlock.journal import Entry, LeaseRelease, advance
from interlock.lifecycle import RunReason, RunState
from interlock.settings import Settings
from interlock.store.pool import Tx
from interlock.store.records import ClaimedRun
from interlock.worker import batch_committer, worker
from interlock.worker.worker import Worker
from tests.rig import Hold, Rig, written_row

ONE = "{name: one, steps: [{id: a, tool: t.hold}]}"
TWO = "{name: two, steps: [{id: a, tool: t.hold}, {id: b, tool: t.echo}]}"
GATE_BESIDE_TOOL = """
name: beside
steps:
  - {id: a, needs: [], tool: t.hold}
  - {id: ask, needs: [], approval: {}}
  - {id: b, needs: [ask], tool: t.echo}
"""


@pytest.fixture
def hold(rig: Rig) -> Hold:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> str:
        await hold()
        return "held"

    @rig.tool("t.echo")
    async def echo(value: Any = None) -> Any:
        return value

    return hold


async def in_flight(rig: Rig) -> dict[UUID, int]:
    return {row["id"]: row["in_flight"] for row in await rig.sql("SELECT id, in_flight FROM interlock.queue")}


async def lane_is_clean(rig: Rig) -> None:
    assert set((await in_flight(rig)).values()) == {0}
    assert await rig.sql("SELECT * FROM interlock.ready_run") == []
    assert await sweeps.recount_queues(rig.database) == 0


# ---------------------------------------------------------------- one writer, many workers


async def test_two_workers_never_run_the_same_step_twice(rig: Rig) -> None:
    calls: dict[tuple[UUID, str], int] = {}

    @rig.tool("t.count")
    async def count(ctx: Context) -> None:
        key = (ctx.run_id, ctx.step)
        calls[key] = calls.get(key, 0) + 1
        await asyncio.sleep(0)

    await rig.apply("{name: w, steps: [{id: a, tool: t.count}, {id: b, tool: t.count}, {id: c, tool: t.count}]}")
    async with rig.worker(10) as one, rig.worker(10) as two:
        ids = await asyncio.gather(*(rig.start("w") for _ in range(120)))
        runs = [await rig.until(run_id) for run_id in ids]
    assert {run["status"] for run in runs} == {"succeeded"}
    assert len(calls) == 360 and set(calls.values()) == {1}
    rows = await rig.sql(
        "SELECT actor, count(*) AS n FROM interlock.journal_entry WHERE event = 'start' GROUP BY actor"
    )
    assert {row["actor"] for row in rows} == {one.me.actor, two.me.actor}
    await lane_is_clean(rig)


async def test_max_concurrency_is_never_exceeded(rig: Rig) -> None:
    tenant = await rig.tenant("small", max_concurrency=3)
    now = most = done = 0

    @rig.tool("t.sample")
    async def sample() -> None:
        nonlocal now, most, done
        now += 1
        most = max(most, now)
        for _ in range(5):
            await asyncio.sleep(0)
        counted = (await in_flight(rig))[tenant.tenant_id]
        assert counted <= 3
        now, done = now - 1, done + 1

    await rig.apply("{name: w, steps: [{id: a, tool: t.sample}, {id: b, tool: t.sample}]}", tenant)
    ids = [await rig.start("w", who=tenant) for _ in range(25)]
    async with rig.worker(10), rig.worker(10):
        runs = [await rig.until(run_id) for run_id in ids]
    assert {run["status"] for run in runs} == {"succeeded"}
    assert (most, done) == (3, 50)
    await lane_is_clean(rig)


async def test_who_has_room_is_told_when_a_full_lane_has(rig: Rig, hold: Hold) -> None:
    """The worker that freed the place may be about to end; another must not sleep until its next poll."""
    tenant = await rig.tenant("small", max_concurrency=1)
    await rig.apply(ONE, tenant)
    rig.settings.poll_seconds = 30.0
    first = await rig.start("one", who=tenant)
    stopping = asyncio.Event()
    ending = Worker(rig.database, rig.settings, tools=rig.tools, capacity=1)
    task = asyncio.create_task(ending.run(stopping))
    await hold.inside()
    async with rig.worker():
        second = await rig.start("one", who=tenant)
        stopping.set()
        hold.release.set()
        found = [await rig.until(run_id, seconds=10) for run_id in (first, second)]
    await task
    assert {run["status"] for run in found} == {"succeeded"}
    await lane_is_clean(rig)


async def test_few_free_places_are_used_too(rig: Rig, hold: Hold) -> None:
    """The runs in the other places may last for hours."""
    await rig.apply(ONE)
    for _ in range(16):
        await rig.start("one")
    async with rig.worker(20), asyncio.timeout(20):
        while hold.entries < 16:  # noqa: ASYNC110 — a counter has no event
            await asyncio.sleep(0.005)
        await rig.start("one")
        while hold.entries < 17:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        hold.release.set()


@pytest.mark.parametrize("capacity", [19, 20])
async def test_a_full_worker_shares_its_time_however_large_it_is(rig: Rig, capacity: int) -> None:
    """One place of twenty is not for the queue: with nineteen runs from the queue the worker is full."""
    rig.settings.slice_seconds, rig.settings.poll_seconds, rig.settings.drain_seconds = 0.05, 0.05, 0.1
    other, done = await rig.tenant("other"), asyncio.Event()

    @rig.tool("t.nap")
    async def nap() -> None:
        await asyncio.sleep(0.1)

    @rig.tool("t.done")
    async def finish() -> None:
        done.set()

    await rig.apply("name: long\nsteps:\n" + "\n".join(f"  - {{id: s{n}, tool: t.nap}}" for n in range(100)))
    await rig.apply("{name: short, steps: [{id: a, tool: t.done}]}", other)
    for _ in range(19):
        await rig.start("long")
    async with rig.worker(capacity) as worker:
        while len(worker.drivers) < 19:  # noqa: ASYNC110 — a counter has no event
            await asyncio.sleep(0.005)
        await rig.start("short", who=other)
        await asyncio.wait_for(done.wait(), 5)


WAITING_FOR_GPU = (
    "SELECT FROM interlock.ready_run JOIN interlock.queue ON queue.id = ready_run.queue_id WHERE pool = 'gpu'"
)
GPU = "{name: g, steps: [{id: a, tool: t.gpu, runs_on: gpu}]}"


async def _wait_for_gpu(rig: Rig, runs: int, who: Principal | None = None) -> None:
    """Start one more run that waits for a worker with that label."""
    await rig.start("g", who=who)
    async with asyncio.timeout(20):
        while len(await rig.sql(WAITING_FOR_GPU)) < runs:  # noqa: ASYNC110 — only the rows show it
            await asyncio.sleep(0.005)


async def test_a_lane_whose_tenant_has_no_room_is_in_nobodys_way(rig: Rig, hold: Hold) -> None:
    did, small, other = asyncio.Event(), await rig.tenant("small", max_concurrency=1), await rig.tenant("other")

    @rig.tool("t.gpu")
    async def work() -> None:
        did.set()

    for who in (small, other):
        await rig.apply(ONE, who)
        await rig.apply(GPU, who)
    async with rig.worker(4):
        await _wait_for_gpu(rig, 1, small)
        await rig.start("one", who=small)
        await hold.inside()
        await _wait_for_gpu(rig, 2, other)
        async with rig.worker(1, labels=("gpu",)):
            await asyncio.wait_for(did.wait(), 10)
            hold.release.set()


async def test_no_label_of_a_worker_waits_for_the_end_of_the_others_queue(rig: Rig) -> None:
    did, done = asyncio.Event(), 0

    @rig.tool("t.gpu")
    async def work() -> None:
        did.set()

    @rig.tool("t.quick")
    async def quick() -> None:
        nonlocal done
        done += 1

    await rig.apply(GPU)
    await rig.apply("{name: quick, steps: [{id: a, tool: t.quick}]}")
    async with rig.worker(1):
        await _wait_for_gpu(rig, 1)
    for _ in range(50):
        await rig.start("quick")
    async with rig.worker(1, labels=("default", "gpu")):
        await asyncio.wait_for(did.wait(), 20)
        assert done < 25


async def test_a_worker_does_not_rest_while_a_lane_with_work_is_locked(url: str, rig: Rig, hold: Hold) -> None:
    """The holder of the lock is about to release it, and the worker gets no notification of that."""
    rig.settings.poll_seconds = 60.0  # nothing else finds it
    other = await rig.tenant("other")
    for who in (rig.admin, other):
        await rig.apply("{name: echo, steps: [{id: b, tool: t.echo}]}", who)
    locked = await rig.start("echo")
    free = await rig.start("echo", who=other)
    connection: Any = await asyncpg.connect(url)
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("SELECT FROM interlock.queue WHERE id = $1 FOR UPDATE", rig.admin.tenant_id)
        async with rig.worker() as worker:
            assert (await rig.until(free))["status"] == "succeeded"
            await worker.idle()
            await transaction.rollback()
            assert (await rig.until(locked))["status"] == "succeeded"
    finally:
        await connection.close()


async def test_a_mixed_load_leaves_every_lane_at_zero(rig: Rig, hold: Hold) -> None:
    """Runs that succeed, fail, retry, wait, are canceled in flight and in the queue: the count is right for each."""

    @rig.tool("t.fail")
    async def fail() -> None:
        raise ConnectionError("no")

    others = [await rig.tenant(f"t{n}", max_concurrency=4) for n in range(3)]
    sources = {
        "good": "{name: good, steps: [{id: a, tool: t.echo}]}",
        "bad": "{name: bad, steps: [{id: a, tool: t.fail, retry: {max_attempts: 1}}]}",
        "again": "{name: again, steps: [{id: a, tool: t.fail}]}",
        "gate": "{name: gate, steps: [{id: a, tool: t.echo}, {id: ask, approval: {}}]}",
        "wait": "{name: wait, steps: [{id: a, tool: t.echo}, {id: r, wait: {duration: 1h}}]}",
    }
    ends = {
        "good": "succeeded",
        "bad": "failed",
        "again": "running",
        "gate": "waiting_approval",
        "wait": "waiting_external",
    }
    for who in others:
        for source in (*sources.values(), ONE):
            await rig.apply(source, who)
    started = [(who, name, await rig.start(name, who=who)) for who in others for name in sources for _ in range(3)]
    held = [(who, await rig.start("one", who=who)) for who in others]
    async with rig.worker(20):
        for who, run_id in held:
            await rig.until(run_id, "running")
            await rig.cancel(run_id, who)
        for _, name, run_id in started:
            if name == "again":
                await rig.until_journal(run_id, "a: running -retry-> pending")
            else:
                assert (await rig.until(run_id, ends[name]))["status"] == ends[name]
        for _, run_id in held:
            assert (await rig.until(run_id))["status"] == "canceled"
        # Retries released their leases too.
        assert (await rig.sql("SELECT count(*) AS n FROM interlock.run WHERE lease_worker IS NOT NULL"))[0]["n"] == 0
        for who, name, run_id in started:
            if name != "good" and name != "bad":
                await rig.cancel(run_id, who)
    await lane_is_clean(rig)


async def test_recount_finds_and_mends_a_planted_drift(rig: Rig) -> None:
    await rig.sql("UPDATE interlock.queue SET in_flight = 7")
    assert await sweeps.recount_queues(rig.database) == 1
    assert set((await in_flight(rig)).values()) == {0}


class TestWakeUps:
    """Without the poll, a lost wake-up would cause a time-out."""

    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(lease_seconds=300, poll_seconds=120)

    async def test_no_run_is_left_behind_when_lanes_rest_and_wake(self, rig: Rig, hold: Hold) -> None:
        await rig.apply("{name: w, steps: [{id: a, tool: t.echo}]}")
        others = [await rig.tenant(f"t{n}") for n in range(3)]
        for who in others:
            await rig.apply("{name: w, steps: [{id: a, tool: t.echo}]}", who)
        ids: list[UUID] = []

        async def starter(number: int) -> None:
            who = [rig.admin, *others][number % 4]
            for size in (1, 1, 2, 1, 3, 1, 1, 5) * 2:
                ids.extend(await asyncio.gather(*(rig.start("w", who=who) for _ in range(size))))
                # Let the lane run dry: the race is between a claim that finds nothing and the next start.
                for _ in range(number % 4):
                    await rig.sql("SELECT 1")

        async with rig.worker(8), rig.worker(8), asyncio.timeout(30):
            await asyncio.gather(*(starter(number) for number in range(6)))
            for run_id in ids:
                assert (await rig.until(run_id, seconds=10))["status"] == "succeeded"
        await lane_is_clean(rig)

    async def test_a_start_wakes_an_idle_worker(self, rig: Rig, hold: Hold) -> None:
        await rig.apply("{name: w, steps: [{id: a, tool: t.echo}]}")
        async with rig.worker():
            for _ in range(5):
                assert (await rig.until(await rig.start("w"), seconds=10))["status"] == "succeeded"

    async def test_an_approval_wakes_an_idle_worker(self, rig: Rig, hold: Hold) -> None:
        await rig.apply("{name: w, steps: [{id: ask, approval: {}}, {id: a, tool: t.echo}]}")
        async with rig.worker():
            for _ in range(5):
                run_id = await rig.start("w")
                await rig.approve(run_id)
                assert (await rig.until(run_id, seconds=10))["status"] == "succeeded"

    async def test_a_timer_wakes_an_idle_worker(self, rig: Rig, hold: Hold) -> None:
        await rig.apply("{name: w, steps: [{id: r, wait: {duration: 20ms}}, {id: a, tool: t.echo}]}")
        async with rig.worker(), asyncio.timeout(20):
            for _ in range(5):
                run_id = await rig.start("w")
                while not await sweeps.resume_due(rig.database):
                    pass
                assert (await rig.until(run_id, seconds=10))["status"] == "succeeded"

    async def test_a_lane_at_its_cap_goes_on_when_a_run_ends(self, rig: Rig, hold: Hold) -> None:
        tenant = await rig.tenant("small", max_concurrency=1)
        await rig.apply("{name: w, steps: [{id: a, tool: t.echo}]}", tenant)
        async with rig.worker():
            ids = [await rig.start("w", who=tenant) for _ in range(10)]
            for run_id in ids:
                assert (await rig.until(run_id, seconds=10))["status"] == "succeeded"


# ---------------------------------------------------------------- commands for a run in flight


async def test_a_gate_is_granted_while_another_step_of_its_run_is_in_flight(rig: Rig, hold: Hold) -> None:
    await rig.apply(GATE_BESIDE_TOOL)
    run_id = await rig.start("beside")
    async with rig.worker():
        await hold.inside()
        await rig.until_journal(run_id, "ask: pending -open-> waiting_approval")
        assert (await rig.run(run_id))["status"] == "running"  # another step can still move the run
        await rig.approve(run_id)
        await rig.approve(run_id)
        journal = await rig.until_journal(run_id, "b: running -succeed-> succeeded")
        assert journal.count("ask: waiting_approval -grant-> succeeded") == 1
        assert "a: running -succeed-> succeeded" not in journal
        hold.release.set()
        assert (await rig.until(run_id))["status"] == "succeeded"
    assert await rig.sql("SELECT * FROM interlock.run_command") == []
    assert hold.entries == 1
    await lane_is_clean(rig)


async def test_a_gate_beside_a_step_in_flight_is_refused_and_stops_that_step(rig: Rig, hold: Hold) -> None:
    await rig.apply(GATE_BESIDE_TOOL)
    run_id = await rig.start("beside")
    async with rig.worker():
        await hold.inside()
        await rig.until_journal(run_id, "ask: pending -open-> waiting_approval")
        await rig.decide(run_id, approves=False, reason="no")
        run = await rig.until(run_id)
    assert hold.interrupted
    assert (run["status"], run["reason"]) == ("failed", "rejected")
    assert {k: s["status"] for k, s in run["step"].items()} == {"a": "canceled", "ask": "failed", "b": "canceled"}


async def test_cancel_stops_every_step_in_flight(rig: Rig) -> None:
    holds = {name: Hold() for name in "abc"}

    @rig.tool("t.named")
    async def named(ctx: Context) -> None:
        await holds[ctx.step]()

    steps = ", ".join(f"{{id: {name}, needs: [], tool: t.named}}" for name in holds)
    await rig.apply(f"{{name: w, steps: [{steps}]}}")
    run_id = await rig.start("w")
    async with rig.worker():
        for hold in holds.values():
            await hold.inside()
        await rig.cancel(run_id)
        run = await rig.until(run_id)
    assert all(hold.interrupted for hold in holds.values())
    assert (run["status"], [s["status"] for s in run["steps"]]) == ("canceled", ["canceled"] * 3)
    await lane_is_clean(rig)


async def test_a_step_that_will_not_stop_settles_before_its_run_is_canceled(rig: Rig) -> None:
    """A tool may finish its current work; the journal keeps its outcome, and the run ends as canceled."""
    hold = Hold()

    @rig.tool("t.stubborn")
    async def stubborn() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await hold()
        return "sent all the same"

    await rig.apply("{name: w, steps: [{id: a, tool: t.stubborn}, {id: b, tool: t.stubborn}]}")
    run_id = await rig.start("w")
    async with rig.worker():
        await hold.inside()
        await rig.cancel(run_id)
        run = await rig.until(run_id)
    assert (run["status"], run["step"]["a"]["status"], run["step"]["b"]["status"]) == (
        "canceled", "succeeded", "canceled",
    )  # fmt: skip
    assert run["step"]["a"]["output"] == "sent all the same"


@pytest.mark.parametrize(
    ("name", "source"), [("one", ONE), ("two", TWO), ("beside", GATE_BESIDE_TOOL)], ids=["last", "first", "graph"]
)
async def test_a_deadline_stops_a_step_in_flight_and_fails_the_run(
    rig: Rig, hold: Hold, name: str, source: str
) -> None:
    await rig.apply(source)
    rig.clock.freeze()
    run_id = await rig.start(name, deadline_seconds=3)
    async with rig.worker():
        await hold.inside()
        rig.clock.advance(3)
        await sweeps.enforce_deadlines(rig.database, rig.plans)
        run = await rig.until(run_id)
    assert hold.interrupted
    assert (run["status"], run["reason"], run["step"]["a"]["status"]) == ("failed", "timed_out", "canceled")
    assert await rig.sql("SELECT * FROM interlock.approval WHERE status = 'requested'") == []
    await lane_is_clean(rig)


async def test_a_run_that_finishes_as_its_deadline_passes_has_succeeded(rig: Rig) -> None:
    """A run has succeeded exactly when every step has, even if the command came a moment before."""
    hold = Hold()

    @rig.tool("t.stubborn")
    async def stubborn() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await hold()
        return "done"

    await rig.apply("{name: w, steps: [{id: a, tool: t.stubborn}]}")
    rig.clock.freeze()
    run_id = await rig.start("w", deadline_seconds=3)
    async with rig.worker():
        await hold.inside()
        rig.clock.advance(3)
        await sweeps.enforce_deadlines(rig.database, rig.plans)
        run = await rig.until(run_id)
    assert (run["status"], run["step"]["a"]["status"]) == ("succeeded", "succeeded")


# ---------------------------------------------------------------- lost workers


def change_of(
    run: ClaimedRun, *entries: Entry, release: LeaseRelease | None = None, effects: tuple[Effect, ...] = ()
) -> RunChange:
    seq = entries[-1].seq if entries else 0
    return RunChange(written_row(run), list(entries), release, seq=seq, effects=effects)


async def by_hand(rig: Rig, me: leases.WorkerIdentity, change: RunChange) -> bool:
    async with rig.database.transaction() as tx:
        [result] = await commit(tx, [change], me.id)
    return result.kept


async def test_a_lost_worker_cannot_write_and_changes_nothing(rig: Rig, hold: Hold) -> None:
    hold.release.set()
    await rig.apply(TWO)
    rig.clock.freeze()
    run_id = await rig.start("two")
    me, [row] = await rig.claim_by_hand()
    late = Entry(3, "step_transition", me.actor, "a", "running", "succeed", "succeeded", 1, output='"forged"')
    done = Entry(4, "run_completed", me.actor, None, "running", "fail", "failed", data={"reason": "terminal_error"})
    rig.clock.advance(6)
    await rig.sweep()
    before = (
        await rig.journal(run_id),
        await rig.sql("SELECT * FROM interlock.run"),
        await rig.sql("SELECT * FROM interlock.queue"),
    )
    ending = LeaseRelease(RunState.FAILED, done, RunReason.TERMINAL_ERROR)
    for change in (change_of(row, late), change_of(row, late, done, release=ending), change_of(row, release=ending)):
        assert not await by_hand(rig, me, change)
    after = (
        await rig.journal(run_id),
        await rig.sql("SELECT * FROM interlock.run"),
        await rig.sql("SELECT * FROM interlock.queue"),
    )
    assert after == before
    run = await rig.work_until(run_id)
    assert (run["status"], run["step"]["a"]["output"]) == ("succeeded", "held")
    # The same holds after the run has ended on another worker.
    assert not await by_hand(rig, me, change_of(row, late))
    await lane_is_clean(rig)


async def test_a_lost_worker_holds_nothing_even_before_its_runs_are_taken_back(rig: Rig, hold: Hold) -> None:
    """Otherwise the worker would claim a rejected run again, and repeat a step as if for the first time."""
    await rig.apply(TWO)
    rig.clock.freeze()
    await rig.start("two")
    me, [row] = await rig.claim_by_hand()
    async with rig.database.connection() as connection:
        tx = Tx(connection)
        assert [held.id for held in await leases.leases_of(tx, me)] == [row.id]
        rig.clock.advance(6)
        assert [lost["id"] for lost in await tx.fetch("lose_workers", "system:sweep")] == [me.id]
        assert await leases.leases_of(tx, me) == []


async def test_a_live_worker_cannot_write_with_a_token_that_is_not_the_runs(rig: Rig, hold: Hold) -> None:
    """The worker released the run, and another worker holds it now."""
    await rig.apply(TWO)
    run_id = await rig.start("two")
    me, [row] = await rig.claim_by_hand(lease_seconds=300)
    assert await by_hand(rig, me, change_of(row, release=LeaseRelease(RunState.RUNNING, queue=True)))
    other, [again] = await rig.claim_by_hand(lease_seconds=300)
    assert again.lease_token == row.lease_token + 1
    entry = Entry(3, "step_transition", me.actor, "a", "running", "succeed", "succeeded", 1)
    assert not await by_hand(rig, me, change_of(row, entry))
    assert not await by_hand(rig, me, change_of(again, entry))  # the right token, but not the holder
    assert not await by_hand(rig, other, change_of(row, entry))  # the holder, but an old token
    assert await rig.journal(run_id) == ["run:  -create-> pending", "run: pending -start-> running"]
    assert await by_hand(rig, other, change_of(again, entry))


async def test_a_refused_write_takes_no_other_with_it(rig: Rig, hold: Hold) -> None:
    await rig.apply(TWO)
    first, second = await rig.start("two"), await rig.start("two")
    me, rows = await rig.claim_by_hand(room=2, lease_seconds=300)
    rows = sorted(rows, key=lambda row: row.id)
    entry = Entry(3, "step_transition", me.actor, "a", "running", "succeed", "succeeded", 1)
    stale = change_of(rows[0], entry)
    stale.row.token -= 1
    async with rig.database.transaction() as tx:
        answers = await commit(tx, [stale, change_of(rows[1], entry)], me.id)
    assert [answer.kept for answer in answers] == [False, True]
    assert (len(await rig.journal(first)), len(await rig.journal(second))) == (2, 3)


class TestLost:
    @pytest.fixture
    def settings(self) -> Settings:
        # Heartbeats every ten seconds: none comes between moving the clock and sweeping.
        return Settings(lease_seconds=30, poll_seconds=0.2)

    async def test_a_worker_that_was_declared_lost_stops_and_begins_again_under_a_new_id(
        self, rig: Rig, hold: Hold
    ) -> None:
        await rig.apply(TWO)
        rig.clock.freeze()
        run_id = await rig.start("two")
        async with rig.worker() as worker:
            await hold.inside()
            before = worker.me.id
            rig.clock.advance(31)
            await rig.sweep()  # in the queue again, and the only worker does not know yet
            hold.entered.clear()
            hold.release.set()
            run = await rig.until(run_id)
            assert worker.me.id != before
        assert (run["status"], run["resume_count"], hold.entries) == ("succeeded", 1, 2)
        journal = await rig.journal(run_id)
        assert journal.count("a: running -succeed-> succeeded") == 1
        assert "a: running -reclaim-> running" in journal
        await lane_is_clean(rig)

    async def test_mail_that_a_lost_worker_never_read_is_read_by_the_next(self, rig: Rig, hold: Hold) -> None:
        await rig.apply(GATE_BESIDE_TOOL)
        rig.clock.freeze()
        run_id = await rig.start("beside")
        hold.release.set()
        await self._lose_with_gate_open(rig, run_id)
        await rig.approve(run_id)  # no worker holds the run: the command applies at once
        assert (await rig.work_until(run_id))["status"] == "succeeded"

    async def _lose_with_gate_open(self, rig: Rig, run_id: UUID) -> None:
        me, [row] = await rig.claim_by_hand(lease_seconds=30)
        await open_gate(rig, me, row)
        rig.clock.advance(31)
        await rig.sweep()


async def open_gate(rig: Rig, me: leases.WorkerIdentity, row: ClaimedRun) -> None:
    """Do a driver's first work with GATE_BESIDE_TOOL: it asks, and then starts the tool."""
    plan = await rig.plans.get(row.tenant_id, row.workflow, row.workflow_version)
    journal = empty_journal(row, plan).at(RunState.RUNNING, row.seq)
    requests = advance(journal, row.now).approvals
    effects = tuple(OpenApproval(request) for request in requests)
    assert await by_hand(rig, me, change_of(row, *journal.take_unsaved(), effects=effects))


async def test_a_cancel_that_a_lost_worker_never_read_is_carried_out_by_the_next(rig: Rig, hold: Hold) -> None:
    await rig.apply(GATE_BESIDE_TOOL)
    rig.clock.freeze()
    run_id = await rig.start("beside")
    me, [row] = await rig.claim_by_hand()
    await open_gate(rig, me, row)
    await rig.cancel(run_id)
    rig.clock.advance(6)
    await rig.sweep()
    # The run is in the queue with an unread command. Later commands come after it.
    await rig.approve(run_id)
    await rig.cancel(run_id)
    [found] = await rig.sql("SELECT status FROM interlock.run")
    assert found["status"] == "canceling"
    run = await rig.work_until(run_id)
    assert (run["status"], run["reason"], hold.entries) == ("canceled", "canceled_by_user", 0)
    await lane_is_clean(rig)


async def test_a_decision_that_a_lost_worker_never_read_is_not_forgotten(rig: Rig, hold: Hold) -> None:
    """The lost worker had finished its step; only the command in the inbox can move the run."""
    await rig.apply(
        "{name: w, steps: [{id: a, needs: [], tool: t.hold}, {id: x, needs: [], approval: {}},"
        " {id: y, needs: [], approval: {}}]}"
    )
    rig.clock.freeze()
    run_id = await rig.start("w")
    me, [row] = await rig.claim_by_hand()
    await open_gate(rig, me, row)
    first, second = await rig.sql("SELECT id FROM interlock.approval ORDER BY id")
    http = rig.http()
    assert (await http.post(f"/api/approvals/{first['id']}/approve")).status_code == 200
    done = Entry(5, "step_transition", me.actor, "a", "running", "succeed", "succeeded", 1, output="1")
    assert await by_hand(rig, me, change_of(row, done))
    rig.clock.advance(6)
    await rig.sweep()
    assert (await http.post(f"/api/approvals/{second['id']}/approve")).status_code == 200
    run = await rig.work_until(run_id)
    assert run["status"] == "succeeded"
    await lane_is_clean(rig)


async def test_a_claim_whose_answer_was_lost_is_taken_up(rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    hold.release.set()
    await rig.apply(TWO)
    run_id = await rig.start("two")
    real, lost = leases.claim, []

    async def claim(*args: Any) -> Any:
        answer = await real(*args)
        if answer and not lost:
            lost.append(answer)
            raise ConnectionResetError("the answer got lost on its way")
        return answer

    monkeypatch.setattr(leases, "claim", claim)
    run = await rig.work_until(run_id)
    assert (len(lost), run["status"], hold.entries) == (1, "succeeded", 1)
    await lane_is_clean(rig)


async def test_an_append_whose_answer_was_lost_is_not_written_twice(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold.release.set()
    await rig.apply(TWO)
    run_id = await rig.start("two")
    real, lost = batch_committer.commit, []

    async def unlucky(*args: Any) -> Any:
        answer = await real(*args)
        if len(lost) < 3:
            lost.append(answer)
            raise ConnectionResetError("the answer got lost on its way")
        return answer

    monkeypatch.setattr(batch_committer, "commit", unlucky)
    run = await rig.work_until(run_id)
    assert (run["status"], hold.entries, len(lost) > 0) == ("succeeded", 1, True)
    assert (await rig.journal(run_id))[2:] == [
        "a: running -succeed-> succeeded",
        "b: running -succeed-> succeeded",
        "run: running -succeed-> succeeded",
    ]
    await lane_is_clean(rig)


# ---------------------------------------------------------------- drain and slices


async def test_draining_lets_a_step_finish_and_another_worker_goes_on(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.apply(TWO)
    run_id = await rig.start("two")
    stop = asyncio.Event()
    worker = Worker(rig.database, rig.settings, tools=rig.tools, capacity=5)
    draining, drain = asyncio.Event(), worker._drain

    async def watched(claiming: asyncio.Task[None]) -> None:
        draining.set()
        await drain(claiming)

    monkeypatch.setattr(worker, "_drain", watched)
    task = asyncio.create_task(worker.run(stop))
    await hold.inside()
    stop.set()
    await asyncio.wait_for(draining.wait(), 20)
    hold.release.set()
    await asyncio.wait_for(task, 20)
    assert not hold.interrupted
    run = await rig.run(run_id)
    assert (run["status"], run["step"]["a"]["status"], run["step"]["b"]["status"]) == (
        "running",
        "succeeded",
        "pending",
    )
    [row] = await rig.sql("SELECT status, reason FROM interlock.worker")
    assert (row["status"], row["reason"]) == ("completed", "drained")
    assert set((await in_flight(rig)).values()) == {0}
    assert (await rig.work_until(run_id))["status"] == "succeeded"
    assert hold.entries == 1
    assert "a: running -reclaim-> running" not in await rig.journal(run_id)


class TestImpatientDrain:
    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(lease_seconds=300, poll_seconds=0.2, drain_seconds=0.05)

    @pytest.mark.parametrize("source", [TWO, GATE_BESIDE_TOOL], ids=["list", "graph"])
    async def test_a_step_that_outlasts_the_drain_is_given_back_at_once(
        self, rig: Rig, hold: Hold, source: str
    ) -> None:
        await rig.apply(source)
        run_id = await rig.start("two" if source is TWO else "beside")
        async with rig.worker():
            await hold.inside()
        assert hold.interrupted
        [row] = await rig.sql("SELECT status, lease_worker FROM interlock.run")
        assert (row["status"], row["lease_worker"]) == ("running", None)
        hold.release.set()
        async with rig.worker():
            if source is GATE_BESIDE_TOOL:
                await rig.until_journal(run_id, "a: running -succeed-> succeeded")
                await rig.approve(run_id)
            assert (await rig.until(run_id))["status"] == "succeeded"
        assert hold.entries == 2
        await lane_is_clean(rig)


class TestSlices:
    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(lease_seconds=300, poll_seconds=0.01, slice_seconds=0.01)

    @pytest.mark.parametrize("same_tenant", [True, False], ids=["same tenant", "another tenant"])
    async def test_a_long_run_gives_way_to_another(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, same_tenant: bool
    ) -> None:
        monkeypatch.setattr(worker, "_SLOW_STEP_SECONDS", 0.01)
        other = rig.admin if same_tenant else await rig.tenant("other")
        order: list[str] = []
        short_done = asyncio.Event()
        begun = asyncio.Event()

        @rig.tool("t.long")
        async def long() -> None:
            order.append("long")
            begun.set()
            if not short_done.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(short_done.wait(), 0.05)

        @rig.tool("t.short")
        async def short() -> None:
            order.append("short")
            short_done.set()

        steps = ", ".join(f"{{id: s{n}, tool: t.long}}" for n in range(20))
        await rig.apply(f"{{name: long, steps: [{steps}]}}")
        await rig.apply("{name: short, steps: [{id: a, tool: t.short}]}", other)
        long_id = await rig.start("long")
        async with rig.worker(capacity=1):
            await asyncio.wait_for(begun.wait(), 20)
            short_id = await rig.start("short", who=other)
            assert (await rig.until(short_id))["status"] == "succeeded"
            assert (await rig.run(long_id))["status"] == "running"
            assert (await rig.until(long_id, seconds=30))["status"] == "succeeded"
        assert order.index("short") < 18
        assert order.count("long") == 20  # released between steps: none ran twice
        await lane_is_clean(rig)


# ---------------------------------------------------------------- steps


async def test_steps_of_a_graph_run_side_by_side(rig: Rig) -> None:
    together = asyncio.Barrier(3)

    @rig.tool("t.meet")
    async def meet() -> None:
        async with asyncio.timeout(10):
            await together.wait()

    @rig.tool("t.join")
    async def join(values: list[Any]) -> int:
        return len(values)

    await rig.apply("""
name: w
steps:
  - {id: a, needs: [], tool: t.meet}
  - {id: b, needs: [], tool: t.meet}
  - {id: c, needs: [], tool: t.meet}
  - {id: d, needs: [a, b, c], tool: t.join, input: {values: ["${steps.a.status}", "${steps.b.status}"]}}
""")
    run = await rig.work_until(await rig.start("w"))
    assert (run["status"], run["result"]) == ("succeeded", 2)


async def test_a_failure_in_a_graph_stops_what_runs_beside_it(rig: Rig, hold: Hold) -> None:
    @rig.tool("t.fail")
    async def fail() -> None:
        await hold.inside()
        raise ValueError("broken")

    await rig.apply("""
name: w
steps:
  - {id: a, needs: [], tool: t.hold}
  - {id: b, needs: [], tool: t.fail, retry: {max_attempts: 1}}
  - {id: c, needs: [a], tool: t.echo}
""")
    run = await rig.work_until(await rig.start("w"))
    assert hold.interrupted
    assert (run["status"], run["reason"], run["error"]["step"]) == ("failed", "attempts_exhausted", "b")
    assert [s["status"] for s in run["steps"]] == ["canceled", "failed", "canceled"]


async def test_a_retry_beside_a_long_step_comes_in_its_time(rig: Rig, hold: Hold) -> None:
    """The run is in flight all the time: its own driver keeps the timer."""
    tries: list[int] = []

    @rig.tool("t.flaky")
    async def flaky() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("once")
        hold.release.set()

    await rig.apply(
        "{name: w, steps: [{id: a, needs: [], tool: t.hold},"
        " {id: b, needs: [], tool: t.flaky, retry: {base_delay: 1ms}}]}"
    )
    run = await rig.work_until(await rig.start("w"))
    assert (run["status"], len(tries), hold.entries) == ("succeeded", 2, 1)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (object(), "not JSON"),
        ("nul \x00 byte", "NUL"),
        ("x" * 1_000_001, "at most"),
        ("lone \ud800 surrogate", ""),
        (10**5000, ""),
        ({1: {2: float("nan")}, "when": timedelta(1)}, None),
    ],
    ids=["object", "nul", "huge", "surrogate", "endless number", "odd but fine"],
)
async def test_output_that_cannot_be_stored_fails_the_step_and_not_the_worker(
    rig: Rig, hold: Hold, output: Any, why: str | None
) -> None:
    hold.release.set()

    @rig.tool("t.odd")
    async def odd() -> Any:
        return output

    await rig.apply("{name: odd, steps: [{id: a, tool: t.odd}]}")
    await rig.apply(ONE)
    async with rig.worker() as worker:
        me = worker.me.id if worker.me is not leases.UNREGISTERED else None
        run = await rig.until(await rig.start("odd"))
        if why is None:
            assert run["status"] == "succeeded"
        else:
            assert (run["status"], run["reason"], run["step"]["a"]["status"]) == ("failed", "terminal_error", "failed")
            assert why in run["error"]["message"]
        assert (await rig.until(await rig.start("one")))["status"] == "succeeded"
        assert me in (None, worker.me.id)


@pytest.mark.parametrize("slow", [False, True], ids=["short", "slow"])
@pytest.mark.parametrize("kind", ["refused by the row", "not even JSON"])
async def test_what_the_database_refuses_fails_its_step_and_not_the_worker(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch, kind: str, slow: bool
) -> None:
    """An entry passes every check up to the append: the committer splits the batch, and only this run fails."""
    monkeypatch.setattr(worker, "_SLOW_STEP_SECONDS", 0.01)

    @rig.tool("t.odd")
    async def odd(ctx: Context) -> str:
        if slow:
            await rig.until_journal(ctx.run_id, "a: pending -claim-> running")
        ctx.cost(1.0)
        ctx.costs = [{"provider": "a\x00b" if kind == "refused by the row" else object()}]
        return "fine"

    await rig.apply("{name: odd, steps: [{id: a, tool: t.odd}]}")
    await rig.apply(ONE)
    async with rig.worker():
        run = await rig.until(await rig.start("odd"), seconds=8)
        assert (run["status"], run["reason"], run["step"]["a"]["status"]) == ("failed", "terminal_error", "failed")
        hold.release.set()
        assert (await rig.until(await rig.start("one"), seconds=8))["status"] == "succeeded"
    await lane_is_clean(rig)


async def test_an_error_that_cannot_be_stored_as_it_is_is_stored_readably(rig: Rig) -> None:
    @rig.tool("t.odd")
    async def odd() -> None:
        raise FileNotFoundError("no file \udcff\x00")

    await rig.apply("{name: odd, steps: [{id: a, tool: t.odd, retry: {max_attempts: 1}}]}")
    run = await rig.work_until(await rig.start("odd"))
    assert (run["status"], run["reason"]) == ("failed", "attempts_exhausted")
    assert run["error"]["message"].startswith("no file ")


async def test_a_tool_that_this_worker_does_not_have_is_tried_again(rig: Rig, hold: Hold) -> None:
    await rig.apply("{name: w, steps: [{id: a, tool: t.later, retry: {base_delay: 1s}}]}")
    rig.clock.freeze()
    run_id = await rig.start("w")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
    assert "INTERLOCK_TOOLS" in (await rig.run(run_id))["step"]["a"]["last_error"]["message"]

    @rig.tool("t.later")
    async def later() -> str:
        return "here now"

    rig.clock.advance(5)
    await rig.sweep()
    run = await rig.work_until(run_id)
    assert (run["status"], run["result"], run["step"]["a"]["attempt"]) == ("succeeded", "here now", 2)


async def test_a_slow_steps_start_is_written_before_what_follows_it(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The started entry is being written while the step ends: the journal still has no gap."""
    monkeypatch.setattr(worker, "_SLOW_STEP_SECONDS", 0.01)
    real = batch_committer.commit

    async def delayed(tx: Any, changes: list[RunChange], *args: Any) -> Any:
        if any(e.event == "claim" for change in changes for e in change.entries):
            hold.release.set()
            await asyncio.sleep(0.1)  # without waiting for this, the next write would overtake it
        return await real(tx, changes, *args)

    monkeypatch.setattr(batch_committer, "commit", delayed)
    await rig.apply(ONE)
    run = await rig.work_until(await rig.start("one"))
    assert run["status"] == "succeeded"
    rows = await rig.sql("SELECT seq, event FROM interlock.journal_entry ORDER BY seq")
    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["event"] for row in rows] == ["create", "start", "claim", "succeed", "succeed"]


async def test_a_lock_that_is_held_too_long_does_not_end_the_worker(url: str, rig: Rig, hold: Hold) -> None:
    """A long transaction that locks a run's row delays that run and no other."""
    await rig.apply(ONE)
    run_id = await rig.start("one")
    rig.settings.lock_timeout_seconds = 0.05
    other: Any = await asyncpg.connect(url)
    try:
        async with rig.worker():
            await hold.inside()
            transaction = other.transaction()
            await transaction.start()
            await other.execute("SELECT FROM interlock.run WHERE id = $1 FOR UPDATE", run_id)
            hold.release.set()
            await hold.left.wait()
            # Seen waiting, then seen waiting again after its lock time-out.
            pids: set[tuple[int, Any]] = set()
            async with asyncio.timeout(10):
                while len(pids) < 2:
                    for row in await rig.sql(
                        "SELECT pid, query_start FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                    ):
                        pids.add((row["pid"], row["query_start"]))
            await transaction.rollback()
            assert (await rig.until(run_id))["status"] == "succeeded"
    finally:
        await other.close()


async def test_a_run_whose_driver_breaks_is_taken_up_again(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new version cannot load the workflow, or the driver has a bug: the worker must not hold the run for ever."""
    hold.release.set()
    real, broken = Worker.plan_of, []

    async def plan_of(self: Worker, row: Any) -> Any:
        if not broken:
            broken.append(row)
            raise RuntimeError("a bug")
        return await real(self, row)

    monkeypatch.setattr(Worker, "plan_of", plan_of)
    await rig.apply(ONE)
    async with rig.worker():
        assert (await rig.until(await rig.start("one"), seconds=10))["status"] == "succeeded"
