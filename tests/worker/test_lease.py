"""A worker never acts after its lease, and a blocking tool costs no other run its lease (reliability V2, V3, V6)."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
import structlog

from interlock.engine.queueing import leases, workers
from interlock.engine.queueing.leases import reclaim_lost
from interlock.ids import uuid7
from interlock.lifecycle import WorkerEvent
from interlock.store.pool import Database
from interlock.telemetry import metrics
from interlock.tools import Context
from interlock.worker import heartbeat
from interlock.worker.claimer import SlowStart
from interlock.worker.crash_quarantine import Trials, give_way
from interlock.worker.local_lease import Lapsed, LocalLease
from interlock.worker.pulse import Pulse
from interlock.worker.worker import Worker
from tests.rig import Hold, Rig

LEASE_SECONDS = 2.0
HOLD = "{name: hold, steps: [{id: a, tool: t.hold}, {id: b, tool: t.after}]}"


@pytest.fixture
def rig(rig: Rig) -> Rig:
    rig.settings = rig.settings.model_copy(update={"lease_seconds": LEASE_SECONDS})
    return rig


class Line:
    """The link between heartbeats and the database. After a cut, no heartbeat is acknowledged any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._beat, self.last_sent = leases.heartbeat, 0.0
        self.is_cut = False
        monkeypatch.setattr(leases, "heartbeat", self)

    async def __call__(self, *args: Any) -> Any:
        if self.is_cut:
            raise ConnectionError("cut")
        sent = time.monotonic()
        orders = await self._beat(*args)
        self.last_sent = sent
        return orders

    def cut(self) -> None:
        self.is_cut = True


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(monkeypatch)


@asynccontextmanager
async def working(rig: Rig, **more: Any) -> AsyncIterator[Worker]:
    stop = asyncio.Event()
    worker = Worker(rig.database, rig.settings, tools=rig.tools, capacity=30, **more)
    task = asyncio.create_task(worker.run(stop))
    try:
        yield worker
    finally:
        stop.set()
        await asyncio.wait_for(task, 30)


# ---------------------------------------------------------------- the local lease


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nothing_begins_in_the_last_quarter_of_a_lease() -> None:
    clock = Clock()
    lease = LocalLease(clock)
    lease.renew(sent=0.0, seconds=8.0)
    clock.now = 5.9
    assert not lease.is_over and lease.remaining() == pytest.approx(0.1)
    clock.now = 6.0
    assert lease.is_over and lease.remaining() == 0
    with pytest.raises(Lapsed), lease.acting(UUID(int=1), "s", "t.do"):
        raise AssertionError("it began")
    lease.renew(sent=6.0, seconds=8.0)
    assert not lease.is_over


def test_a_lease_that_lapsed_stays_so_and_threads_are_told() -> None:
    lease, stop = LocalLease(Clock()), threading.Event()
    with lease.acting(UUID(int=1), "s", "t.do", stop):
        lease.lapse()
        assert stop.is_set()
        assert [call.step for call in lease.still_acting()] == ["s"]
        lease.renew(sent=0.0, seconds=8.0)
        assert lease.is_over
    assert lease.still_acting() == []


# ---------------------------------------------------------------- a worker that cannot reach the database


async def test_a_tool_is_canceled_before_the_lease_of_a_cut_off_worker_ends(rig: Rig, line: Line) -> None:
    hold, after = Hold(), Hold()
    rig.tool("t.hold", writes=True, risk="low", idempotent=False)(hold.__call__)
    rig.tool("t.after")(after.__call__)
    await rig.apply(HOLD)
    await rig.start("hold")
    async with working(rig) as worker:
        await hold.inside()
        first = worker.me
        line.cut()
        await asyncio.wait_for(hold.left.wait(), 20)
        assert hold.interrupted
        assert time.monotonic() - line.last_sent < LEASE_SECONDS, "the tool went on after the lease"
        line.is_cut = False
        async with asyncio.timeout(20):
            while worker.me == first:  # noqa: ASYNC110 — it registers again under a new id
                await asyncio.sleep(0.01)
        assert hold.entries == 1 and after.entries == 0


async def test_no_step_begins_after_the_local_lease(rig: Rig, line: Line) -> None:
    """V3: a slow worker started the next step of three runs, beside their new holder."""
    after, begun = Hold(), []
    after.release.set()

    @rig.tool("t.hold")
    async def hold() -> None:
        line.cut()
        worker.shop.lease.lapse()  # the lease is over, and the event loop has not noticed yet

    @rig.tool("t.after")
    async def then() -> None:
        begun.append(worker.me)

    await rig.apply(HOLD)
    run_id = await rig.start("hold")
    async with working(rig) as worker:
        async with asyncio.timeout(20):
            while worker.me == leases.UNREGISTERED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first = worker.me
        async with asyncio.timeout(20):
            while worker.me == first:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert begun == []
        line.is_cut = False
        await rig.sql(
            "UPDATE interlock.worker SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE id = $1", first.id
        )
        await rig.sweep()
        assert (await rig.until(run_id))["status"] == "succeeded"
        assert begun == [worker.me]


