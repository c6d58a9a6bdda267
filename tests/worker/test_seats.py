"""Seats: a run that starts alone goes straight to an idle worker, and none is lost on that path."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from interlock.engine.access.principal import Principal
from interlock.engine.queueing import leases, workers
from interlock.engine.runs import runs
from interlock.engine.writing.change import RunChange, WrittenRow
from interlock.engine.writing.commit import CommitResult
from interlock.errors import LeaseLost
from interlock.ids import QueueId, RunId, TenantId, uuid7
from interlock.lifecycle import RunState, WorkerEvent
from interlock.store.notify import READY, RUN_COMMAND
from interlock.store.pool import Tx
from interlock.store.records import DispatchSlot
from interlock.worker import batch_committer
from interlock.worker.claimer import Claimer
from interlock.worker.worker import Worker
from tests.rig import Hold, Rig
from tests.worker.test_drive import lane_is_clean

ONE = "{name: one, steps: [{id: a, tool: t.hold}]}"


@pytest.fixture
async def hold(rig: Rig) -> Hold:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay(value: Any = None) -> Any:
        await hold()
        return value

    await rig.apply(ONE)
    return hold


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> list[UUID]:
    """Return the runs that came through the queue."""
    real, found = leases.claim, []

    async def claim(*args: Any) -> Any:
        runs = await real(*args)
        found.extend(run.id for run in runs or ())
        return runs

    monkeypatch.setattr(leases, "claim", claim)
    return found


@pytest.fixture
def without_checks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the slow poll, which would hide a missed notification."""
    rig.settings.poll_seconds = 30.0

    async def nothing(_: Worker) -> None: ...

    monkeypatch.setattr(Worker, "_check", nothing)


async def start(rig: Rig, input: Any = None, who: Principal | None = None) -> UUID:
    who = who or rig.admin
    new = await runs.prepare(rig.plans, who, "one", input=input)
    assert await runs.start_once(rig.database, who, new, None, b"{}") is not None
    return new.id


async def seats(rig: Rig) -> set[UUID]:
    return {row["worker_id"] for row in await rig.sql("SELECT worker_id FROM interlock.dispatch_slot")}


async def until_seated(rig: Rig, *them: Worker) -> None:
    async with asyncio.timeout(20):
        while not {worker.me.id for worker in them} <= await seats(rig):  # noqa: ASYNC110 — only the rows show it
            await asyncio.sleep(0.005)


async def entered(hold: Hold, times: int) -> None:
    async with asyncio.timeout(20):
        while hold.entries < times:  # noqa: ASYNC110 — a counter has no event
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def free_worker(rig: Rig, capacity: int = 20, **serves: Any) -> AsyncIterator[Worker]:
    async with rig.worker(capacity, **serves) as worker:
        await until_seated(rig, worker)
        yield worker


@contextlib.asynccontextmanager
async def silent_worker(rig: Rig) -> AsyncIterator[leases.WorkerIdentity]:
    """A worker with a seat that receives no notifications, like a dead one."""
    me = await leases.register(rig.database, capacity=1, lease_seconds=5)
    await leases.move_worker(rig.database, me.id, WorkerEvent.START)
    async with rig.database.connection() as connection:
        await leases.offer_slot(Tx(connection), DispatchSlot(me.id, me.actor, "nobody", None))
    yield me


# ---------------------------------------------------------------- the direct path


async def test_a_run_goes_straight_to_a_worker_with_nothing_to_do(rig: Rig, hold: Hold, claimed: list[UUID]) -> None:
    hold.release.set()
    async with free_worker(rig) as worker:
        for _ in range(3):
            run_id = await start(rig, {"charge": "ch_1"})
            run = await rig.until(run_id)
            assert (run["status"], run["input"], claimed) == ("succeeded", {"charge": "ch_1"}, [])
            await until_seated(rig, worker)
        rows = await rig.sql(
            "SELECT seq, actor, token FROM interlock.journal_entry WHERE run_id = $1 ORDER BY seq", run_id
        )
        assert [(row["seq"], row["token"]) for row in rows] == [(1, 0), (2, 1), (3, 1), (4, 1)]
        assert rows[1]["actor"] == worker.me.actor
    assert (await rig.journal(run_id))[1] == "run: pending -start-> running"
    assert (hold.entries, await seats(rig)) == (3, set())
    await lane_is_clean(rig)


