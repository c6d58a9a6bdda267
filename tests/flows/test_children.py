"""Runs that start runs: the child's end settles the parent's step, and the parent's end ends the child."""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from interlock import Context, FlowContext, StepFailed, Terminal
from interlock.engine.runs import run_signals
from tests.flows.test_crash import Steps
from tests.governed.conftest import lose
from tests.rig import Hold, Rig

SUB = """
name: sub
steps:
  - {id: only, tool: t.echo, input: {x: "${input.x}"}}
"""


@pytest.fixture(autouse=True)
def tools(rig: Rig) -> None:
    @rig.tool("t.echo")
    async def echo(x: Any = None) -> Any:
        return x

    @rig.tool("t.fail")
    async def fail() -> None:
        raise Terminal("no")


async def _children_of(rig: Rig, run_id: UUID) -> list[Any]:
    page = await rig.http().get("/api/runs", params={"parent_run_id": str(run_id)})
    items: list[Any] = page.json()["items"]
    return items


async def test_a_childs_result_is_the_steps_output(rig: Rig) -> None:
    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        return [await ctx.child("sub", {"x": 3}), await ctx.child("grandchild", {"x": 4})]

    @rig.flow("grandchild")
    async def grandchild(ctx: FlowContext, input: dict[str, int]) -> Any:
        return await ctx.child("sub", {"x": input["x"] * 2})

    await rig.apply(SUB)
    run = await rig.work_until(await rig.start("parent"))
    assert (run["status"], run["result"]) == ("succeeded", [3, 8]), run["error"]
    assert [(s["key"], s["kind"], s["output"]) for s in run["steps"]] == [("sub", "flow", 3), ("grandchild", "flow", 8)]
    made = await _children_of(rig, UUID(str(run["id"])))
    told = ("source", "ref", "initiator", "user")
    assert [(child["workflow"], *(child["trigger"][name] for name in told)) for child in made] == [
        ("grandchild", "run", str(run["id"]), "system", "admin"),
        ("sub", "run", str(run["id"]), "system", "admin"),
    ]
    assert await rig.sql("SELECT FROM interlock.run_signal") == []


async def test_a_child_that_fails_is_an_exception_in_its_parent(rig: Rig) -> None:
    @rig.flow("child")
    async def child(ctx: FlowContext) -> Any:
        await ctx.call("t.fail")

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        try:
            await ctx.child("child")
        except StepFailed as failed:
            return failed.error

    run = await rig.work_until(await rig.start("parent"))
    [made] = await _children_of(rig, UUID(str(run["id"])))
    assert run["result"] == {
        "type": "ChildFailed", "child": made["id"], "reason": "terminal_error",
        "message": f"run {made['id']} of child is failed: no",
    }  # fmt: skip


async def test_a_child_of_nothing_fails_its_step(rig: Rig) -> None:
    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        await ctx.child("nowhere")

    run = await rig.work_until(await rig.start("parent"))
    assert (run["status"], run["error"]["message"]) == ("failed", "no workflow nowhere; apply it first")


async def test_whoever_asked_for_the_parent_asks_for_the_child(rig: Rig) -> None:
    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        await ctx.child("child")

    @rig.flow("child")
    async def child(ctx: FlowContext) -> Any:
        await ctx.approve("ok", tier="low")

    operator = await rig.person("op", "operator")
    run_id = await rig.start("parent", who=operator)
    async with rig.worker():
        await rig.until(run_id, "waiting_external")
        found = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", run_id)
        await rig.until(found[0]["id"], "waiting_approval")
        [row] = await rig.sql("SELECT requested_by, requester FROM interlock.run WHERE id = $1", found[0]["id"])
        [mine] = await rig.sql("SELECT requested_by, requester FROM interlock.run WHERE id = $1", run_id)
        assert tuple(row) == tuple(mine) and row["requested_by"] == operator.actor
        await rig.approve(found[0]["id"])
        assert (await rig.until(run_id, "x"))["status"] == "succeeded"


