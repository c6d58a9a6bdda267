"""A run that cannot be read, for example because an upgrade rejects its definition, ends alone."""

import asyncio
from typing import Any

import pytest
from tests.rig import Rig
from tests.supervised.conftest import until

from interlock.engine.ingress import schedules
from interlock.engine.queueing import jobs, leases
from interlock.engine.queueing.jobs import JobRequest
from interlock.engine.writing.deliver import fail_unreadable
from interlock.ids import uuid7
from interlock.worker import run_driver

LIST = "{name: list, steps: [{id: a, tool: t.echo, input: {value: 1}}]}"
GOOD = "{name: good, steps: [{id: a, tool: t.echo, input: {value: 2}}]}"
GATED = "{name: gated, steps: [{id: ask, approval: {summary: Shall we?}}, {id: a, tool: t.echo, input: {value: 1}}]}"
WHY = "list version 1 cannot be read by this version of Interlock; apply it anew: workflow: "


@pytest.fixture(autouse=True)
def _few_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_driver, "_MOST_READERS", 1)


@pytest.fixture
def rig(rig: Rig) -> Rig:
    rig.settings.poll_seconds = 0.05

    @rig.tool("t.echo")
    async def echo(value: int) -> int:
        return value

    return rig


async def spoil(rig: Rig, workflow: str) -> None:
    """Simulate an upgrade that rejects a previously accepted definition, with empty caches."""
    source = '{"name": "list", "steps": [{"id": "a", "tool": "t.echo", "when": 1}]}'
    await rig.sql("UPDATE interlock.workflow SET source = $2::text::jsonb WHERE name = $1", workflow, source)
    rig.plans._plans.clear()


async def test_it_ends_failed_says_why_and_nothing_else_is_affected(rig: Rig) -> None:
    await rig.apply(LIST)
    await rig.apply(GOOD)
    bad = await rig.start("list")
    await spoil(rig, "list")
    good = [await rig.start("good") for _ in range(3)]
    async with rig.worker() as worker:
        run = await rig.until(bad)
        assert [(await rig.until(id))["status"] for id in good] == ["succeeded"] * 3
        assert [row["id"] for row in await rig.sql("SELECT id FROM interlock.worker")] == [worker.me.id]
    assert (run["status"], run["reason"], run["steps"]) == ("failed", "resume_failed", [])
    assert run["error"]["message"].startswith(WHY)
    assert run["error"]["code"] == "RUN_RESUME_FAILED"
    assert (await rig.journal(bad))[-1] == "run: running -fail-> failed"
    [claims] = await rig.sql("SELECT lease_token FROM interlock.run WHERE id = $1", bad)
    assert claims["lease_token"] == 2, "the second to find that out ends it, though a third would take it at once"
    assert [dict(row) for row in await rig.sql("SELECT in_flight FROM interlock.queue")] == [{"in_flight": 0}]


async def test_who_can_read_it_goes_on_with_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.apply(LIST)
    run_id = await rig.start("list")
    (source,) = await rig.sql("SELECT source FROM interlock.workflow")
    await spoil(rig, "list")
    monkeypatch.setattr(run_driver, "_MOST_READERS", 1000)
    given_back, times = asyncio.Event(), 0
    hand_back = leases.hand_back

    async def handed_back(*args: Any) -> None:
        nonlocal times
        await hand_back(*args)
        times += 1
        if times == 3:
            given_back.set()

    monkeypatch.setattr(leases, "hand_back", handed_back)
    async with rig.worker():
        await asyncio.wait_for(given_back.wait(), 20)
    await rig.sweep()  # it may have been claimed again at the last moment
    await rig.sql("UPDATE interlock.workflow SET source = $1::text::jsonb", source["source"])
    assert (await rig.work_until(run_id))["status"] == "succeeded"


