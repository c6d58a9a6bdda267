"""Caps: runs per minute, writes per run, and their reported use."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from uuid import UUID

import pytest
import structlog
from tests.rig import Rig

from interlock.definition.workflow import parse
from interlock.engine.access import tenants
from interlock.engine.access.principal import Principal
from interlock.engine.queueing import sweeps
from interlock.engine.runs import resume, runs
from interlock.errors import DefinitionInvalid, Terminal
from interlock.ids import uuid7
from interlock.testing import ManualClock
from interlock.worker.worker import Worker

QUICK = "{name: quick, steps: [{id: a, tool: t.quick}]}"
MINUTE = datetime(2031, 5, 1, 12, 0, 30, tzinfo=UTC)


@pytest.fixture
async def acme(rig: Rig, clock: ManualClock) -> Principal:
    """A tenant with sixty runs per minute, half a minute into one."""

    @rig.tool("t.quick")
    async def quick() -> None: ...

    who = await rig.tenant("acme", max_runs_per_min=60)
    await rig.apply(QUICK, who)
    clock.fixed = MINUTE
    return who


async def begun(rig: Rig) -> list[datetime | None]:
    """Return each run's start time, in the order of the requests."""
    return [row["started_at"] for row in await rig.sql("SELECT started_at FROM interlock.run ORDER BY id")]


async def test_a_thousand_runs_begin_sixty_a_minute_in_order_and_none_is_lost(
    rig: Rig, acme: Principal, clock: ManualClock
) -> None:
    news = [await runs.prepare(rig.plans, acme, "quick") for _ in range(1000)]
    for at in range(0, 1000, 125):
        await runs.start_many(rig.database, acme, news[at : at + 125])
    for minute in range(17):
        if minute:
            clock.advance(30 if minute == 1 else 60)
            await sweeps.resume_due(rig.database)
        expected = min(60 * (minute + 1), 1000)
        async with rig.worker(capacity=100):
            await rig.until(news[expected - 1].id, seconds=60)
        seen = await begun(rig)
        assert all(at is not None for at in seen[:expected]), minute
        assert all(at is None for at in seen[expected:]), minute
        assert seen[60 * minute : expected] == [clock.fixed] * (expected - 60 * minute)
    done = await rig.sql("SELECT status, count(*) FROM interlock.run GROUP BY status")
    assert [tuple(row) for row in done] == [("succeeded", 1000)]


async def test_within_a_minute_they_wait_in_the_order_they_came(rig: Rig, acme: Principal, clock: ManualClock) -> None:
    news = [await runs.prepare(rig.plans, acme, "quick") for _ in range(200)]
    await runs.start_many(rig.database, acme, news)
    clock.advance(600)
    await sweeps.resume_due(rig.database)
    queued = await rig.sql("SELECT run_id FROM interlock.ready_run WHERE priority = 0 ORDER BY position")
    assert [row["run_id"] for row in queued] == [new.id for new in news[60:]]


async def test_who_will_not_wait_is_told_when_to_come_back_and_takes_no_place(
    rig: Rig, acme: Principal, clock: ManualClock
) -> None:
    http = rig.http(await rig.key("op", "operator", tenant_id=acme.tenant_id))
    news = [await runs.prepare(rig.plans, acme, "quick") for _ in range(59)]
    await runs.start_many(rig.database, acme, news)
    body = {"workflow": "quick"}
    assert (await http.post("/api/runs?over_cap=refuse", json=body)).status_code == 201
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            refused = await http.post("/api/runs?over_cap=refuse", json=body, headers={"Idempotency-Key": "k"})
            assert (refused.status_code, refused.json()["code"]) == (429, "RATE_LIMITED")
            assert refused.headers["retry-after"] == "30"
    assert [line for line in logs if line["event"] == "run_created"] == []
    (usage,) = (await http.get("/api/usage")).json()["items"]
    assert (usage["runs_this_minute"], usage["runs_waiting"]) == (60, 0)
    assert (await http.post("/api/runs", json=body)).status_code == 201
    clock.advance(30)
    # The same key again: the server rejected the first request, so it stored no answer.
    again = await http.post("/api/runs?over_cap=refuse", json=body, headers={"Idempotency-Key": "k"})
    assert again.status_code == 201, again.text


GATE = "{name: gate, steps: [{id: g, approval: {tier: low, summary: ok}}, {id: a, tool: t.quick}]}"
WAIT = "{name: nap, steps: [{id: w, wait: {duration: 1h}}, {id: a, tool: t.quick}]}"