async def test_a_tree_of_fifty_runs_in_flight_is_stopped_from_its_root(rig: Rig) -> None:
    held = Hold()

    @rig.tool("t.hold")
    async def hold() -> None:
        await held()

    @rig.flow("tree")
    async def tree(ctx: FlowContext, input: dict[str, int]) -> Any:
        if input["depth"] == 0:
            await ctx.call("t.hold")
        below = {"depth": input["depth"] - 1}
        await ctx.gather(*(ctx.child("tree", below) for _ in range({2: 7, 1: 6}.get(input["depth"], 0))))

    root = await rig.start("tree", {"depth": 2})
    async with rig.worker(capacity=60) as worker:
        async with asyncio.timeout(30):
            while held.entries < 42:
                held.entered.clear()
                await held.inside()
            await rig.cancel(root)
            while await rig.sql("SELECT FROM interlock.run WHERE completed_at IS NULL"):
                await run_signals.deliver(rig.database, rig.plans)
                await asyncio.sleep(0)
        await worker.idle()
    ended = await rig.sql("SELECT status, reason, count(*) FROM interlock.run GROUP BY 1, 2 ORDER BY 3")
    counted = {(row["status"], row["reason"]): row["count"] for row in ended}
    assert counted == {("canceled", "canceled_by_user"): 1, ("canceled", "canceled_by_parent"): 49}
    assert held.interrupted
    await run_signals.deliver(rig.database, rig.plans)
    assert await rig.sql("SELECT FROM interlock.run_signal") == []


async def test_a_parent_that_runs_out_of_time_takes_its_children_with_it(rig: Rig) -> None:
    @rig.flow("parent", timeout="1h")
    async def parent(ctx: FlowContext) -> Any:
        await ctx.child("child")

    @rig.flow("child")
    async def child(ctx: FlowContext) -> Any:
        await ctx.sleep("7d")

    run_id = await rig.start("parent")
    rig.clock.freeze()
    async with rig.worker() as worker:
        await rig.until(run_id, "waiting_external")
        [made] = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", run_id)
        await rig.until(made["id"], "waiting_external")
        await worker.idle()
    rig.clock.advance(3700)
    await rig.sweep()
    await rig.sweep()
    assert (await rig.run(run_id))["reason"] == "timed_out"
    assert (await rig.run(made["id"]))["reason"] == "canceled_by_parent"


async def test_a_worker_that_dies_around_the_start_of_a_child_starts_one(rig: Rig) -> None:
    steps = Steps(rig)

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        await ctx.call("t.read", n=1)
        return await ctx.child("child")

    @rig.flow("child")
    async def child(ctx: FlowContext) -> Any:
        return await ctx.call("t.read", n=2)

    run_id = await rig.start("parent")
    await steps.die_in(1)
    await steps.die_in(2)
    run = await rig.work_until(run_id)
    assert (run["result"], len(await _children_of(rig, run_id))) == (2, 1)