@pytest.mark.parametrize("what", ["cancel", "approve", "deadline"])
async def test_what_is_said_to_it_while_it_waits_brings_it_to_its_end(rig: Rig, what: str) -> None:
    await rig.apply(GATED)
    run_id = await rig.start("gated", deadline_seconds=60.0)
    await spoil(rig, "gated")
    if what == "cancel":
        answer = await rig.http().post(f"/api/runs/{run_id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "canceling")
    elif what == "approve":
        answer = await rig.http().post(f"/api/runs/{run_id}/approve")
        assert (answer.status_code, answer.json()["status"]) == (200, "running")
    else:
        rig.clock.advance(61)
        await rig.sweep()
        await rig.sweep()
    run = await rig.work_until(run_id)
    assert (run["status"], run["reason"]) == ("failed", "resume_failed")
    assert (await rig.http().get(f"/api/runs/{run_id}")).json()["steps"] == []
    assert [row["status"] for row in await rig.sql("SELECT status FROM interlock.approval")] == [
        "approved" if what == "approve" else "canceled"
    ]
    assert not await rig.sql("SELECT FROM interlock.run_command")


async def test_an_event_that_it_waits_for_brings_it_to_its_end_too(rig: Rig) -> None:
    await rig.apply("{name: waiting, steps: [{id: w, wait: {event: paid, correlation: '1'}}]}")
    run_id = await rig.start("waiting")
    await spoil(rig, "waiting")
    answer = await rig.http().post("/api/events", json={"id": "e1", "type": "paid", "correlation": "1"})
    assert answer.status_code == 202, answer.text
    assert (await rig.journal(run_id))[-1] == "run: waiting_external -resume-> running"
    run = await rig.work_until(run_id)
    assert (run["status"], run["reason"]) == ("failed", "resume_failed")


async def test_one_that_was_never_begun_is_canceled_too(rig: Rig) -> None:
    await rig.apply(LIST)
    run_id = await rig.start("list")
    await spoil(rig, "list")
    await rig.cancel(run_id)
    assert (await rig.work_until(run_id))["reason"] == "resume_failed"


async def test_its_parent_is_told(rig: Rig) -> None:
    await rig.apply(GATED)
    await rig.apply("{name: parent, steps: [{id: c, flow: gated}]}")
    parent = await rig.start("parent")
    async with rig.worker():
        await rig.until(parent, "waiting_external")
        (child,) = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", parent)
        await rig.until(child["id"], "waiting_approval")
        await spoil(rig, "gated")
    await rig.cancel(child["id"])
    async with rig.worker():
        run = await rig.until(parent)
    assert (run["status"], run["error"]["type"]) == ("failed", "ChildFailed")


async def test_its_children_are_stopped(rig: Rig) -> None:
    await rig.apply(GATED)
    await rig.apply("{name: parent, steps: [{id: c, flow: gated}]}")
    parent = await rig.start("parent")
    async with rig.worker():
        await rig.until(parent, "waiting_external")
        (child,) = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", parent)
        await rig.until(child["id"], "waiting_approval")
    await spoil(rig, "parent")
    await rig.cancel(parent)
    async with rig.worker():
        assert (await rig.until(parent))["reason"] == "resume_failed"
        assert (await rig.until(child["id"]))["reason"] == "canceled_by_parent"


async def test_who_gives_it_up_changes_nothing_if_another_holds_it_by_then(rig: Rig) -> None:
    await rig.apply(LIST)
    run_id = await rig.start("list")
    await spoil(rig, "list")
    _, [row] = await rig.claim_by_hand()
    await rig.database.run_in_transaction(
        lambda tx: fail_unreadable(tx, row.tenant_id, row.id, "worker:other", "it cannot be read")
    )
    [run] = await rig.sql("SELECT status, lease_worker IS NOT NULL AS held FROM interlock.run WHERE id = $1", run_id)
    assert tuple(run) == ("running", True)
    assert (await rig.journal(run_id))[-1] == "run: pending -start-> running"


async def test_a_run_that_is_handed_back_keeps_its_place_under_the_cap(rig: Rig) -> None:
    await rig.apply(LIST.replace("steps", "caps: {max_concurrency: 1}, steps"))
    first, _ = [await rig.start("list") for _ in range(2)]
    me, [row] = await rig.claim_by_hand()
    await leases.hand_back(rig.database, me, row.id, row.lease_token)
    await rig.sweep()
    assert [tuple(r) for r in await rig.sql("SELECT run_id, workflow FROM interlock.ready_run")] == [(first, "list")]
    assert len(await rig.sql("SELECT FROM interlock.blocked_run")) == 1


async def test_who_hands_it_back_too_late_takes_it_from_nobody(rig: Rig) -> None:
    """Another worker got the run while its old holder waited for the row, so the old holder's view is stale."""
    await rig.apply(LIST)
    run_id = await rig.start("list")
    me, [row] = await rig.claim_by_hand()
    async with rig.database.connection() as connection, connection.transaction():
        await connection.execute("SELECT FROM interlock.run FOR UPDATE")
        late = asyncio.create_task(leases.hand_back(rig.database, me, row.id, row.lease_token))
        waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        while not late.done() and not await rig.sql(waits):
            pass
        await connection.execute("UPDATE interlock.run SET lease_token = lease_token + 1 WHERE id = $1", run_id)
    await late
    [run] = await rig.sql("SELECT lease_worker FROM interlock.run WHERE id = $1", run_id)
    assert run["lease_worker"] == me.id
    assert not await rig.sql("SELECT FROM interlock.ready_run")
    assert [lane["in_flight"] for lane in await rig.sql("SELECT in_flight FROM interlock.queue")] == [1]


async def test_a_step_that_would_start_it_fails(rig: Rig) -> None:
    await rig.apply(LIST)
    await rig.apply("{name: parent, steps: [{id: c, flow: list}]}")
    run_id = await rig.start("parent")
    await spoil(rig, "list")
    run = await rig.work_until(run_id)
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    assert run["error"]["message"].startswith(WHY)


async def test_a_job_of_it_fails_and_others_begin(rig: Rig) -> None:
    await rig.apply(LIST)
    await rig.apply(GOOD)

    async def submitted(workflow: str) -> Any:
        new = await jobs.prepare(rig.plans, rig.admin, JobRequest(uuid7(), "a job", workflow, [{}]))
        return (await rig.database.run_in_transaction(lambda tx: jobs.submit(tx, rig.admin, new)))["id"]

    bad, good = await submitted("list"), await submitted("good")
    await spoil(rig, "list")

    async def ended() -> Any:
        await rig.sweep()
        rows = await rig.sql("SELECT id, status, reason FROM interlock.job WHERE completed_at IS NOT NULL")
        return {row["id"]: (row["status"], row["reason"]) for row in rows} if len(rows) == 2 else None

    async with rig.worker(), rig.worker():
        found = await until(ended, 20)
    assert found == {bad: ("failed", "1 of 1 runs did not succeed"), good: ("completed", None)}


async def test_a_schedule_of_it_goes_on_and_its_runs_say_why_they_fail(rig: Rig) -> None:
    await rig.apply(LIST)
    body = {"name": "nightly", "cron": "* * * * *", "workflow": "list"}
    assert (await rig.http().post("/api/schedules", json=body)).status_code == 201
    await spoil(rig, "list")
    rig.clock.advance(61)
    assert await schedules.start_due(rig.database, rig.plans) == 1
    (run_id,) = [row["id"] for row in await rig.sql("SELECT id FROM interlock.run")]
    assert (await rig.work_until(run_id))["error"]["message"].startswith(WHY)


@pytest.mark.parametrize(("caps", "room"), [("{max_concurrency: 1}", 1), ("{}", 3)])
async def test_its_workflows_cap_holds_though_whoever_starts_it_cannot_read_that_it_has_one(
    rig: Rig, caps: str, room: int
) -> None:
    """Other workers may be able to read it, and would run all of them at once."""
    await rig.apply(LIST.replace("steps", f"caps: {caps}, steps"))
    body = {"name": "often", "cron": "* * * * *", "workflow": "list", "missed": "all"}
    assert (await rig.http().post("/api/schedules", json=body)).status_code == 201
    await spoil(rig, "list")
    rig.clock.advance(181)
    assert await schedules.start_due(rig.database, rig.plans) == 3
    assert len(await rig.sql("SELECT FROM interlock.ready_run")) == room
    assert len(await rig.sql("SELECT FROM interlock.blocked_run")) == 3 - room


async def test_who_asks_for_it_is_told_that_it_cannot_be_read(rig: Rig) -> None:
    await rig.apply(LIST)
    await spoil(rig, "list")
    answer = await rig.http().post("/api/runs", json={"workflow": "list"})
    assert (answer.status_code, answer.json()["code"]) == (409, "UNREADABLE")
    assert answer.json()["detail"].startswith(WHY)
