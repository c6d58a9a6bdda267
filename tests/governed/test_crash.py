"""Between intent and settle a worker may die at any line: no effect happens twice, and no uncertain effect stays
unreported.

Three kinds of tool: one that repeats safely with the same key, one whose system can be asked, and one that is
neither.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.governed.conftest import Crash, Shop, kill, lose, notice
from tests.rig import Rig

from interlock.engine.effects import receipts as effect_receipts
from interlock.engine.queueing import leases
from interlock.engine.writing import commit, effects
from interlock.engine.writing.change import DeclareIntent, RunChange
from interlock.lifecycle import WorkerEvent, WorkerState
from interlock.settings import Settings
from interlock.tools import Context, DidNotHappen, Happened, Registry
from interlock.worker import (
    admission,
    batch_committer,
    executor,
    leased_run,
    receipts,
    run_driver,
    step_recorder,
)
from interlock.worker.leased_run import LeasedRun
from interlock.worker.run_driver import Driver
from interlock.worker.worker import Worker

KINDS = ("repeatable", "askable", "neither")


class Bank:
    """The payments, by tool. A tool that knows the key pays once, however often the worker calls it."""

    def __init__(self, rig: Rig) -> None:
        self.calls: Counter[UUID] = Counter()
        self.payments: list[tuple[UUID, str]] = []
        self.keys: dict[UUID, set[str]] = {}

        def paid(run_id: UUID) -> bool:
            return any(run == run_id for run, _ in self.payments)

        @rig.tool("bank.repeatable", writes=True, risk="low", idempotent=True)
        async def repeatable(ctx: Context, amount: int) -> dict[str, int]:
            self.note(ctx)
            if not paid(ctx.run_id):
                self.payments.append((ctx.run_id, ctx.idempotency_key))
            return {"paid": amount}

        async def ask(ctx: Context, amount: int) -> Happened | DidNotHappen:
            return Happened({"paid": amount}) if paid(ctx.run_id) else DidNotHappen()

        @rig.tool("bank.askable", writes=True, risk="low", reconcile=ask)
        async def askable(ctx: Context, amount: int) -> dict[str, int]:
            self.note(ctx)
            self.payments.append((ctx.run_id, ctx.idempotency_key))
            return {"paid": amount}

        @rig.tool("bank.neither", writes=True, risk="low")
        async def neither(ctx: Context, amount: int) -> dict[str, int]:
            self.note(ctx)
            self.payments.append((ctx.run_id, ctx.idempotency_key))
            return {"paid": amount}

    def note(self, ctx: Context) -> None:
        self.calls[ctx.run_id] += 1
        self.keys.setdefault(ctx.run_id, set()).add(ctx.idempotency_key)

    def times(self, run_id: UUID) -> int:
        return sum(run == run_id for run, _ in self.payments)


def flow(kind: str) -> str:
    # The amount is the run's own number, so that every run is a different effect.
    return f"""
name: pay
steps:
  - {{id: pay, tool: bank.{kind}, input: {{amount: "${{input.amount}}"}}}}
"""


# Every line of these modules may be the last one that a driver executes, or a committer.
DRIVING = (run_driver, admission, receipts, leased_run, executor, step_recorder, effects)
COMMITTING = (batch_committer, commit, effect_receipts)


@contextmanager
def tracing(on_line: Any, modules: tuple[Any, ...]) -> Iterator[None]:
    """Call `on_line(frame)` before every executed line of the modules."""
    watched = {module.__file__ for module in modules}

    def local(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            on_line(frame)
        return local

    def every_call(frame: Any, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename in watched else None

    def switch_on() -> None:
        sys.settrace(every_call)

    on_line.switch_on = switch_on
    before = sys.gettrace()
    switch_on()
    try:
        yield
    finally:
        sys.settrace(before)


def _place(frame: Any) -> str:
    return f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}"


# A line, and what was there when it was executed. The same line with the same things around it is the same death.
Moment = tuple[str, Any]


class CrashAt:
    """Each run's driver dies at its moment: when it first executes the line with a journal of that length."""

    def __init__(self, moments: Mapping[UUID, Moment | None]) -> None:
        self.moments = moments
        self.drivers: dict[asyncio.Task[Any] | None, Driver] = {}
        # The moments of each run, in their order.
        self.seen: dict[UUID, dict[Moment, None]] = {run_id: {} for run_id in moments}
        self.where: dict[UUID, Moment] = {}
        self.switch_on: Any = None

    def __call__(self, frame: Any) -> None:
        driver = self.drivers.get(asyncio.current_task())
        if driver is None or (run_id := driver.run.lease.run_id) not in self.moments or run_id in self.where:
            return
        journal = getattr(driver.run, "journal", None)
        moment = (_place(frame), None if journal is None else journal.seq)
        self.seen[run_id][moment] = None
        if moment == self.moments[run_id]:
            self.where[run_id] = moment
            raise Crash