async def test_it_is_the_row_that_a_claim_would_have_given(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    real = Worker.start_driver
    monkeypatch.setattr(Worker, "start_driver", lambda worker, rows: (taken.extend(rows), real(worker, rows))[1])
    hold.release.set()
    async with free_worker(rig) as worker:
        seated = await start(rig, {"a": {"b": [1.0, None]}})
        await rig.until(seated)
        await until_seated(rig, worker)
        queued = await rig.start("one", {"a": {"b": [1.0, None]}})
        await rig.until(queued)
    dispatched, claimed = (asdict(run) for run in taken)
    own = {"id", "now", "created_at", "started_at", "lease_worker", "is_dispatched"}
    for name in claimed.keys() - own:
        assert (name, dispatched[name]) == (name, claimed[name])
    assert isinstance(dispatched["id"], UUID)
    assert (dispatched["is_dispatched"], claimed["is_dispatched"]) == (True, False)
    assert {type(dispatched[name]) for name in ("now", "created_at", "started_at")} == {type(claimed["now"])}


async def test_of_many_starts_at_once_each_run_is_done_once(rig: Rig, hold: Hold) -> None:
    hold.release.set()
    async with free_worker(rig, 5), free_worker(rig, 5):
        ids = await asyncio.gather(*(start(rig, {"n": n}) for n in range(60)))
        found = [await rig.until(run_id) for run_id in ids]
    assert {run["status"] for run in found} == {"succeeded"}
    assert hold.entries == 60
    await lane_is_clean(rig)


async def test_a_run_that_is_too_large_for_a_notification_comes_all_the_same(rig: Rig, hold: Hold) -> None:
    hold.release.set()
    async with free_worker(rig):
        run = await rig.until(await start(rig, {"text": "x" * 20_000}))
    assert (run["status"], hold.entries) == ("succeeded", 1)


async def test_the_same_start_again_is_the_same_run(rig: Rig, hold: Hold) -> None:
    async with free_worker(rig):
        new = await runs.prepare(rig.plans, rig.admin, "one")
        assert await runs.start_once(rig.database, rig.admin, new, None, b"") is not None
        await hold.inside()
        assert await runs.start_once(rig.database, rig.admin, new, None, b"") is None
        assert [row["in_flight"] for row in await rig.sql("SELECT in_flight FROM interlock.queue")] == [1]
        hold.release.set()
        await rig.until(new.id)
    await lane_is_clean(rig)


# ---------------------------------------------------------------- beside a backlog


async def test_a_large_worker_keeps_a_place_for_a_tenant_of_whom_nothing_waits(
    rig: Rig, hold: Hold, claimed: list[UUID]
) -> None:
    other = await rig.tenant("other")
    await rig.apply(ONE, other)
    for _ in range(30):
        await rig.start("one")
    async with rig.worker(20) as worker:
        await until_seated(rig, worker)
        await entered(hold, 19)
        assert len(claimed) == 19
        first = await start(rig, who=other)
        await entered(hold, 20)
        second = await start(rig, who=other)
        assert [(await rig.run(run_id))["status"] for run_id in (first, second)] == ["running", "pending"]
        assert (len(worker.drivers), await seats(rig)) == (20, set())
        hold.release.set()
        for run_id in (first, second):
            assert (await rig.until(run_id))["status"] == "succeeded"
    assert first not in claimed


async def test_a_small_worker_has_all_its_places_for_what_waits(rig: Rig, hold: Hold) -> None:
    for _ in range(30):
        await rig.start("one")
    async with rig.worker(19) as worker:
        await entered(hold, 19)
        assert (len(worker.drivers), await seats(rig)) == (19, set())
        hold.release.set()


async def test_what_came_by_the_seat_is_committed_first_and_by_itself(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await rig.tenant("other")
    await rig.apply(ONE, other)
    real, batches, free = batch_committer.commit, list[list[RunChange]](), asyncio.Event()

    async def commit(tx: Any, changes: list[RunChange], *args: Any) -> Any:
        if changes and hold.release.is_set():
            batches.append(changes)
            await free.wait()
        return await real(tx, changes, *args)

    monkeypatch.setattr(batch_committer, "commit", commit)
    for _ in range(19):
        await rig.start("one")
    async with rig.worker(20) as worker:
        await until_seated(rig, worker)
        seated = await start(rig, who=other)
        await entered(hold, 20)
        hold.release.set()
        while sum(map(len, batches)) + len(worker.flusher._waiting) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0)
        free.set()
        await worker.idle()
    (alone,) = [batch for batch in batches if seated in {change.row.run_id for change in batch}]
    assert len(alone) == 1
    assert batches.index(alone) < 3, "it waited for more than what was being committed"


async def test_runs_that_came_by_the_seat_do_not_keep_others_from_being_committed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule holds for any number of runs and writes."""

    async def commit(tx: Any, changes: list[RunChange], *_: Any) -> list[CommitResult]:
        await asyncio.sleep(0)
        return [CommitResult(True)] * len(changes)

    def row(*, is_dispatched: bool) -> WrittenRow:
        ids = RunId(uuid4()), TenantId(uuid4())
        return WrittenRow(*ids, 1, RunState.RUNNING, "me", False, QueueId(ids[1]), is_dispatched=is_dispatched)

    async def write_without_end(mine: WrittenRow) -> None:
        while True:
            await flusher.put(RunChange(mine, []))

    monkeypatch.setattr(batch_committer, "commit", commit)
    flusher = batch_committer.Flusher(rig.database, leases.UNREGISTERED)
    tasks = [asyncio.create_task(flusher.run())]
    tasks += [asyncio.create_task(write_without_end(row(is_dispatched=True))) for _ in range(4)]
    try:
        await asyncio.wait_for(flusher.put(RunChange(row(is_dispatched=False), [])), 5)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("lost", [False, True], ids=["too large", "lost"])
async def test_a_busy_worker_takes_up_what_it_was_not_told(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """The worker does not wait until it has room for more runs from the queue."""
    if lost:
        monkeypatch.setattr(Claimer, "on_seated", lambda *_: None)
    other = await rig.tenant("other")
    await rig.apply(ONE, other)
    for _ in range(19):
        await rig.start("one")
    async with rig.worker(20) as worker:
        await entered(hold, 19)
        await until_seated(rig, worker)
        run_id = await start(rig, {} if lost else {"text": "x" * 20_000}, who=other)
        assert (await rig.run(run_id))["status"] == "running"
        await entered(hold, 20)
        hold.release.set()


async def test_a_worker_that_hears_nothing_uses_all_its_places(rig: Rig, hold: Hold) -> None:
    """Behind a pooler there are no notifications, so there is never a seat."""
    rig.database.url += ("&" if "?" in rig.database.url else "?") + "pgbouncer=true"
    for _ in range(30):
        await rig.start("one")
    async with rig.worker(20):
        await entered(hold, 20)
        hold.release.set()


# ---------------------------------------------------------------- where seats are not available


async def test_what_waits_in_the_queue_is_not_passed(rig: Rig, hold: Hold) -> None:
    first = await rig.start("one")
    async with silent_worker(rig):
        second = await start(rig)
        assert [(await rig.run(run_id))["status"] for run_id in (first, second)] == ["pending", "pending"]


async def test_a_tenants_cap_holds_for_seats_too(rig: Rig, hold: Hold) -> None:
    tenant = await rig.tenant("small", max_concurrency=1)
    await rig.apply(ONE, tenant)
    async with free_worker(rig), free_worker(rig):
        ids = [await start(rig, who=tenant) for _ in range(3)]
        await hold.inside()
        assert sorted([(await rig.run(run_id))["status"] for run_id in ids]) == ["pending", "pending", "running"]
        hold.release.set()
        for run_id in ids:
            assert (await rig.until(run_id))["status"] == "succeeded"
    await lane_is_clean(rig)


async def test_a_seat_is_for_whom_its_worker_serves(rig: Rig, hold: Hold) -> None:
    other = await rig.tenant("other")
    async with free_worker(rig, tenants=(other.tenant_id,)):
        assert (await rig.run(await start(rig)))["status"] == "pending"


async def test_a_worker_that_was_paused_or_has_another_label_has_no_seat(rig: Rig, hold: Hold) -> None:
    async with free_worker(rig) as worker, rig.worker(labels=("gpu",)):
        await leases.move_worker(rig.database, worker.me.id, WorkerEvent.PAUSE)
        assert await seats(rig) == set()
        run_id = await start(rig)
        assert (await rig.run(run_id))["status"] == "pending"
        await leases.move_worker(rig.database, worker.me.id, WorkerEvent.RESUME)
        await hold.inside()
        hold.release.set()
        await rig.until(run_id)
        await until_seated(rig, worker)  # the worker opens it again


async def job_of(rig: Rig) -> UUID:
    job_id = uuid7()
    await rig.sql(
        "INSERT INTO interlock.job (id, tenant_id, depth, task_description, workflow, inputs, total, worker_count,"
        " status, requested_by, requester, created_at, deadline_at)"
        " VALUES ($1, $2, 0, 'x', 'one', '[{}]', 1, 1, 'submitted', 'someone', '{}', now(), now() + interval '1 hour')",
        job_id, rig.admin.tenant_id,
    )  # fmt: skip
    return job_id


async def test_a_worker_that_is_reserved_for_a_job_gets_no_run_by_its_seat(rig: Rig, hold: Hold) -> None:
    async with silent_worker(rig) as reserved:
        await rig.sql("UPDATE interlock.worker SET job_id = $1 WHERE id = $2", await job_of(rig), reserved.id)
        assert await seats(rig) == {reserved.id}
        assert (await rig.run(await start(rig)))["status"] == "pending"


@pytest.mark.parametrize("order", ["reserve_workers", "release_workers"])
async def test_reserving_a_worker_and_letting_it_go_takes_its_seat(rig: Rig, hold: Hold, order: str) -> None:
    """The worker has lost track of its seat, and would get one run more than it has places."""
    async with silent_worker(rig) as me:
        job_id = await job_of(rig)
        if order == "release_workers":
            await rig.sql("UPDATE interlock.worker SET job_id = $1 WHERE id = $2", job_id, me.id)
            await rig.database.fetch(order, [job_id])
        else:
            await rig.database.fetch(order, job_id, 1, rig.admin.tenant_id)
            assert (await rig.sql("SELECT job_id FROM interlock.worker"))[0]["job_id"] == job_id
        assert await seats(rig) == set()


async def test_a_run_that_did_not_leave_keeps_its_place(rig: Rig, hold: Hold, without_checks: None) -> None:
    """Its worker has one place. The run wants to leave, and the seat with it; but a command has come, and it stays."""
    async with free_worker(rig, 1) as worker:
        worker._listener.handlers[RUN_COMMAND] = lambda _: None  # the worker learns of it by the answer
        run_id = await start(rig)
        await hold.inside()
        answered, go_on, real = asyncio.Event(), asyncio.Event(), worker.flusher._commit_whatever_happens

        async def append(*args: Any) -> list[CommitResult]:
            answers: list[CommitResult] = await real(*args)
            answered.set()
            await go_on.wait()
            return answers

        worker.flusher._commit_whatever_happens = append
        await rig.cancel(run_id)
        hold.release.set()
        await asyncio.wait_for(answered.wait(), 20)
        assert (list(worker.drivers), await seats(rig)) == ([run_id], set())
        go_on.set()
        await rig.until(run_id)
        await until_seated(rig, worker)


async def test_with_a_rate_every_start_is_counted(rig: Rig, hold: Hold) -> None:
    tenant = await rig.tenant("paced", max_runs_per_min=5)
    await rig.apply(ONE, tenant)
    async with silent_worker(rig):
        new = await runs.prepare(rig.plans, tenant, "one")
        assert await runs.start_once(rig.database, tenant, new, None, b"") is None
    assert await rig.sql("SELECT 1 FROM interlock.run") == []


async def test_a_worker_with_one_place_still_takes_from_the_queue(rig: Rig, hold: Hold) -> None:
    hold.release.set()
    async with free_worker(rig, 1):
        queued = await rig.start("one")
        assert (await rig.until(queued))["status"] == "succeeded"


# ---------------------------------------------------------------- failures on the direct path


async def test_a_run_whose_notification_was_lost_is_taken_up_once(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Claimer, "on_seated", lambda *_: None)
    hold.release.set()
    async with free_worker(rig):
        run = await rig.until(await start(rig))
    assert (run["status"], hold.entries) == ("succeeded", 1)
    await lane_is_clean(rig)


async def test_a_run_on_the_seat_of_a_worker_that_died_goes_to_another(rig: Rig, hold: Hold) -> None:
    hold.release.set()
    async with silent_worker(rig) as dead:
        run_id = await start(rig)
        (row,) = await rig.sql("SELECT status, lease_worker FROM interlock.run")
        assert (row["status"], row["lease_worker"]) == ("running", dead.id)
    rig.clock.advance(60)
    await rig.sweep()
    run = await rig.work_until(run_id)
    assert (run["status"], run["resume_count"], hold.entries) == ("succeeded", 1, 1)
    await lane_is_clean(rig)


async def test_a_word_that_comes_late_does_not_do_it_twice(rig: Rig, hold: Hold) -> None:
    hold.release.set()
    async with free_worker(rig) as worker:
        heard: list[str] = []
        worker._listener.handlers[worker.claimer.channel] = heard.append
        assert (await rig.until(await start(rig)))["status"] == "succeeded"  # the slow poll found it
        await worker.idle()
        worker.claimer.on_seated(heard[0])
        await worker.idle()
    assert hold.entries == 1


async def test_a_run_that_comes_between_two_lives_is_for_neither(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of reach beyond its lease, the worker registers again under a new id, reclaims the run and does it."""
    hold.release.set()
    async with free_worker(rig, 1) as worker:
        old, registering, go_on, register = worker.me, asyncio.Event(), asyncio.Event(), worker._register

        async def slowly() -> leases.WorkerIdentity:
            registering.set()
            await go_on.wait()
            return await register()

        beat = leases.heartbeat

        async def lost(*_: Any) -> Any:
            monkeypatch.setattr(leases, "heartbeat", beat)
            raise LeaseLost("out of reach")

        monkeypatch.setattr(worker, "_register", slowly)
        monkeypatch.setattr(leases, "heartbeat", lost)
        heard = asyncio.Event()
        on_seated = worker.claimer.on_seated
        worker._listener.handlers[worker.claimer.channel] = lambda payload: (on_seated(payload), heard.set())
        worker.recheck_lease()
        await asyncio.wait_for(registering.wait(), 20)
        run_id = await start(rig)
        assert (await rig.run(run_id))["status"] == "running"
        await asyncio.wait_for(heard.wait(), 20)
        assert worker.drivers == {}
        go_on.set()
        async with asyncio.timeout(20):
            while worker.me == old:  # noqa: ASYNC110 — only its id shows it
                await asyncio.sleep(0.005)
        await rig.sql(
            "UPDATE interlock.worker SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE id = $1", old.id
        )
        await rig.sweep()
        assert (await rig.until(run_id))["status"] == "succeeded"


async def test_what_waits_is_claimed_when_the_run_on_the_only_seat_is_on_its_way(rig: Rig, hold: Hold) -> None:
    rig.settings.poll_seconds = 30.0  # nothing else finds it
    other = await rig.tenant("other")
    await rig.apply(ONE, other)
    hold.release.set()
    async with free_worker(rig, 1) as worker:
        heard: asyncio.Queue[str] = asyncio.Queue()
        worker._listener.handlers[worker.claimer.channel] = heard.put_nowait
        told, look = asyncio.Event(), worker.claimer.look
        worker._listener.handlers[READY] = lambda _: (look(), told.set())
        first = await start(rig)
        payload = await asyncio.wait_for(heard.get(), 20)
        second = await start(rig, who=other)
        await asyncio.wait_for(told.wait(), 20)
        while worker.claimer._may_claim and worker.claimer._stir.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        worker.claimer.on_seated(payload)
        for run_id in (first, second):
            assert (await rig.until(run_id, seconds=10))["status"] == "succeeded"


async def test_a_batch_that_is_refused_opens_the_seat_all_the_same(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch, without_checks: None
) -> None:
    real = batch_committer.commit

    async def commit(tx: Any, changes: list[RunChange], *args: Any) -> list[CommitResult]:
        if len(changes) > 1:
            raise asyncpg.CheckViolationError("one of them")
        return await real(tx, changes, *args)

    monkeypatch.setattr(batch_committer, "commit", commit)
    for _ in range(3):
        await rig.start("one")
    async with rig.worker(5) as worker:
        await entered(hold, 3)
        hold.release.set()
        await until_seated(rig, worker)


async def test_a_seat_that_was_opened_while_its_worker_was_declared_lost_is_taken_away(rig: Rig, hold: Hold) -> None:
    async with silent_worker(rig) as me:
        rig.clock.advance(60)
        await rig.sweep()
        async with rig.database.connection() as connection:
            await leases.offer_slot(Tx(connection), DispatchSlot(me.id, me.actor, "nobody", None))
        assert await seats(rig) == {me.id}
        await rig.sweep()
    assert await seats(rig) == set()


async def test_the_seat_of_a_lost_worker_is_gone(rig: Rig, hold: Hold) -> None:
    async with silent_worker(rig):
        pass
    rig.clock.advance(60)
    await rig.sweep()
    assert await seats(rig) == set()


async def test_what_is_put_on_the_seat_of_a_worker_that_stops_is_given_back(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Claimer, "on_seated", lambda *_: None)
    real, began = workers.end, asyncio.Event()

    async def end(*args: Any) -> Any:
        began.set()
        return await real(*args)

    monkeypatch.setattr(workers, "end", end)
    rig.settings.poll_seconds = 30.0  # nothing else finds it
    async with free_worker(rig) as worker:
        run_id = await start(rig)
    assert began.is_set() and worker.drivers == {}
    assert ((await rig.run(run_id))["status"], hold.entries) == ("running", 0)
    assert [row["run_id"] for row in await rig.sql("SELECT run_id FROM interlock.ready_run")] == [run_id]


async def test_a_run_that_comes_while_the_database_is_asked_is_not_taken_twice(
    rig: Rig, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold.release.set()
    asked, go_on = asyncio.Event(), asyncio.Event()
    real = leases.leases_of

    async def leases_of(*args: Any) -> Any:
        held = await real(*args)
        if held:
            asked.set()
            await go_on.wait()
        return held

    taken: list[UUID] = []
    take_up = Worker.start_driver
    monkeypatch.setattr(Worker, "start_driver", lambda w, rows: (taken.extend(r.id for r in rows), take_up(w, rows))[1])
    async with free_worker(rig) as worker:
        monkeypatch.setattr(leases, "leases_of", leases_of)
        heard: asyncio.Queue[str] = asyncio.Queue()
        monkeypatch.setattr(worker.claimer, "on_seated", heard.put_nowait)
        worker._listener.handlers[worker.claimer.channel] = heard.put_nowait
        run_id = await start(rig)
        worker.claimer.remember()
        await asyncio.wait_for(asked.wait(), 20)
        # Only now the notification arrives; the run is done before the answer is read.
        Claimer.on_seated(worker.claimer, await asyncio.wait_for(heard.get(), 20))
        assert (await rig.until(run_id))["status"] == "succeeded"
        go_on.set()
        second = await rig.start("one")
        await rig.until(second)
    assert (hold.entries, taken) == (2, [run_id, second])


async def test_a_seat_that_a_crash_took_is_opened_again(rig: Rig, hold: Hold) -> None:
    async with free_worker(rig) as worker:
        await rig.sql("DELETE FROM interlock.dispatch_slot")
        await until_seated(rig, worker)


async def test_a_claim_deactivates_no_queue_that_a_start_is_filling(rig: Rig) -> None:
    """The claim does not wait for the start either: it leaves the queue active and looks again."""
    tenant_id = rig.admin.tenant_id
    me, _ = await rig.claim_by_hand()
    await rig.sql("UPDATE interlock.queue SET has_work = true WHERE id = $1", tenant_id)
    async with rig.database.connection() as claims:
        async with asyncio.timeout(5), rig.database.transaction() as starts:
            await starts.connection.execute("SELECT interlock.activate_queue($1, $1)", tenant_id)
            assert await leases.claim(Tx(claims), me, 1) == []
        assert await leases.claim(Tx(claims), me, 1) == []
        assert await leases.claim(Tx(claims), me, 1) is None


async def test_a_claim_does_not_wait_for_who_starts_a_run(rig: Rig) -> None:
    """A starter locks the queue for a slot, finds it taken, and then asks that the queue stays active."""
    tenant_id = rig.admin.tenant_id
    me, _ = await rig.claim_by_hand()
    await rig.sql("UPDATE interlock.queue SET has_work = true WHERE id = $1", tenant_id)
    async with rig.database.connection() as claims:
        async with asyncio.timeout(5), rig.database.transaction() as starts:
            lock = "UPDATE interlock.queue SET in_flight = in_flight WHERE id = $1"
            await starts.connection.execute(lock, tenant_id)
            assert await leases.claim(Tx(claims), me, 1) == []
            await starts.connection.execute("SELECT interlock.activate_queue($1, $1)", tenant_id)
        assert await leases.claim(Tx(claims), me, 1) == []
        assert await leases.claim(Tx(claims), me, 1) is None