async def test_the_word_of_a_childs_end_is_not_lost_with_the_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker remains to deliver the message: the next sweep delivers it."""
    ended = asyncio.Event()

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        return await ctx.child("child")

    @rig.flow("child")
    async def child(ctx: FlowContext) -> Any:
        return "grown"

    from interlock.worker.worker import Worker

    monkeypatch.setattr(Worker, "deliver_signals", lambda self: ended.set())
    run_id = await rig.start("parent")
    worker = Worker(rig.database, rig.settings, tools=rig.tools)
    task = asyncio.create_task(worker.run(asyncio.Event()))
    await asyncio.wait_for(ended.wait(), 20)
    await lose(rig, task)
    await rig.sweep()
    run = await rig.work_until(run_id)
    assert run["result"] == "grown"


async def test_a_child_cannot_be_without_a_parent(rig: Rig) -> None:
    import asyncpg

    await rig.apply(SUB)
    run_id = await rig.start("sub")
    with pytest.raises(asyncpg.CheckViolationError, match="run_parent_step"):
        await rig.sql("UPDATE interlock.run SET parent_step = 'x' WHERE id = $1", run_id)
    with pytest.raises(asyncpg.CheckViolationError, match="run_awaits_flow"):
        await rig.sql("UPDATE interlock.run SET awaits_flow = 'x' WHERE id = $1", run_id)


async def test_a_retried_flow_takes_over_all_but_the_failure_that_ended_it(rig: Rig) -> None:
    called: list[str] = []

    @rig.tool("t.once")
    async def once(ctx: Context, x: str) -> str:
        called.append(x)
        if len(called) <= 2:
            raise Terminal(f"no {x}")
        return x

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        chosen = ctx.random()
        try:
            await ctx.call("t.once", x="caught")
        except StepFailed as failed:
            said = failed.error["message"]
        await ctx.call("t.echo", x=chosen)
        return [said, await ctx.call("t.once", x="let go")]

    failed = await rig.work_until(await rig.start("parent"))
    assert (failed["status"], failed["error"]["step"]) == ("failed", "t.once#2")
    again = await rig.http().post(f"/api/runs/{failed['id']}/retry")
    assert again.status_code == 201, again.text
    run = await rig.work_until(UUID(again.json()["id"]))
    assert (run["status"], run["result"]) == ("succeeded", ["no caught", "let go"]), run["error"]
    assert called == ["caught", "let go", "let go"]


async def test_the_child_of_a_retried_parent_does_no_effect_a_second_time(rig: Rig) -> None:
    """The retry is another run, but the effect that the first run made, or may have made, is the same effect."""
    done: list[str] = []

    @rig.tool("bank.pay", writes=True, risk="low")
    async def pay(ctx: Context, to: str) -> str:
        done.append(to)
        return "paid"

    @rig.tool("bank.tell", writes=True, risk="low", idempotent=True)
    async def tell(ctx: Context) -> str:
        done.append(ctx.idempotency_key)
        if len(done) < 3:
            raise Terminal("no answer")
        return "told"

    await rig.apply(
        "name: pays\nsteps:\n  - {id: pay, tool: bank.pay, input: {to: ada}}\n  - {id: tell, tool: bank.tell}"
    )
    await rig.apply("name: outer\nsteps: [{id: sub, flow: pays}]")
    failed = await rig.work_until(await rig.start("outer"))
    again = await rig.http().post(f"/api/runs/{failed['id']}/retry")
    run = await rig.work_until(UUID(again.json()["id"]))
    assert (run["status"], run["result"]) == ("succeeded", "told"), run["error"]
    assert (done.count("ada"), len(set(done[1:]))) == (1, 1)
    other = await rig.work_until(await rig.start("outer"))
    assert (other["status"], done.count("ada"), len(set(done))) == ("succeeded", 2, 3), "another parent, other effects"


# ---------------------------------------------------------------- in a workflow


async def test_a_workflow_runs_a_flow_as_a_step(rig: Rig) -> None:
    @rig.flow("double")
    async def double(ctx: FlowContext, input: dict[str, int]) -> Any:
        await ctx.sleep("1h")
        return await ctx.call("t.echo", x=input["n"] * 2)

    await rig.apply("""
name: outer
steps:
  - {id: doubled, flow: double, input: {n: "${input.n}"}}
  - {id: shown, tool: t.echo, input: {x: "${steps.doubled.output}"}}
