"""The policy judges a read only if its answer could be anything but `allow`."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from tests.governed.conftest import Shop, kill, notice
from tests.rig import Hold, Rig

from interlock.engine.policies import Policies
from interlock.policy.evaluator import CompiledPolicy
from interlock.store.pool import Database
from interlock.worker.worker import Worker

READS = '@id("reads") permit (principal, action in Action::"read", resource);\n'
PRIVATE = READS + (
    '@id("private") @reason("salaries are not for agents")\n'
    'forbid (principal, action == Action::"hr.look", resource) when { context.input.what == "salary" };\n'
)
ASK = READS + (
    '@id("ask") @decision("needs_approval") @tier("med")\n'
    'permit (principal, action == Action::"hr.look", resource) when { context.input.what == "salary" };\n'
)
LOOK = 'name: look\nsteps:\n  - {id: look, tool: hr.look, input: {what: "${input.what}"}}'


@pytest.fixture
async def office(shop: Shop, rig: Rig) -> Shop:
    @rig.tool("hr.look")
    async def look(what: str) -> str:
        shop.done.append(what)
        return f"the {what}"

    await rig.apply(LOOK)
    return shop


async def decisions(rig: Rig) -> list[Any]:
    rows = await rig.sql(
        "SELECT data -> 'decision' ->> 'answer' AS answer FROM interlock.journal_entry WHERE data ? 'decision'"
    )
    return [row["answer"] for row in rows]


async def test_a_read_that_is_forbidden_is_not_made(office: Shop, rig: Rig) -> None:
    assert (await office.admin.publish(PRIVATE))[0] == 200
    denied = await office.ended(await office.start(office.admin, "look", what="salary"))
    assert (denied["status"], denied["reason"], office.done) == ("failed", "policy_denied", [])
    assert denied["error"]["rules"] == ["private"]
    allowed = await office.ended(await office.start(office.admin, "look", what="phone"))
    assert (allowed["result"], office.done) == ("the phone", ["phone"])
    # The store keeps both decisions, for evidence and backtests; neither read left a receipt.
    assert sorted(await decisions(rig)) == ["allow", "deny"]
    assert await rig.sql("SELECT FROM interlock.receipt") == []
    _, found = await office.admin.post("/api/policy/backtest", {"policy": READS})
    assert (found["decisions"], found["changed"]) == (2, 1)


async def test_a_read_can_be_held_for_people(office: Shop, rig: Rig) -> None:
    assert (await office.admin.publish(ASK))[0] == 200
    run_id = await office.start(office.admin, "look", what="salary")
    asked = await office.held(run_id)
    assert (asked["action"]["tool"], asked["tier"], office.done) == ("hr.look", "med", [])
    status, refused = await office.admin.approve(asked["id"])
    assert (status, refused["code"]) == (403, "SELF_APPROVAL")
    ann = await office.person("ann")
    assert (await ann.approve(asked["id"], digest=asked["action"]["digest"]))[0] == 200
    run = await office.ended(run_id)
    assert (run["result"], office.done) == ("the salary", ["salary"])
    (said,) = await rig.sql("SELECT data FROM interlock.journal_entry WHERE step = 'look' AND to_state = 'succeeded'")
    assert f'"approval:{asked["id"]}"' in said["data"]
    again = await office.start(office.admin, "look", what="salary")
    assert (await office.held(again))["status"] == "requested", "a yes is for one step of one run"


async def test_without_a_rule_that_permits_reads_none_is_made(office: Shop) -> None:
    writes = '@id("writes") permit (principal, action in Action::"write", resource);'
    assert (await office.admin.publish(writes))[0] == 200
    run = await office.ended(await office.start(office.admin, "look", what="phone"))
    assert (run["reason"], office.done) == ("policy_denied", [])
    assert "no rule permits hr.look" in run["error"]["message"]


async def test_a_broken_policy_denies_reads_too(office: Shop, rig: Rig) -> None:
    assert (await office.admin.publish(READS))[0] == 200
    await rig.sql("UPDATE interlock.policy SET text = 'permit (principal, action, resource'")
    run = await office.ended(await office.start(office.admin, "look", what="phone"))
    assert (run["reason"], office.done) == ("policy_denied", [])
    assert "not valid any more" in run["error"]["message"]


async def test_a_rule_that_fails_while_it_is_evaluated_denies_the_read(office: Shop, rig: Rig) -> None:
    @rig.tool("hr.count")
    async def count(n: int) -> None:
        office.done.append("count")

    await rig.apply("name: count\nsteps: [{id: c, tool: hr.count, input: {n: 9223372036854775807}}]")
    over = '@id("f") forbid (principal, action == Action::"hr.count", resource) when { context.input.n + 1 < 0 };'
    assert (await office.admin.publish(READS + over))[0] == 200
    run = await office.ended(await office.start(office.admin, "count"))
    assert (run["reason"], office.done) == ("policy_denied", [])


async def test_a_policy_published_meanwhile_counts_for_the_next_read(office: Shop, rig: Rig) -> None:
    hold = Hold()

    @rig.tool("hr.wait")
    async def wait() -> None:
        await hold()

    await rig.apply("name: two\nsteps:\n  - {id: a, tool: hr.wait}\n  - {id: b, tool: hr.look, input: {what: salary}}")
    run_id = await office.start(office.admin, "two")
    async with rig.worker() as worker:
        await hold.inside()
        assert (await office.admin.publish(PRIVATE))[0] == 200
        async with asyncio.timeout(10):
            while worker.policies.at_hand(rig.admin.tenant_id) is not None:
                await rig.sql("SELECT 1")
        hold.release.set()
        run = await rig.until(run_id)
    assert (run["reason"], office.done) == ("policy_denied", [])


async def test_a_read_that_lost_its_worker_is_judged_again(office: Shop, rig: Rig) -> None:
    hold = Hold()

    @rig.tool("hr.stuck")
    async def stuck(what: str) -> None:
        office.done.append(what)
        await hold()

    await rig.apply("name: stuck\nsteps:\n  - {id: a, tool: hr.stuck, input: {what: salary}}")
    run_id = await office.start(office.admin, "stuck")
    worker = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await hold.inside()
    await kill(rig, worker)
    closed = '@id("no") forbid (principal, action == Action::"hr.stuck", resource);'
    assert (await office.admin.publish(READS + closed))[0] == 200
    await notice(rig)
    run = await office.ended(run_id)
    assert (run["reason"], office.done) == ("policy_denied", ["salary"])


async def test_under_the_default_policy_a_read_is_neither_judged_nor_asked_about(
    office: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    row = Database.row

    async def noted(self: Database, name: str, *args: Any, **options: Any) -> Any:
        asked.append(name)
        return await row(self, name, *args, **options)

    def judged(*_: Any) -> None:
        raise AssertionError("a read was judged")

    async def looked_up(*_: Any, **__: Any) -> None:
        raise AssertionError("the policy was asked for")

    run_id = await office.start(office.admin, "look", what="phone")
    monkeypatch.setattr(Database, "row", noted)
    monkeypatch.setattr(CompiledPolicy, "decide", judged)
    monkeypatch.setattr(Policies, "current", looked_up)
    run = await office.ended(run_id)
    assert (run["status"], "policy_in_force" in asked, await decisions(rig)) == ("succeeded", False, [])


async def test_a_tool_that_comes_later_is_judged_like_those_that_were_there(office: Shop, rig: Rig) -> None:
    """For example, an MCP server connects while the worker runs."""
    policies = Policies(rig.database, rig.tools)
    assert not (await policies.current(rig.admin.tenant_id)).always_allows("late.look")
    async with rig.worker():
        await rig.until(await office.start(office.admin, "look", what="phone"))

        @rig.tool("late.look")
        async def late() -> str:
            return "seen"

        await rig.apply("name: late\nsteps: [{id: a, tool: late.look}]")
        run = await rig.until(await office.start(office.admin, "late"))
    assert (run["status"], run["result"]) == ("succeeded", "seen")
    assert (await policies.current(rig.admin.tenant_id)).always_allows("late.look")


# ---------------------------------------------------------------- reads that are not idempotent


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "stopped"])
async def test_a_read_that_is_not_idempotent_is_not_repeated_after_a_crash(shop: Shop, rig: Rig, lost: bool) -> None:
    """specification BUG-3: the tool was called twice, and the step said `idempotent: true`."""
    hold = Hold()

    @rig.tool("queue.pop", idempotent=False)
    async def pop() -> str:
        shop.done.append("popped")
        await hold()
        return "first"

    await rig.apply("{name: pop, steps: [{id: a, tool: queue.pop}]}")
    run_id = await rig.start("pop")
    stop, impatient = asyncio.Event(), rig.settings.model_copy(update={"drain_seconds": 0.1})
    task = asyncio.create_task(Worker(rig.database, impatient, tools=rig.tools).run(stop))
    await hold.inside()
    if lost:
        await kill(rig, task)
        await notice(rig)
    else:
        stop.set()
        await task
    hold.release.set()
    run = await shop.ended(run_id)
    assert (run["status"], run["reason"], shop.done) == ("failed", "resume_failed", ["popped"])
    assert (run["error"]["code"], run["steps"][0]["idempotent"]) == ("RUN_RESUME_FAILED", False)
    assert "queue.pop" in run["error"]["message"] and "idempotent=False" in run["error"]["message"]
    status, again = await shop.admin.post(f"/api/runs/{run_id}/retry")
    assert status == 201 and (await shop.ended(UUID(again["id"])))["status"] == "succeeded"
    assert shop.done == ["popped", "popped"]


async def test_a_read_that_is_not_idempotent_and_was_not_begun_goes_on_after_a_crash(shop: Shop, rig: Rig) -> None:
    """The worker was lost during the step before it."""
    hold = Hold()

    @rig.tool("queue.look")
    async def look() -> None:
        await hold()

    @rig.tool("queue.pop", idempotent=False)
    async def pop() -> str:
        shop.done.append("popped")
        return "first"

    await rig.apply("{name: pop, steps: [{id: a, tool: queue.look}, {id: b, tool: queue.pop}]}")
    run_id = await rig.start("pop")
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await hold.inside()
    await kill(rig, task)
    await notice(rig)
    hold.release.set()
    run = await shop.ended(run_id)
    assert (run["status"], run["result"], shop.done) == ("succeeded", "first", ["popped"])
    assert (await rig.journal(run_id)).count("b: pending -claim-> running") == 1
