"""Between intent and settle a worker may die at any line: no effect happens twice, and no uncertain effect stays
unreported.

Three kinds of tool: one that repeats safely with the same key, one whose system can be asked, and one that is
neither.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from tests.governed.conftest import Crash, Shop, kill, lose, notice
from tests.rig import Rig

from interlock.engine.effects import receipts as receipts_module
from interlock.engine.queueing import leases
from interlock.engine.writing import journal_writer as append_module
from interlock.lifecycle import WorkerEvent, WorkerState
from interlock.settings import Settings
from interlock.tools import Context, DidNotHappen, Happened, Registry
from interlock.worker import batch_committer, executor, receipts, run_driver
from interlock.worker.admission import Admission
from interlock.worker.leased_run import LeasedRun
from interlock.worker.run_driver import Driver
from interlock.worker.step_recorder import StepRecorder
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


@contextmanager
def tracing(on_line: Any) -> Iterator[None]:
    """Call `on_line(frame)` before every executed line, in frames for which `on_line` did not return None."""

    def local(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            on_line(frame)
        return local

    def every_call(frame: Any, event: str, arg: Any) -> Any:
        return local if frame.f_code in WATCHED else None

    def switch_on() -> None:
        sys.settrace(every_call)

    on_line.switch_on = switch_on
    before = sys.gettrace()
    switch_on()
    try:
        yield
    finally:
        sys.settrace(before)


def _codes(*functions: Any) -> set[Any]:
    return {function.__code__ for function in functions}


DRIVING = _codes(
    Admission._may_write,
    receipts.declare_intent,
    Admission.attempt,
    LeasedRun.save,
    LeasedRun._take_beside,
    LeasedRun._write,
    Driver._do_alone,
    Driver._settle,
    StepRecorder.settle,
    receipts.complete_receipt,
    LeasedRun.release_lease,
    Driver._leave,
    executor.execute,
    executor.attempt,
    executor.perform,
    executor.fill,
    executor.finish,
    executor.keep,
)
FLUSHING = _codes(
    batch_committer.Flusher._flush,
    batch_committer.Flusher._append_whatever_happens,
    append_module.append,
    append_module._append,
    append_module._persist_side_effects,
    append_module._declare_intents,
    receipts_module.declare_intents,
    receipts_module.complete_receipts,
)
WATCHED: set[Any] = set()


def _run_of(frame: Any) -> UUID | None:
    """Return the run of this line."""
    here = frame.f_locals
    me = here.get("self")
    for run in (me, here.get("run"), getattr(me, "run", None), getattr(me, "_run", None)):
        if isinstance(run, LeasedRun):
            return run.lease.run_id
    if (context := here.get("context") or getattr(here.get("call"), "context", None)) is not None:
        run_id: UUID = context.run_id
        return run_id
    return None


class CrashAt:
    """Each run's driver dies at the line with the run's number, counted from the gate."""

    def __init__(self, lines: dict[UUID, int]) -> None:
        self.lines = lines
        self.seen: Counter[UUID] = Counter()
        self.where: dict[UUID, str] = {}
        self.switch_on: Any = None

    def __call__(self, frame: Any) -> None:
        run_id = _run_of(frame)
        if run_id is None or run_id not in self.lines or run_id in self.where:
            return
        self.seen[run_id] += 1
        if self.seen[run_id] == self.lines[run_id]:
            self.where[run_id] = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise Crash


async def _drive_to_their_deaths(rig: Rig, crash: CrashAt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a worker and let `crash` interrupt its runs. Afterwards the worker is gone, and the others know."""
    waiting = set(crash.lines)
    ended = asyncio.Event()
    drive = Driver.drive

    async def until_death(self: Driver) -> None:
        try:
            await drive(self)
        except Crash:
            crash.switch_on()  # Python stops tracing where a trace function raises
        finally:
            waiting.discard(self.run.lease.run_id)
            if not waiting:
                ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "drive", until_death)
        worker = Worker(rig.database, rig.settings, tools=rig.tools, capacity=len(crash.lines) + 1)
        with tracing(crash):
            task = asyncio.create_task(worker.run(asyncio.Event()))
            await asyncio.wait_for(ended.wait(), 60)
        await lose(rig, task)