async def first_moves(rig: Rig) -> list[tuple[UUID, datetime]]:
    """Return which runs left `pending`, and when, in that order."""
    rows = await rig.sql(
        "SELECT run_id, at FROM interlock.journal_entry WHERE step IS NULL AND from_state = 'pending'"
        " ORDER BY at, run_id"
    )
    return [(row["run_id"], row["at"]) for row in rows]


async def test_runs_that_begin_with_a_gate_or_a_wait_or_again_take_places_too(
    rig: Rig, acme: Principal, clock: ManualClock
) -> None:
    @rig.tool("t.fail")
    async def fail() -> None:
        raise Terminal("no")

    await rig.database.run_in_transaction(lambda tx: tenants.update_tenant(tx, "acme", {"max_runs_per_min": 5}))
    await rig.apply(GATE, acme)
    await rig.apply(WAIT, acme)
    await rig.apply("{name: fails, steps: [{id: a, tool: t.quick}, {id: b, tool: t.fail}]}", acme)
    failed = await rig.start("fails", who=acme)
    assert (await rig.work_until(failed))["status"] == "failed"
    clock.advance(30)  # the next minute
    asked = []
    for _ in range(4):
        asked += [await rig.start(name, who=acme) for name in ("gate", "nap", "quick")]
        new_id = uuid7()
        await rig.database.run_in_transaction(
            lambda tx, new_id=new_id: resume.retry(tx, rig.plans, acme, failed, new_id)  # type: ignore[misc]
        )
        asked.append(new_id)
    (usage,) = await tenants.usage(rig.database, acme.tenant_id)
    assert (usage["runs_this_minute"], usage["runs_waiting"]) == (5, 11)
    for minute in range(4):
        if minute:
            clock.advance(60)
            await sweeps.resume_due(rig.database)
        async with rig.worker() as worker:
            await rig.until(asked[: 5 * (minute + 1)][-1], "waiting_approval", "waiting_external")
            await settled(rig, worker)
        moved = [run_id for run_id, _ in (await first_moves(rig))[1:]]
        assert sorted(moved) == sorted(asked[: 5 * (minute + 1)]), minute
    by_minute = Counter(at for _, at in (await first_moves(rig))[1:])
    assert sorted(by_minute.values(), reverse=True) == [5, 5, 5, 1]
    ends = Counter([(await rig.run(run_id))["status"] for run_id in asked])
    # Retries of a failed run kept its completed steps, and failed at the same step.
    assert ends == {"waiting_approval": 4, "waiting_external": 4, "succeeded": 4, "failed": 4}


async def settled(rig: Rig, worker: Worker) -> None:
    """Wait until the queue is empty and the worker holds nothing."""
    async with asyncio.timeout(20):
        while await rig.sql("SELECT FROM interlock.ready_run") or worker.drivers:
            pass


