"""A worker follows an order within a second, and its runs go to other workers."""

import asyncio
import time
from typing import Any
from uuid import UUID

import pytest

from interlock.engine.queueing import leases, workers
from interlock.engine.writing.change import RunChange, WrittenRow
from interlock.engine.writing.commit import commit
from interlock.ids import RunId, uuid7
from interlock.journal import Entry
from interlock.lifecycle import RunState, WorkerEvent
from interlock.worker import memory
from interlock.worker.worker import Worker
from tests.rig import Rig
from tests.supervised.conftest import Shop, until


async def tell(rig: Rig, worker_id: UUID, verb: str, **body: Any) -> Any:
    return await rig.http().post(f"/api/supervisor/workers/{worker_id}/{verb}", json=body)


async def test_a_paused_worker_finishes_its_step_gives_the_run_back_and_takes_no_other(shop: Shop, rig: Rig) -> None:
    worker = await shop.worker()
    run_id = await rig.start("two")
    await shop.hold.inside()
    answer = await tell(rig, worker.me.id, "pause", reason="look at it")
    assert (answer.status_code, answer.json()["status"], answer.json()["reason"]) == (200, "paused", "look at it")
    await until(lambda: _is(worker, "paused"))
    shop.hold.release.set()

    async def given_back() -> bool:
        (row,) = await rig.sql("SELECT lease_worker FROM interlock.run WHERE id = $1", run_id)
        return row["lease_worker"] is None

    await until(given_back)
    run = await rig.run(run_id)
    assert (run["step"]["a"]["status"], run["step"]["b"]["status"], run["status"]) == (
        "succeeded",
        "pending",
        "running",
    )
    other = await rig.start("two")
    async with rig.worker():
        assert (await rig.until(run_id))["status"] == "succeeded"
        assert (await rig.until(other))["status"] == "succeeded"
    holders = {
        row["actor"] for row in await rig.sql("SELECT actor FROM interlock.journal_entry WHERE run_id = $1", other)
    }
    assert worker.me.actor not in holders
    await tell(rig, worker.me.id, "resume")
    assert (await rig.until(await rig.start("two")))["status"] == "succeeded"