async def _lines_of_a_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> int:
    run_id = await rig.start("pay", {"amount": 0})
    crash = CrashAt({run_id: sys.maxsize})
    await _drive_to_their_deaths(rig, crash, monkeypatch)
    assert (await rig.run(run_id))["status"] == "succeeded"
    return crash.seen[run_id]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_dies_at_any_line_from_gate_to_settle_repeats_no_effect(
    kind: str, shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WATCHED", DRIVING)
    bank = Bank(rig)
    await rig.apply(flow(kind))
    lines = await _lines_of_a_run(rig, monkeypatch)
    assert lines > 60, "the trace sees the way from gate to settle"
    crash = CrashAt({await rig.start("pay", {"amount": n}): n for n in range(1, lines + 1)})
    await _drive_to_their_deaths(rig, crash, monkeypatch)
    assert len(crash.where) == lines, "every run died at its line"

    doubtful = []
    async with rig.worker(capacity=200):
        for run_id in crash.lines:
            run = await rig.until(run_id, "waiting_approval")
            place = crash.where[run_id]
            assert bank.times(run_id) <= 1, f"done twice after a crash at {place}"
            if run["status"] == "waiting_approval":
                doubtful.append(run_id)
                assert kind == "neither", place
            else:
                assert (run["status"], run["result"]) == ("succeeded", {"paid": crash.lines[run_id]}), (place, run)
        assert bool(doubtful) == (kind == "neither")

        # A person investigates the rest and reports the truth.
        finder = await shop.person("finder")
        for run_id in doubtful:
            question = await shop.question(run_id)
            assert (question["kind"], question["tier"]) == ("in_doubt", "high")
            happened = bank.times(run_id) == 1
            amount = crash.lines[run_id]
            said = {"outcome": "happened", "output": {"paid": amount}} if happened else {"outcome": "did_not_happen"}
            status, _ = await finder.post(f"/api/receipts/{question['receipt_id']}/resolve", said)
            assert status == 200
        for run_id in doubtful:
            run = await rig.until(run_id)
            assert (run["status"], run["result"]) == ("succeeded", {"paid": crash.lines[run_id]})
    for run_id in crash.lines:
        assert bank.times(run_id) == 1, crash.where[run_id]
        assert len(bank.keys[run_id]) == 1, "the same effect always has the same key"
        receipts = await rig.sql("SELECT status FROM interlock.receipt WHERE run_id = $1", run_id)
        assert [r["status"] for r in receipts] == ["succeeded"], crash.where[run_id]


class CrashOfAll(CrashAt):
    """The whole worker dies at the n-th line of its commits of receipts."""

    def __init__(self, line: int) -> None:
        super().__init__({})
        self.line, self.count, self.place = line, 0, ""

    def __call__(self, frame: Any) -> None:
        writes = frame.f_locals.get("writes") or [write for write, _ in frame.f_locals.get("batch", ())]
        if frame.f_code in _codes(append_module.append, batch_committer.Flusher._flush) and not any(
            w.beside for w in writes
        ):
            return
        self.count += 1
        if self.count == self.line:
            self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise Crash


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_dies_at_any_line_of_a_commit_repeats_no_effect(
    kind: str, shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WATCHED", FLUSHING)
    bank = Bank(rig)
    await rig.apply(flow(kind))
    places, runs = {}, []
    # Every third line for each kind of tool, so that the three kinds together cover all lines.
    for line in range(1 + KINDS.index(kind), 400, 3):
        run_id = await rig.start("pay", {"amount": line})
        crash = CrashOfAll(line)
        with tracing(crash):
            task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
            watching = asyncio.create_task(rig.until(run_id, "waiting_approval"))
            await asyncio.wait([task, watching], return_when=asyncio.FIRST_COMPLETED)
        if not crash.place:
            await watching
        watching.cancel()
        await asyncio.wait([watching])
        await kill(rig, task)
        if not crash.place:
            break
        runs.append(run_id)
        places[run_id] = crash.place
    assert len(runs) > 8, "the trace sees the commits"
    await notice(rig)
    async with rig.worker():
        for run_id in runs:
            run = await rig.until(run_id, "waiting_approval")
            assert bank.times(run_id) <= 1, places[run_id]
            if run["status"] == "waiting_approval":
                assert kind == "neither", places[run_id]
                assert (await shop.question(run_id))["kind"] == "in_doubt"
            else:
                assert run["status"] == "succeeded", (places[run_id], run["error"])
                assert bank.times(run_id) == 1


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
        await worker.flusher.put(append_module.Write(worker.drivers[run_id].run.lease, []))
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
    await worker.flusher.put(append_module.Write(worker.drivers[run_id].run.lease, []))
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
    append = append_module.append

    async def committed_but_not_heard(database: Any, connection: Any, me: Any, writes: Any) -> Any:
        answers = await append(database, connection, me, writes)
        if not broken and any(write.beside.intents for write in writes):
            broken.append(True)
            raise ConnectionResetError
        return answers

    monkeypatch.setattr(batch_committer, "append", committed_but_not_heard)
    second = await rig.start("pay", {"amount": 1})
    run = await shop.ended(second)
    assert broken and (run["status"], run["result"]) == ("succeeded", "paid")
    assert done == [first]