async def test_a_gate_over_the_cap_is_refused_to_who_will_not_wait(rig: Rig, acme: Principal) -> None:
    await rig.apply(GATE, acme)
    await rig.http().patch("/api/tenants/acme", json={"max_runs_per_min": 1})
    http = rig.http(await rig.key("op", "operator", tenant_id=acme.tenant_id))
    body = {"workflow": "gate"}
    assert (await http.post("/api/runs?over_cap=refuse", json=body)).json()["status"] == "waiting_approval"
    refused = await http.post("/api/runs?over_cap=refuse", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
    waits = await http.post("/api/runs", json=body)
    assert (waits.status_code, waits.json()["status"]) == (201, "pending")
    canceled = await http.post(f"/api/runs/{waits.json()['id']}/cancel")
    assert canceled.json()["status"] == "canceled"
    assert len(await rig.sql("SELECT FROM interlock.run")) == 2


async def test_places_are_given_once_each_however_many_ask_at_once(rig: Rig, acme: Principal) -> None:
    await rig.apply(GATE, acme)
    await asyncio.gather(*(rig.start(name, who=acme) for name in ("gate", "quick") * 40))
    rows = await rig.sql("SELECT count(*) FROM interlock.run GROUP BY resume_at ORDER BY resume_at NULLS FIRST")
    assert [row["count"] for row in rows] == [60, 20]


async def test_a_run_asked_for_twice_takes_one_place(rig: Rig, acme: Principal) -> None:
    await rig.apply(GATE, acme)
    new = await runs.prepare(rig.plans, acme, "gate")
    for _ in range(2):
        await rig.database.run_in_transaction(lambda tx: runs.start_waiting(tx, acme, new))
    (usage,) = await tenants.usage(rig.database, acme.tenant_id)
    assert usage["runs_this_minute"] == 1


async def test_usage_shows_each_tenant_its_own_and_the_operator_all(rig: Rig, acme: Principal) -> None:
    news = [await runs.prepare(rig.plans, acme, "quick") for _ in range(150)]
    await runs.start_many(rig.database, acme, news)
    own = rig.http(await rig.key("v", "viewer", tenant_id=acme.tenant_id))
    (usage,) = (await own.get("/api/usage")).json()["items"]
    assert usage == {
        "tenant_id": str(acme.tenant_id), "tenant": "acme", "weight": 1.0, "max_concurrency": None, "in_flight": 0,
        "max_runs_per_min": 60, "runs_this_minute": 60, "runs_waiting": 90, "max_writes_per_run": None, "ready": 60,
        "workflows": [],
    }  # fmt: skip
    first = (await rig.http().get("/api/usage?limit=1")).json()
    rest = (await rig.http().get(f"/api/usage?cursor={first['next_cursor']}")).json()
    assert [u["tenant"] for u in first["items"] + rest["items"]] == ["default", "acme"]
    viewer = rig.http(await rig.key("v", "viewer"))
    assert [u["tenant"] for u in (await viewer.get("/api/usage")).json()["items"]] == ["default"]


async def test_a_key_of_one_workspace_does_not_see_every_tenant(rig: Rig, acme: Principal) -> None:
    east = rig.http(await rig.key("east", "admin", workspace_id="east"))
    seen = [item["tenant"] for item in (await east.get("/api/usage")).json()["items"]]
    assert seen == ["default"]


async def test_caps_are_changed_later_by_the_operator_alone(rig: Rig, acme: Principal, clock: ManualClock) -> None:
    news = [await runs.prepare(rig.plans, acme, "quick") for _ in range(60)]
    await runs.start_many(rig.database, acme, news)
    changed = await rig.http().patch("/api/tenants/acme", json={"max_runs_per_min": 10, "weight": 2})
    assert (changed.status_code, changed.json()["max_runs_per_min"], changed.json()["weight"]) == (200, 10, 2.0)
    # The next run goes to the next minute, not to the minute that the old places would fill at the new size.
    new = await runs.prepare(rig.plans, acme, "quick")
    await runs.start_many(rig.database, acme, [new])
    (row,) = await rig.sql("SELECT resume_at FROM interlock.run WHERE id = $1", new.id)
    assert (row["resume_at"] - MINUTE).total_seconds() == 30
    await rig.http().patch("/api/tenants/acme", json={"max_runs_per_min": None, "max_concurrency": 3})
    (usage,) = await tenants.usage(rig.database, acme.tenant_id)
    assert (usage["max_runs_per_min"], usage["max_concurrency"], usage["weight"]) == (None, 3, 2.0)
    own = rig.http(await rig.key("a", "admin", tenant_id=acme.tenant_id))
    assert (await own.patch("/api/tenants/acme", json={"weight": 9})).status_code == 403
    assert (await rig.http().patch("/api/tenants/nobody", json={"weight": 9})).status_code == 404
    assert (await rig.http().patch("/api/tenants/acme", json={"max_concurrency": 0})).status_code == 422


@pytest.mark.parametrize(("tenant", "workflow", "whose"), [(2, 3, "tenant"), (3, 2, "workflow"), (None, 2, "workflow")])
async def test_the_stricter_cap_on_writes_counts(rig: Rig, tenant: int | None, workflow: int, whose: str) -> None:
    done: list[int] = []

    @rig.tool("t.write", writes=True, risk="low", idempotent=True)
    async def write(n: int) -> None:
        done.append(n)

    who = await rig.tenant("acme", max_writes_per_run=tenant)
    steps = ", ".join(f"{{id: s{n}, tool: t.write, input: {{n: {n}}}}}" for n in range(5))
    await rig.apply(f"{{name: writes, caps: {{max_writes_per_run: {workflow}}}, steps: [{steps}]}}", who)
    run = await rig.work_until(await rig.start("writes", who=who))
    assert (run["status"], run["reason"], done) == ("failed", "cap_exceeded", [0, 1])
    assert run["error"]["message"] == f"the run has made as many writes as its {whose} allows (2)"


@pytest.mark.parametrize(
    "caps",
    ["{max_writes_per_run: 0}", "{max_concurrency: 0}", "{max_runs_per_min: 2}", "{max_writes_per_run: many}", "7"],
)
def test_a_cap_that_cannot_be_is_a_fault(caps: str) -> None:
    with pytest.raises(DefinitionInvalid, match="caps"):
        parse(f"{{name: w, caps: {caps}, steps: [{{id: a, tool: t.t}}]}}")