async def test_a_process_ends_before_the_lease_if_a_thread_cannot_be_stopped(rig: Rig, line: Line) -> None:
    entered, release, ended = threading.Event(), threading.Event(), asyncio.Event()
    loop, when = asyncio.get_running_loop(), []

    def end_process() -> None:
        when.append(time.monotonic())
        loop.call_soon_threadsafe(ended.set)

    @rig.tool("t.hold", writes=True, risk="low", idempotent=False)
    def hold() -> None:
        entered.set()
        release.wait(20)

    rig.tool("t.after")(Hold().__call__)
    await rig.apply(HOLD)
    await rig.start("hold")
    async with working(rig, end_process=end_process):
        await asyncio.to_thread(entered.wait, 20)
        line.cut()
        await asyncio.wait_for(ended.wait(), 20)
        assert when[0] - line.last_sent < LEASE_SECONDS
        release.set()


# ---------------------------------------------------------------- a tool's information


async def test_a_tool_gets_a_token_that_grows_with_each_holder_and_a_deadline(rig: Rig) -> None:
    seen = []

    @rig.tool("t.hold", timeout=1000)
    async def hold(ctx: Context) -> None:
        seen.append((ctx.fencing_token, ctx.remaining(), ctx.deadline))

    @rig.tool("t.after", timeout=0.5)
    async def after(ctx: Context) -> None:
        seen.append((ctx.fencing_token, ctx.remaining(), ctx.deadline))

    await rig.apply(HOLD)
    run_id = await rig.start("hold")
    await rig.claim_by_hand()
    rig.clock.advance(6)
    await rig.sweep()
    assert (await rig.work_until(run_id))["status"] == "succeeded"
    (first, leased, at), (second, timed, _) = seen
    assert first == second == 2, "the first holder had token 1"
    assert 0 < leased <= 0.75 * LEASE_SECONDS and at is not None
    assert 0 < timed <= 0.5


# ---------------------------------------------------------------- a blocked event loop


async def test_a_tool_that_blocks_the_event_loop_costs_no_other_write_its_lease(rig: Rig) -> None:
    """V6: 20 of 20 other writes of the worker were in doubt. The log names the blocking step."""
    hold, entries = Hold(), 0
    all_in, sender = asyncio.Event(), asyncio.get_running_loop()
    named = metrics.loop_blocked._value.get()

    @rig.tool("t.once", writes=True, risk="low", idempotent=False)
    async def once() -> None:
        nonlocal entries
        entries += 1
        if entries == 20:
            all_in.set()
        await hold.release.wait()

    @rig.tool("t.block")
    async def block() -> None:
        assert sender is asyncio.get_running_loop()
        watch = threading.Thread(target=asyncio.run, args=[_watch(rig, named)])
        watch.start()
        watch.join(30)

    await rig.apply("{name: once, steps: [{id: a, tool: t.once}]}")
    await rig.apply("{name: block, steps: [{id: a, tool: t.block}]}")
    runs = [await rig.start("once") for _ in range(20)]
    async with working(rig):
        await asyncio.wait_for(all_in.wait(), 20)
        blocking = await rig.start("block")
        assert (await rig.until(blocking))["status"] == "succeeded"
        await rig.sweep()
        hold.release.set()
        states = [(await rig.until(run))["status"] for run in runs]
    assert states == ["succeeded"] * 20 and entries == 20
    assert metrics.loop_blocked._value.get() > named


async def _watch(rig: Rig, named: float) -> None:
    """In another thread: block until the lease was renewed several times, or until it ended and others have the run."""
    database = await Database(rig.database.url, rig.settings, size=1).open()
    try:
        beats, began = set(), time.monotonic()
        while time.monotonic() - began < 1.5 * LEASE_SECONDS or metrics.loop_blocked._value.get() == named:
            assert time.monotonic() - began < 20
            (row,) = await database.pool.fetch(
                "SELECT heartbeat_at FROM interlock.worker WHERE stopped_at IS NULL LIMIT 1"
            )
            beats.add(row["heartbeat_at"])
            await asyncio.sleep(0.05)
        await reclaim_lost(database)
        assert len(beats) > 3, beats
    finally:
        await database.close()


async def test_the_step_that_blocks_is_found_in_the_stack(rig: Rig) -> None:
    found = []

    @rig.tool("t.block")
    async def block(ctx: Context) -> None:
        import sys

        def look(thread: int) -> None:
            found.append(heartbeat.calling_step(sys._current_frames()[thread]))

        looking = threading.Thread(target=look, args=[threading.get_ident()])
        looking.start()
        looking.join()

    await rig.apply("{name: block, steps: [{id: blocking, tool: t.block}]}")
    run_id = await rig.start("block")
    await rig.work_until(run_id)
    assert [(call.context.run_id, call.context.step) for call in found] == [(run_id, "blocking")]