""")
    run_id = await rig.start("outer", {"n": 21})
    rig.clock.freeze()
    async with rig.worker() as worker:
        await rig.until(run_id, "waiting_external")
        [made] = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", run_id)
        await rig.until(made["id"], "waiting_external")
        rig.clock.advance(3601)
        await rig.sweep()
        run = await rig.until(run_id, "x")
        await worker.idle()
    assert (run["status"], run["result"], run["step"]["doubled"]["kind"]) == ("succeeded", 42, "flow")


async def test_a_workflow_whose_flow_fails_fails(rig: Rig) -> None:
    @rig.flow("bad")
    async def bad(ctx: FlowContext) -> Any:
        raise ValueError("no")

    await rig.apply("name: outer\nsteps:\n  - {id: a, flow: bad}")
    run = await rig.work_until(await rig.start("outer"))
    assert (run["status"], run["reason"], run["error"]["step"]) == ("failed", "terminal_error", "a")
    assert run["error"]["message"].endswith("of bad is failed: no")


async def test_a_child_whose_input_has_no_value_fails_its_step(rig: Rig) -> None:
    @rig.flow("child")
    async def child(ctx: FlowContext, input: Any) -> Any:
        return input

    await rig.apply("name: outer\nsteps:\n  - {id: sub, flow: child, input: {n: '${input.n}'}}")
    run = await rig.work_until(await rig.start("outer", {}))
    assert (run["status"], run["reason"], run["error"]["step"]) == ("failed", "terminal_error", "sub")
    assert "input.n" in run["error"]["message"]
    assert await rig.sql("SELECT FROM interlock.run WHERE parent_run_id IS NOT NULL") == []


async def test_a_parent_that_is_stopped_in_the_middle_of_a_step_stops_its_children(rig: Rig) -> None:
    held = Hold()

    @rig.tool("t.hold")
    async def hold() -> None:
        await held()

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        await ctx.gather(ctx.child("child"), ctx.call("t.hold"))

    @rig.flow("child")
    async def child(ctx: FlowContext) -> Any:
        await ctx.sleep("7d")

    run_id = await rig.start("parent")
    async with rig.worker() as worker:
        await held.inside()
        [made] = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", run_id)
        await rig.until(made["id"], "waiting_external")
        await rig.cancel(run_id)
        assert (await rig.until(run_id, "x"))["status"] == "canceled"
        await worker.idle()
        await rig.sweep()
        assert (await rig.until(made["id"], "x"))["reason"] == "canceled_by_parent"
    assert held.interrupted


# ---------------------------------------------------------------- caps and compensation


async def test_runs_of_a_flow_with_a_cap_are_held_back_and_so_are_children(rig: Rig) -> None:
    held = Hold()

    @rig.tool("t.hold")
    async def hold() -> None:
        await held()

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        await ctx.gather(*(ctx.child("child") for _ in range(3)))

    @rig.flow("child", max_concurrency=1)
    async def child(ctx: FlowContext) -> Any:
        await ctx.sleep("0s")
        await ctx.call("t.hold")

    run_id, alone = await rig.start("parent"), await rig.start("child")
    async with rig.worker():
        await held.inside()
        await rig.until(run_id, "waiting_external")
        [(waiting,)] = await rig.sql("SELECT count(*) FROM interlock.blocked_run")
        [(leased,)] = await rig.sql(
            "SELECT count(*) FROM interlock.run WHERE has_concurrency_limit AND lease_worker IS NOT NULL"
        )
        assert (held.entries, waiting, leased) == (1, 3, 1)
        held.release.set()
        assert (await rig.until(run_id, "x"))["status"] == "succeeded"
        assert (await rig.until(alone, "x"))["status"] == "succeeded"
    assert await rig.sql("SELECT FROM interlock.blocked_run") == []


async def test_children_take_places_in_their_tenants_minute(rig: Rig) -> None:
    who = await rig.tenant("acme", max_runs_per_min=2)

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        return await ctx.gather(*(ctx.child("sub", {"x": n}) for n in range(3)))

    await rig.apply(SUB, who)
    rig.clock.freeze()
    run_id = await rig.start("parent", who=who)
    async with rig.worker() as worker:
        await rig.until(run_id, "waiting_external")
        [(waiting,)] = await rig.sql(
            "SELECT count(*) FROM interlock.run WHERE status = 'pending' AND resume_at IS NOT NULL"
        )
        assert waiting == 2
        await worker.idle()
    rig.clock.advance(60)
    await rig.sweep()
    assert (await rig.work_until(run_id))["result"] == [0, 1, 2]


UNDONE = """
name: undone
steps:
  - {id: done, tool: t.do, needs: [], compensate: {tool: t.undo}}
  - {id: sub, flow: child, needs: []}
  - {id: last, tool: t.fail, needs: [asked]}
  - {id: asked, needs: [done], approval: {tier: low}}
"""


@pytest.mark.parametrize("how", ["fails", "is canceled"])
async def test_a_parent_that_undoes_what_it_did_stops_its_children_first(rig: Rig, how: str) -> None:
    undoing = Hold()

    @rig.tool("t.do")
    async def do() -> None: ...

    @rig.tool("t.undo")
    async def undo() -> None:
        await undoing()

    @rig.flow("child")
    async def child(ctx: FlowContext) -> Any:
        await ctx.sleep("7d")

    await rig.plans.current(rig.admin.tenant_id, "child", None)
    await rig.apply(UNDONE)
    run_id = await rig.start("undone")
    async with rig.worker():
        await rig.until(run_id, "waiting_approval")
        [made] = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", run_id)
        await rig.until(made["id"], "waiting_external")
        await (rig.approve(run_id) if how == "fails" else rig.cancel(run_id))
        await undoing.inside()
        await run_signals.deliver(rig.database, rig.plans)  # or the worker delivers it at this moment
        assert (await rig.until(made["id"], "x"))["reason"] == "canceled_by_parent"
        undoing.release.set()
        run = await rig.until(run_id, "x")
    assert (run["status"], run["step"]["sub"]["status"]) == ("failed" if how == "fails" else "canceled", "canceled")
    await run_signals.deliver(rig.database, rig.plans)
    assert await rig.sql("SELECT FROM interlock.run_signal") == []