async def test_orders_act_within_a_second_and_also_without_notifications(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = await shop.worker()
    monkeypatch.setattr(Worker, "_on_orders", lambda self, payload: None)
    deaf = await shop.worker()
    for worker in (heard, deaf):
        began = time.monotonic()
        await tell(rig, worker.me.id, "pause")
        await until(lambda worker=worker: _is(worker, "paused"))
        assert time.monotonic() - began < 1.5


async def _is(worker: Worker, status: str) -> bool:
    return worker.orders.status == status


async def test_a_terminated_workers_step_is_running_elsewhere_within_three_seconds(shop: Shop, rig: Rig) -> None:
    first = await shop.worker()
    run_id = await rig.start("one")
    await shop.hold.inside()
    await shop.worker()
    (held,) = await rig.sql("SELECT lease_token, queue_id FROM interlock.run WHERE id = $1", run_id)
    shop.hold.entered.clear()
    began = time.monotonic()
    answer = await tell(rig, first.me.id, "terminate", reason="stuck")
    assert (answer.status_code, answer.json()["status"]) == (200, "terminated")
    await shop.hold.inside(3)
    assert time.monotonic() - began < 3
    assert shop.hold.interrupted

    # A late write of the old worker changes nothing, and the worker learns that.
    before = await rig.journal(run_id)
    late = WrittenRow(
        RunId(run_id), rig.admin.tenant_id, held["lease_token"], RunState.RUNNING, "me", False, held["queue_id"],
        leased_from=held["queue_id"],
    )  # fmt: skip
    entry = Entry(99, "step_transition", first.me.actor, "a", "running", "succeed", "succeeded", 1)
    async with rig.database.transaction() as tx:
        (told,) = await commit(tx, [RunChange(late, [entry])], first.me.id)
    assert not told.kept
    assert await rig.journal(run_id) == before
    shop.hold.release.set()
    assert (await rig.until(run_id))["status"] == "succeeded"


async def test_a_worker_that_was_told_to_end_does_not_begin_again(shop: Shop, rig: Rig) -> None:
    stop = asyncio.Event()
    worker = Worker(rig.database, rig.settings, tools=rig.tools, capacity=1)
    living = asyncio.create_task(worker.run(stop))
    await until(lambda: shop._is_running(worker))
    await tell(rig, worker.me.id, "terminate")
    await asyncio.wait_for(living, 10)
    assert len(await rig.sql("SELECT id FROM interlock.worker")) == 1


async def test_the_same_request_id_a_hundred_times_at_once_is_one_transition(rig: Rig) -> None:
    me = await leases.register(rig.database, capacity=1, lease_seconds=30)
    await leases.move_worker(rig.database, me.id, WorkerEvent.START)
    http = rig.http()
    body = {"reason": "r", "request_id": str(uuid7())}
    answers = await asyncio.gather(
        *(http.post(f"/api/supervisor/workers/{me.id}/pause", json=body) for _ in range(100))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    lines = await rig.sql("SELECT * FROM interlock.resource_event WHERE subject_id = $1 AND event = 'pause'", me.id)
    assert len(lines) == 1
    again = await http.post(f"/api/supervisor/workers/{me.id}/pause", json={"reason": "r"})
    assert (again.status_code, again.json()["allowed"]) == (409, ["resume", "terminate"])


async def test_one_tenants_operator_does_not_stop_the_workers_of_all(rig: Rig) -> None:
    me = await leases.register(rig.database, capacity=1, lease_seconds=30)
    acme = await rig.tenant("acme")
    for key, status in (
        (await rig.key("op", "operator", acme.tenant_id), 403),
        (await rig.key("v", "viewer"), 403),
        (await rig.key("op", "operator"), 200),
    ):
        answer = await rig.http(key).post(f"/api/supervisor/workers/{me.id}/terminate")
        assert answer.status_code == status, answer.text


async def test_bad_orders_are_told_what_would_be_right(rig: Rig) -> None:
    http = rig.http()
    assert (await http.post(f"/api/supervisor/workers/{uuid7()}/pause")).json()["code"] == "WORKER_NOT_FOUND"
    assert (await http.post("/api/workers", json={"labels": ["GPU!"]})).status_code == 422
    assert (await http.post("/api/workers", json={"tenants": ["nobody"]})).json()["code"] == "TENANT_NOT_FOUND"
    made = await http.post("/api/workers", json={"workspace_id": "ws_test"})
    assert (made.status_code, made.json()["status"], made.json()["pid"]) == (201, "idle", None)
    refused = await http.post(f"/api/workers/{made.json()['id']}/start")
    assert (refused.status_code, refused.json()["code"]) == (409, "NO_SUPERVISOR")
    assert "interlock supervise" in refused.json()["detail"]


# ---------------------------------------------------------------- recovery, row by row


async def test_a_transient_network_error_is_retried_and_the_worker_runs_on(shop: Shop, rig: Rig) -> None:
    tries = 0

    @rig.tool("t.flaky")
    async def flaky() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ConnectionError("reset by peer")

    await rig.apply("{name: flaky, steps: [{id: a, tool: t.flaky, retry: {max_attempts: 3, base_delay: 1ms}}]}")
    worker = await shop.worker()
    run_id = await rig.start("flaky")

    async def over() -> bool:
        await rig.sweep()
        return bool((await rig.run(run_id))["completed_at"])

    await until(over)
    assert ((await rig.run(run_id))["status"], tries) == ("succeeded", 3)
    assert await shop.status(worker.me.id) == "running"


async def test_a_worker_short_of_memory_pauses_gives_back_and_goes_on(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = 50.0
    monkeypatch.setattr(memory, "resident_mb", lambda: used)
    monkeypatch.setattr(rig.settings, "worker_memory_mb", 100)
    worker = await shop.worker()
    run_id = await rig.start("two")
    await shop.hold.inside()
    used = 120.0
    await until(lambda: _is(worker, "paused"))
    (row,) = await rig.sql("SELECT status, reason FROM interlock.worker WHERE id = $1", worker.me.id)
    assert (row["status"], row["reason"]) == ("paused", "memory: 120 MB used, 100 MB allowed")
    shop.hold.release.set()
    await until(lambda: _is_idle(worker))
    assert (await rig.run(run_id))["step"]["b"]["status"] == "pending"
    used = 60.0
    assert (await rig.until(run_id))["status"] == "succeeded"
    assert await shop.status(worker.me.id) == "running"


async def test_a_worker_that_cannot_free_its_memory_ends(shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_mb", lambda: 120.0)
    monkeypatch.setattr(memory, "_MEMORY_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(rig.settings, "worker_memory_mb", 100)
    worker = Worker(rig.database, rig.settings, tools=rig.tools, capacity=1)
    await asyncio.wait_for(worker.run(asyncio.Event()), 10)
    (row,) = await rig.sql("SELECT status, reason FROM interlock.worker")
    assert row["status"] == "terminated"
    assert "with nothing to do" in row["reason"]


async def _is_idle(worker: Worker) -> bool:
    return not worker.drivers


async def test_an_unrecoverable_error_is_a_failed_worker(shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await shop.worker()
    first = worker.me.id
    broken = True

    async def check() -> None:
        if broken:
            raise RuntimeError("cannot go on")

    monkeypatch.setattr(worker, "_check", check)

    async def failed() -> bool:
        return await shop.status(first) == "failed"

    await until(failed)
    broken = False
    (row,) = await rig.sql("SELECT reason FROM interlock.worker WHERE id = $1", first)
    assert row["reason"] == "cannot go on"
    await until(lambda: shop._is_running(worker))
    assert worker.me.id != first


async def test_a_silent_worker_is_terminated_when_its_time_is_over(shop: Shop, rig: Rig) -> None:
    rig.clock.freeze()
    worker_id = await shop.silent_worker()
    rig.clock.advance(29)
    await rig.sweep()
    assert await shop.status(worker_id) == "running"
    rig.clock.advance(2)
    await rig.sweep()
    assert await shop.status(worker_id) == "terminated"
    (line,) = await rig.sql(
        "SELECT * FROM interlock.resource_event WHERE subject_id = $1 AND event = 'terminate'", worker_id
    )
    assert (line["actor"], line["reason"]) == (workers.SWEEP, "heartbeat lost")


async def test_a_worker_that_was_asked_for_waits_for_its_start_for_as_long_as_it_takes(shop: Shop, rig: Rig) -> None:
    rig.clock.freeze()
    made = (await rig.http().post("/api/workers", json={})).json()
    rig.clock.advance(1_000_000)
    await rig.sweep()
    assert await shop.status(UUID(made["id"])) == "idle"