async def drive_to_their_deaths(rig: Rig, crash: CrashAt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a worker and let `crash` interrupt its runs. Afterwards the worker is gone, and the others know."""
    waiting = set(crash.moments)
    ended = asyncio.Event()
    drive = Driver.drive

    async def until_death(self: Driver) -> None:
        crash.drivers[asyncio.current_task()] = self
        try:
            await drive(self)
        except Crash:
            crash.switch_on()  # Python stops tracing where a trace function raises
        finally:
            del crash.drivers[asyncio.current_task()]
            waiting.discard(self.run.lease.run_id)
            if not waiting:
                ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "drive", until_death)
        worker = Worker(rig.database, rig.settings, tools=rig.tools, capacity=len(crash.moments) + 1)
        with tracing(crash, DRIVING):
            task = asyncio.create_task(worker.run(asyncio.Event()))
            await asyncio.wait_for(ended.wait(), 60)
        await lose(rig, task)


async def moments_of_a_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, workflow: str, input: Any = None, ending: str = "succeeded"
) -> list[Moment]:
    """Return the moments at which the driver of such a run can die, in their order."""
    run_id = await rig.start(workflow, input)
    crash = CrashAt({run_id: None})
    rig.clock.freeze()
    await drive_to_their_deaths(rig, crash, monkeypatch)
    assert (await rig.run(run_id))["status"] == ending
    return list(crash.seen[run_id])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_dies_at_any_line_from_gate_to_settle_repeats_no_effect(
    kind: str, shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = Bank(rig)
    await rig.apply(flow(kind))
    moments = await moments_of_a_run(rig, monkeypatch, "pay", {"amount": 0})
    assert len(moments) > 200, "the trace sees the way from the claim to the release"
    runs = {await rig.start("pay", {"amount": n}): n for n in range(1, len(moments) + 1)}
    crash = CrashAt(dict(zip(runs, moments, strict=True)))
    await drive_to_their_deaths(rig, crash, monkeypatch)
    assert crash.where == crash.moments, "every run died at its line"

    doubtful = []
    async with rig.worker(capacity=200):
        for run_id in runs:
            run = await rig.until(run_id, "waiting_approval")
            place = crash.where[run_id]
            assert bank.times(run_id) <= 1, f"done twice after a crash at {place}"
            if run["status"] == "waiting_approval":
                doubtful.append(run_id)
                assert kind == "neither", place
            else:
                assert (run["status"], run["result"]) == ("succeeded", {"paid": runs[run_id]}), (place, run)
        assert bool(doubtful) == (kind == "neither")

        # A person investigates the rest and reports the truth.
        finder = await shop.person("finder")
        for run_id in doubtful:
            question = await shop.question(run_id)
            assert (question["kind"], question["tier"]) == ("in_doubt", "high")
            happened = bank.times(run_id) == 1
            amount = runs[run_id]
            said = {"outcome": "happened", "output": {"paid": amount}} if happened else {"outcome": "did_not_happen"}
            status, _ = await finder.post(f"/api/receipts/{question['receipt_id']}/resolve", said)
            assert status == 200
        for run_id in doubtful:
            run = await rig.until(run_id)
            assert (run["status"], run["result"]) == ("succeeded", {"paid": runs[run_id]})
    for run_id in runs:
        assert bank.times(run_id) == 1, crash.where[run_id]
        assert len(bank.keys[run_id]) == 1, "the same effect always has the same key"
        receipts = await rig.sql("SELECT status FROM interlock.receipt WHERE run_id = $1", run_id)
        assert [r["status"] for r in receipts] == ["succeeded"], crash.where[run_id]


class CrashOfAll:
    """The whole worker dies at its moment: when it first executes the line while it commits such effects."""

    def __init__(self, moment: Moment | None = None) -> None:
        self.moment, self.is_dead = moment, False
        # All moments in their order.
        self.seen: dict[Moment, None] = {}

    def __call__(self, frame: Any) -> None:
        if not (kinds := _effects_committed(frame)):
            return
        moment = (_place(frame), kinds)
        self.seen[moment] = None
        if moment == self.moment and not self.is_dead:
            self.is_dead = True
            raise Crash


def _effects_committed(frame: Any) -> tuple[str, ...]:
    """Return the kinds of the effects in the batch that the code of this line commits."""
    while frame is not None and frame.f_code is not batch_committer.Flusher._commit_forever.__code__:
        frame = frame.f_back
    batch = frame.f_locals.get("batch", ()) if frame is not None else ()
    return tuple(sorted({type(effect).__name__ for change, _ in batch for effect in change.effects}))


async def _work_to_its_death(rig: Rig, run_id: UUID, crash: CrashOfAll) -> None:
    """Run a worker until `crash` ends it or the run has ended. Afterwards the worker is gone."""
    worker = Worker(rig.database, rig.settings, tools=rig.tools)

    async def until_ended() -> None:
        await rig.until(run_id, "waiting_approval")
        await worker.idle()

    with tracing(crash, COMMITTING):
        task = asyncio.create_task(worker.run(asyncio.Event()))
        watching = asyncio.create_task(until_ended())
        await asyncio.wait([task, watching], return_when=asyncio.FIRST_COMPLETED)
    if not crash.is_dead:
        await watching
    watching.cancel()
    await asyncio.wait([watching])
    await kill(rig, task)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_dies_at_any_line_of_a_commit_repeats_no_effect(kind: str, shop: Shop, rig: Rig) -> None:
    bank = Bank(rig)
    await rig.apply(flow(kind))
    probe = CrashOfAll()
    await _work_to_its_death(rig, await rig.start("pay", {"amount": 0}), probe)
    moments: dict[UUID, Moment] = {}
    # Every third line for each kind of tool, so that the three kinds together cover all lines.
    for moment in list(probe.seen)[KINDS.index(kind) :: 3]:
        run_id = await rig.start("pay", {"amount": len(moments) + 1})
        moments[run_id] = moment
        crash = CrashOfAll(moment)
        await _work_to_its_death(rig, run_id, crash)
        assert crash.is_dead, moment
    assert len(moments) > 40, "the trace sees the commits"
    await notice(rig)
    async with rig.worker():
        for run_id, moment in moments.items():
            run = await rig.until(run_id, "waiting_approval")
            assert bank.times(run_id) <= 1, moment
            if run["status"] == "waiting_approval":
                assert kind == "neither", moment
                assert (await shop.question(run_id))["kind"] == "in_doubt"
            else:
                assert run["status"] == "succeeded", (moment, run["error"])
                assert bank.times(run_id) == 1
                assert [receipt["status"] for receipt in await shop.receipts(run_id)] == ["succeeded"], moment


@contextmanager
def _holding_tool(rig: Rig, **options: Any) -> Iterator[tuple[asyncio.Event, list[str]]]:
    """A write that has made its effect and does not return."""
    began, done = asyncio.Event(), []

    @rig.tool("bank.slow", writes=True, risk="low", **options)
    async def slow(ctx: Context, amount: int) -> int:
        done.append(ctx.idempotency_key)
        if len(done) > 1:
            return amount
        began.set()
        await asyncio.Event().wait()
        return amount

    yield began, done


SLOW = flow("slow")


async def test_a_write_that_was_seen_to_be_slow_is_still_in_doubt_after_a_crash(shop: Shop, rig: Rig) -> None:
    with _holding_tool(rig) as (began, done):
        await rig.apply(SLOW)
        run_id = await rig.start("pay", {"amount": 1})
        worker = Worker(rig.database, rig.settings, tools=rig.tools)
        task = asyncio.create_task(worker.run(asyncio.Event()))
        await began.wait()
        worker.drivers[run_id].note_slow_steps(0.0)  # the worker itself does this after a third of a second
        await worker.flusher.put(RunChange(worker.drivers[run_id].run.lease, []))
        await lose(rig, task)
        question = await shop.held(run_id)
        assert (question["kind"], len(done)) == ("in_doubt", 1)


async def test_a_drained_worker_that_cuts_a_write_off_does_not_let_the_next_one_repeat_it(
    shop: Shop, rig: Rig, settings: Settings
) -> None:
    with _holding_tool(rig) as (began, done):
        await rig.apply(SLOW)
        run_id = await rig.start("pay", {"amount": 1})
        hasty = settings.model_copy(update={"drain_seconds": 0.05})
        stop = asyncio.Event()
        task = asyncio.create_task(Worker(rig.database, hasty, tools=rig.tools).run(stop))
        await began.wait()
        stop.set()
        await task
        question = await shop.held(run_id)
        assert (question["kind"], len(done)) == ("in_doubt", 1)


async def test_a_drained_idempotent_write_is_done_again_with_the_same_key(
    shop: Shop, rig: Rig, settings: Settings
) -> None:
    with _holding_tool(rig, idempotent=True) as (began, done):
        await rig.apply(SLOW)
        run_id = await rig.start("pay", {"amount": 1})
        hasty = settings.model_copy(update={"drain_seconds": 0.05})
        stop = asyncio.Event()
        task = asyncio.create_task(Worker(rig.database, hasty, tools=rig.tools).run(stop))
        await began.wait()
        stop.set()
        await task
        assert (await shop.ended(run_id))["status"] == "succeeded"
        assert len(done) == 2 and len(set(done)) == 1


@pytest.mark.parametrize("reconciles", [False, True])
async def test_a_write_that_was_cut_off_is_not_repeated_by_a_tool_that_would_do_another(
    reconciles: bool, shop: Shop, rig: Rig, settings: Settings
) -> None:
    async def ask(ctx: Context, amount: int, currency: str) -> DidNotHappen:
        return DidNotHappen()

    kind: Any = {"reconcile": ask} if reconciles else {"idempotent": True}
    with _holding_tool(rig, **kind) as (began, done):
        await rig.apply(SLOW)
        run_id = await rig.start("pay", {"amount": 1})
        hasty = settings.model_copy(update={"drain_seconds": 0.05})
        stop = asyncio.Event()
        task = asyncio.create_task(Worker(rig.database, hasty, tools=rig.tools).run(stop))
        await began.wait()
        stop.set()
        await task
        rig.tools = Registry()  # the registry of the next deployment

        @rig.tool("bank.slow", writes=True, risk="low", **kind)
        async def slow(ctx: Context, amount: int, currency: str = "EUR") -> int:
            done.append(ctx.idempotency_key)
            return amount

        question = await shop.held(run_id)
        assert (question["kind"], len(done)) == ("in_doubt", 1)
        assert "the tool was changed" in question["rationale"]["reason"]
        resolve = f"/api/receipts/{question['receipt_id']}/resolve"
        assert (await (await shop.person("one")).post(resolve, {"outcome": "did_not_happen"}))[0] == 200
        assert (await shop.ended(run_id))["status"] == "succeeded"
        assert len(done) == 2


async def test_a_write_that_was_cut_off_is_done_again_with_the_key_it_was_begun_with(
    shop: Shop, rig: Rig, settings: Settings
) -> None:
    with _holding_tool(rig, idempotent=True) as (began, done):
        await rig.apply(SLOW)
        run_id = await rig.start("pay", {"amount": 1})
        hasty = settings.model_copy(update={"drain_seconds": 0.05})
        stop = asyncio.Event()
        task = asyncio.create_task(Worker(rig.database, hasty, tools=rig.tools).run(stop))
        await began.wait()
        stop.set()
        await task
        before = rig.tools.find("bank.slow")
        assert before is not None
        rig.tools.put(replace(before, key="pay:{amount}"))  # another key for the same action
        assert (await shop.ended(run_id))["status"] == "succeeded"
        assert len(done) == 2 and len(set(done)) == 1


async def test_a_worker_without_the_tool_takes_no_write_past_the_gate(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    @rig.tool("bank.slow", writes=True, risk="high")
    async def slow(amount: int) -> None:
        shop.done.append("paid")

    await rig.apply(SLOW)
    run_id = await rig.start("pay", {"amount": 1})
    await rig.claim_by_hand()  # and lost before it started a step
    await notice(rig)
    other, ordered = Worker(rig.database, rig.settings, tools=Registry()), asyncio.Event()

    async def is_paused_meanwhile(run: LeasedRun) -> None:
        await leases.move_worker(rig.database, other.me.id, WorkerEvent.PAUSE)
        other.orders = leases.DesiredState(WorkerState.PAUSED)
        ordered.set()

    monkeypatch.setattr(run_driver, "await_quarantine_slot", is_paused_meanwhile)
    stop = asyncio.Event()
    task = asyncio.create_task(other.run(stop))
    await ordered.wait()
    await other.idle()
    stop.set()
    await task
    monkeypatch.undo()
    assert ((await shop.held(run_id))["kind"], shop.done) == ("action", [])


async def test_a_read_that_was_cut_off_and_is_a_write_now_passes_the_gate(shop: Shop, rig: Rig) -> None:
    began = asyncio.Event()

    @rig.tool("bank.slow")
    async def slow(amount: int) -> None:
        began.set()
        await asyncio.Event().wait()

    await rig.apply(SLOW)
    run_id = await rig.start("pay", {"amount": 1})
    worker = Worker(rig.database, rig.settings, tools=rig.tools)
    task = asyncio.create_task(worker.run(asyncio.Event()))
    await began.wait()
    worker.drivers[run_id].note_slow_steps(0.0)
    await worker.flusher.put(RunChange(worker.drivers[run_id].run.lease, []))
    await lose(rig, task)
    rig.tools = Registry()

    @rig.tool("bank.slow", writes=True, risk="med")
    async def writes(amount: int) -> int:
        shop.done.append("paid")
        return amount

    question = await shop.held(run_id)
    assert (question["kind"], shop.done) == ("action", [])
    await (await shop.person("one")).approve(question["id"])
    assert (await shop.ended(run_id))["result"] == 1
    assert shop.done == ["paid"] and [r["status"] for r in await shop.receipts(run_id)] == ["succeeded"]


async def test_a_write_whose_worker_is_lost_again_and_again_ends_in_doubt_not_as_undone(
    shop: Shop, rig: Rig, settings: Settings
) -> None:
    rig.settings = settings.model_copy(update={"max_reclaims": 1})
    began = asyncio.Event()

    async def ask(amount: int) -> DidNotHappen:
        return DidNotHappen()

    @rig.tool("bank.slow", writes=True, risk="low", reconcile=ask)
    async def slow(amount: int) -> None:
        began.set()
        await asyncio.Event().wait()

    await rig.apply(SLOW)
    run_id = await rig.start("pay", {"amount": 1})
    for _ in range(2):
        began.clear()
        task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
        await began.wait()
        await lose(rig, task)
    run = await shop.ended(run_id)
    assert (run["status"], run["reason"]) == ("failed", "orphaned")
    assert [r["status"] for r in await shop.receipts(run_id)] == ["in_doubt"]


async def test_a_commit_whose_answer_was_lost_still_knows_that_another_run_did_it(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[UUID] = []

    @rig.tool("bank.once", writes=True, risk="low", key="once:{amount}")
    async def once(ctx: Context, amount: int) -> str:
        done.append(ctx.run_id)
        return "paid"

    await rig.apply(flow("once"))
    first = await rig.start("pay", {"amount": 1})
    await shop.ended(first)
    broken: list[bool] = []
    commits = batch_committer.Flusher._commit

    async def committed_but_not_heard(flusher: Any, connection: Any, changes: list[RunChange], slot: Any) -> Any:
        results = await commits(flusher, connection, changes, slot)
        if not broken and any(isinstance(each, DeclareIntent) for change in changes for each in change.effects):
            broken.append(True)
            raise ConnectionResetError
        return results

    monkeypatch.setattr(batch_committer.Flusher, "_commit", committed_but_not_heard)
    second = await rig.start("pay", {"amount": 1})
    run = await shop.ended(second)
    assert broken and (run["status"], run["result"]) == ("succeeded", "paid")
    assert done == [first]