async def test_a_loop_that_stays_blocked_ends_the_process(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MOST_LEASES_BLOCKED", 1)
    ended = threading.Event()

    @rig.tool("t.block")
    async def block() -> None:
        ended.wait(20)

    await rig.apply("{name: block, steps: [{id: a, tool: t.block}]}")
    run_id = await rig.start("block")
    async with working(rig, end_process=ended.set):
        assert (await rig.until(run_id, seconds=40))["status"] == "succeeded"
    assert ended.is_set()


# ---------------------------------------------------------------- after a loss


def test_a_slow_start_doubles_until_the_capacity() -> None:
    clock = Clock()
    slow = SlowStart(clock)
    assert slow.most(100) == 100
    slow.begin()
    allowed = []
    for clock.now in (0.0, 0.9, 1.0, 2.0, 4.0, 5.0, 5.1):
        allowed.append(slow.most(100))
    assert allowed == [4, 4, 8, 16, 64, 100, 100] and not slow.is_on


async def test_a_worker_after_a_loss_takes_few_runs_first_and_all_in_the_end(rig: Rig) -> None:
    """A restart storm: each fresh worker took all runs at once, missed its heartbeats and lost them (reliability 5)."""
    hold = Hold()
    rig.tool("t.hold")(hold.__call__)
    await rig.apply("{name: hold, steps: [{id: a, tool: t.hold}]}")
    for _ in range(30):
        await rig.start("hold")
    held: set[int] = set()
    async with working(rig, after_loss=True) as worker:
        async with asyncio.timeout(30):
            while len(worker.drivers) < 25:
                held.add(len(worker.drivers))
                await asyncio.sleep(0.01)
        hold.release.set()
    grown = sorted(held - {0})
    assert grown[0] <= 4 and len(grown) >= 3, grown


class Suspect:
    """A run that waits for its trial."""

    def __init__(self) -> None:
        self.wake, self.has_commands, self.worker = asyncio.Event(), False, self

    def should_release(self, _run: Any) -> bool:
        return False


async def test_suspect_runs_are_begun_one_then_two_then_four_at_a_time() -> None:
    trials, suspects = Trials(), [Suspect() for _ in range(16)]
    standing: list[Any] = []

    async def stand(run: Any) -> None:
        await trials.wait(run, alone=False)
        trials.begin(run, alone=False)
        standing.append(run)

    async with asyncio.TaskGroup() as group:
        for run in suspects:
            group.create_task(stand(run))
        grown = []
        while len(standing) < 16 or grown[-1]:
            for _ in range(3):
                await asyncio.sleep(0)
            at_once = [run for run in standing if trials.is_standing(run)]
            grown.append(len(at_once))
            for run in at_once[:1]:
                trials.end(run)
                for suspect in suspects:
                    suspect.wake.set()
    assert grown[:3] == [1, 2, 4] and max(grown) <= 16
    assert trials.has_room(alone=True)
    trials.begin(suspects[0], alone=False)  # type: ignore[arg-type]
    assert not trials.has_room(alone=False), "the next loss begins with one again"


async def test_a_step_that_lost_two_workers_is_begun_when_no_other_suspect_is_at_work() -> None:
    trials = Trials()
    first, alone, third = Suspect(), Suspect(), Suspect()
    trials.begin(first, alone=False)  # type: ignore[arg-type]
    assert not trials.has_room(alone=True)
    trials.end(first)  # type: ignore[arg-type]
    trials.begin(alone, alone=True)  # type: ignore[arg-type]
    assert not trials.has_room(alone=False) and not trials.has_room(alone=True)
    third.worker.trials = trials  # type: ignore[attr-defined]
    giving_way = asyncio.create_task(give_way(third))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not giving_way.done()
    trials.end(alone)  # type: ignore[arg-type]
    third.wake.set()
    await giving_way


# ---------------------------------------------------------------- when other workers get its runs


async def test_runs_of_a_terminated_worker_wait_until_its_process_cannot_act(rig: Rig) -> None:
    """V2: another worker reconciled an effect that the first one was still about to make."""
    await rig.apply(HOLD)
    rig.clock.freeze()
    run_id = await rig.start("hold")
    me, _ = await rig.claim_by_hand(lease_seconds=5)
    await rig.database.run_in_transaction(lambda tx: workers.order(tx, "t", me.id, WorkerEvent.TERMINATE))
    rig.clock.advance(4.9)
    await rig.sweep()
    assert await _holder(rig, run_id) == me.id
    rig.clock.advance(0.1)
    await rig.sweep()
    assert await _holder(rig, run_id) is None


async def test_runs_of_a_process_that_is_known_to_be_dead_wait_for_nothing(rig: Rig) -> None:
    await rig.apply(HOLD)
    rig.clock.freeze()
    run_id = await rig.start("hold")
    me, _ = await rig.claim_by_hand(lease_seconds=5)
    await workers.bury(rig.database, me.id, "supervisor", "killed by signal 9")
    await rig.sweep()
    assert await _holder(rig, run_id) is None


async def test_a_draining_worker_keeps_the_run_of_a_thread_that_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another worker would reconcile the effect before the thread has made it."""
    monkeypatch.setattr("interlock.worker.thread_runner._THREAD_GRACE_SECONDS", 0.1)
    rig.settings.drain_seconds = 0.1
    entered, release = threading.Event(), threading.Event()

    @rig.tool("t.hold", writes=True, risk="low", idempotent=False)
    def hold() -> None:
        entered.set()
        release.wait(20)

    rig.tool("t.after")(Hold().__call__)
    await rig.apply(HOLD)
    run_id = await rig.start("hold")
    try:
        async with working(rig) as worker:
            await asyncio.to_thread(entered.wait, 20)
        assert await _holder(rig, run_id) == worker.me.id
    finally:
        release.set()


async def test_a_doubt_about_a_call_that_still_runs_cannot_be_settled_yet(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person saw that nothing had happened, and then the thread made the effect."""
    monkeypatch.setattr("interlock.worker.thread_runner._THREAD_GRACE_SECONDS", 0.05)
    release = threading.Event()

    @rig.tool("t.hold", writes=True, risk="low", idempotent=False, timeout=0.1)
    def hold() -> None:
        release.wait(30)

    rig.tool("t.after")(Hold().__call__)
    await rig.apply(HOLD)
    run_id = await rig.start("hold")
    judge = rig.http(await rig.key("judge", "approver"))
    try:
        async with working(rig):
            await rig.until(run_id, "waiting_approval")
            (receipt,) = await rig.sql("SELECT id FROM interlock.receipt WHERE status = 'in_doubt'")
            path, body = f"/api/receipts/{receipt['id']}/resolve", {"outcome": "did_not_happen"}
            early = await judge.post(path, json=body)
            assert (early.status_code, early.json()["code"]) == (409, "EFFECT_STILL_RUNNING")
            release.set()
            async with asyncio.timeout(20):
                while (answer := await judge.post(path, json=body)).status_code == 409:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert answer.is_success, answer.text
    finally:
        release.set()


async def _holder(rig: Rig, run_id: UUID) -> Any:
    (row,) = await rig.sql("SELECT lease_worker FROM interlock.run WHERE id = $1", run_id)
    return row["lease_worker"]


def test_a_heartbeat_that_another_process_sent_renews_the_lease() -> None:
    clock, pulse = Clock(), Pulse.make()
    lease = LocalLease(clock, second=pulse.second.get)
    lease.renew(100.0, 10.0)
    clock.now = 108.0
    assert lease.is_over and not lease.remaining()
    Pulse(pulse.number).second.set(107.0)
    assert not lease.is_over and lease.remaining() == pytest.approx(6.5)
    lease.renew(101.0, 10.0)
    assert lease.remaining() == pytest.approx(6.5), "an answer that comes late shortens nothing"
    lease.lapse()
    pulse.second.set(108.0)
    assert lease.is_over, "a lease that has lapsed stays so"
    pulse.close()


def test_calls_that_ended_lately_are_known_by_name() -> None:
    clock = Clock()
    lease, run = LocalLease(clock), uuid7()
    with lease.acting(run, "a", "t.short"):
        clock.now += 1
    with lease.acting(run, "b", "t.long"):
        assert [call.tool for call in lease.acted_since(clock.now)] == ["t.long", "t.short"]
        assert [call.tool for call in lease.acted_since(clock.now + 1)] == ["t.long"]


async def test_a_worker_that_comes_too_late_for_its_place_ends_without_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor gave up waiting for the process: that is not a defect of the worker (reliability 4)."""
    place = uuid7()
    await workers.create(
        rig.database, "test", workers.Terms(1, ("default",), None), worker_id=place, host="here",
        name="late", lease_seconds=LEASE_SECONDS,
    )  # fmt: skip
    await workers.bury(rig.database, place, "test", "it did not start in time")
    logged = structlog.testing.CapturingLogger()
    monkeypatch.setattr("interlock.worker.worker.log", logged)
    await Worker(rig.database, rig.settings, tools=rig.tools, adopt=place).run(asyncio.Event())
    assert [(call.method_name, call.args) for call in logged.calls] == [("warning", ("worker_came_late",))]
    assert "was stopped before its process was there" in logged.calls[0].kwargs["detail"]
