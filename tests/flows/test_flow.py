"""Flows: Python functions on a journal."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from interlock import Context, FlowContext, Rejected, StepFailed, Terminal
from tests.rig import Hold, Rig


@pytest.fixture
def calls(rig: Rig) -> list[str]:
    """What `t.echo`, `t.fail` and `t.write` were called with."""
    seen: list[str] = []

    @rig.tool("t.echo")
    async def echo(ctx: Context, x: Any = None) -> Any:
        seen.append(f"{ctx.step}={x}")
        return x

    @rig.tool("t.fail")
    async def fail(ctx: Context, x: Any = None) -> Any:
        seen.append(f"{ctx.step}={x}")
        raise Terminal(f"no {x}")

    @rig.tool("t.write", writes=True, risk="low")
    async def write(ctx: Context, x: Any = None) -> Any:
        seen.append(f"{ctx.step}={x}")
        return {"wrote": x}

    return seen


async def test_a_flow_is_started_by_its_name_and_each_call_is_a_step(rig: Rig, calls: list[str]) -> None:
    @rig.flow("sum")
    async def add_up(ctx: FlowContext, input: dict[str, Any]) -> Any:
        total = 0
        for number in input["numbers"]:
            total += await ctx.call("t.echo", x=number)
        return {"total": total}

    started = await rig.http().post("/api/runs", json={"workflow": "sum", "input": {"numbers": [1, 2, 3]}})
    assert started.status_code == 201, started.text
    run = await rig.work_until(started.json()["id"])
    assert (run["status"], run["result"]) == ("succeeded", {"total": 6})
    assert calls == ["t.echo=1", "t.echo#2=2", "t.echo#3=3"]
    assert [(s["key"], s["kind"], s["tool"], s["status"], s["output"]) for s in run["steps"]] == [
        ("t.echo", "tool", "t.echo", "succeeded", 1),
        ("t.echo#2", "tool", "t.echo", "succeeded", 2),
        ("t.echo#3", "tool", "t.echo", "succeeded", 3),
    ]
    shown = (await rig.http().get(f"/api/runs/{run['id']}")).json()
    assert [step["index"] for step in shown["steps"]] == [0, 1, 2]


async def test_a_write_of_a_flow_has_its_receipt_and_its_decision(rig: Rig, calls: list[str]) -> None:
    @rig.flow("write")
    async def write(ctx: FlowContext, input: Any) -> Any:
        return await ctx.call("t.write", x="a")

    run = await rig.work_until(await rig.start("write"))
    assert run["result"] == {"wrote": "a"}
    [receipt] = (await rig.http().get(f"/api/runs/{run['id']}/receipts")).json()["items"]
    assert (receipt["step_key"], receipt["status"]) == ("t.write", "succeeded")


async def test_a_flow_waits_for_people_and_for_time_without_a_worker(rig: Rig, calls: list[str]) -> None:
    @rig.flow("gated")
    async def gated(ctx: FlowContext, input: Any) -> Any:
        before = ctx.now()
        await ctx.approve("purge", tier="low", summary="3 rows")
        await ctx.sleep("2h")
        await ctx.call("t.echo", x=1)
        return (ctx.now() - before).total_seconds()

    run_id = await rig.start("gated")
    rig.clock.freeze()
    run = await rig.work_until(run_id, "waiting_approval")
    assert run["status"] == "waiting_approval" and run["step"]["purge"]["kind"] == "approval"
    [question] = (await rig.http().get("/api/approvals")).json()["items"]
    assert (question["summary"], question["tier"]) == ("3 rows", "low")
    await rig.approve(run_id)
    run = await rig.work_until(run_id, "waiting_external")
    assert run["step"]["sleep"]["status"] == "waiting_external"
    rig.clock.advance(7201)
    await rig.sweep()
    run = await rig.work_until(run_id)
    assert run["status"] == "succeeded" and run["result"] >= 7200
    assert calls == ["t.echo=1"]


async def test_a_refusal_is_an_exception_that_the_flow_may_catch(rig: Rig, calls: list[str]) -> None:
    @rig.flow("asks")
    async def asks(ctx: FlowContext, input: dict[str, Any]) -> Any:
        try:
            await ctx.approve("ok")
        except Rejected as rejected:
            if not input["catch"]:
                raise
            return await ctx.call("t.echo", x=f"{rejected.step} {rejected.reason}")

    caught, let_go = await rig.start("asks", {"catch": True}), await rig.start("asks", {"catch": False})
    async with rig.worker():
        for run_id in (caught, let_go):
            await rig.until(run_id, "waiting_approval")
            await rig.decide(run_id, approves=False, reason="not today")
        run = await rig.until(caught, "x")
        assert (run["status"], run["result"]) == ("succeeded", "ok rejected")
        run = await rig.until(let_go, "x")
    assert (run["status"], run["reason"], run["error"]["step"]) == ("failed", "rejected", "ok")
    assert run["error"]["message"] == "not today"


async def test_a_failed_step_is_an_exception_that_the_flow_may_catch(rig: Rig, calls: list[str]) -> None:
    @rig.flow("tries")
    async def tries(ctx: FlowContext, input: dict[str, Any]) -> Any:
        try:
            await ctx.call("t.fail", x=1)
        except StepFailed as failed:
            await ctx.call("t.echo", x=failed.error["message"])
        await ctx.call("t.fail", x=2)

    run = await rig.work_until(await rig.start("tries"))
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    assert run["error"] == {"type": "Terminal", "message": "no 2", "step": "t.fail#2"}
    assert calls == ["t.fail=1", "t.echo=no 1", "t.fail#2=2"]


async def test_what_the_policy_forbids_ends_the_flow(rig: Rig, calls: list[str]) -> None:
    @rig.flow("forbidden")
    async def forbidden(ctx: FlowContext, input: Any) -> Any:
        try:
            await ctx.call("t.write", x=1)
        except StepFailed:
            await ctx.call("t.echo", x="went on")

    await rig.http().put("/api/policy", content=b'@id("no") forbid(principal, action, resource);')
    run = await rig.work_until(await rig.start("forbidden"))
    assert (run["status"], run["reason"], calls) == ("failed", "policy_denied", [])


async def test_what_is_gathered_is_done_side_by_side(rig: Rig, calls: list[str]) -> None:
    holds = {"a": Hold(), "b": Hold()}

    @rig.tool("t.hold")
    async def hold(name: str) -> str:
        await holds[name]()
        return name

    @rig.flow("both")
    async def both(ctx: FlowContext, input: Any) -> Any:
        async def twice(x: int) -> Any:
            return await ctx.call("t.echo", x=x) + await ctx.call("t.echo", x=x)

        held = await ctx.gather(ctx.call("t.hold", name="a"), ctx.call("t.hold", name="b"))
        doubled = await ctx.gather(twice(1), twice(2), ctx.call("t.echo", x=5))
        return [held, doubled]

    run_id = await rig.start("both")
    async with rig.worker():
        await asyncio.gather(*(held.inside() for held in holds.values()))
        for held in holds.values():
            held.release.set()
        run = await rig.until(run_id, "x")
    assert run["result"] == [["a", "b"], [2, 4, 5]], run["error"]
    assert set(run["step"]) == {
        "t.hold", "t.hold#2", "t.echo", "gather#2.0/t.echo", "gather#2.0/t.echo#2", "gather#2.1/t.echo",
        "gather#2.1/t.echo#2",
    }  # fmt: skip


async def test_gather_raises_the_first_failure_when_all_are_settled(rig: Rig, calls: list[str]) -> None:
    @rig.flow("some")
    async def some(ctx: FlowContext, input: dict[str, Any]) -> Any:
        asked = [ctx.call("t.fail", x=1), ctx.call("t.echo", x=2), ctx.call("t.fail", x=3)]
        found = await ctx.gather(*asked, return_exceptions=input["keep"])
        return [str(one) for one in found]

    kept, raised = await rig.start("some", {"keep": True}), await rig.start("some", {"keep": False})
    async with rig.worker():
        assert (await rig.until(kept, "x"))["result"] == ["t.fail: no 1", "2", "t.fail#2: no 3"]
        run = await rig.until(raised, "x")
    assert (run["status"], run["error"]["message"]) == ("failed", "no 1")
    assert Counter(step["status"] for step in run["steps"]) == {"failed": 2, "succeeded": 1}


async def test_a_branch_goes_on_with_its_yes_while_another_waits_for_its_own(rig: Rig, calls: list[str]) -> None:
    @rig.flow("two-questions")
    async def two_questions(ctx: FlowContext) -> Any:
        async def ask(name: str) -> Any:
            await ctx.approve(name, tier="low")
            return await ctx.call("t.echo", x=name)

        return await ctx.gather(ask("a"), ask("b"))

    run_id = await rig.start("two-questions")
    await rig.work_until(run_id, "waiting_approval")
    for name in ("b", "a"):
        [row] = await rig.sql(
            "SELECT id FROM interlock.approval WHERE run_id = $1 AND step LIKE '%/' || $2", run_id, name
        )
        approved = await rig.http().post(f"/api/approvals/{row['id']}/approve", json={})
        assert approved.status_code == 200, approved.text
        run = await rig.work_until(run_id, "waiting_approval")
        assert calls[-1].endswith(f"={name}")
    assert (run["status"], run["result"]) == ("succeeded", ["a", "b"])


async def test_values_that_change_are_the_same_when_the_flow_is_run_again(rig: Rig, calls: list[str]) -> None:
    @rig.flow("values")
    async def values(ctx: FlowContext, input: Any) -> Any:
        told = [str(ctx.now()), ctx.random(), str(ctx.uuid()), ctx.random()]
        await ctx.call("t.echo", x=told)
        await ctx.approve("ok", tier="low")
        return told

    run_id = await rig.start("values")
    run = await rig.work_until(run_id, "waiting_approval")
    await rig.approve(run_id)
    run = await rig.work_until(run_id)
    assert run["result"] == run["step"]["t.echo"]["output"]
    assert len(set(map(str, run["result"]))) == 4
    assert len(calls) == 1


# ---------------------------------------------------------------- misuse


async def _failing(rig: Rig, body: Any) -> dict[str, Any]:
    rig.flow("wrong", version=1)(body)
    run = await rig.work_until(await rig.start("wrong"))
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    error: dict[str, Any] = run["error"]
    return error


async def test_what_a_tool_returned_is_the_same_when_the_flow_is_run_again(rig: Rig, calls: list[str]) -> None:
    """This also holds where the database writes the value differently: key order, large numbers, minus zero."""
    numbers = [1e16, -1e16, 1.2345678901234568e17, 1e19, -1e19, 1e20, 1.0, -0.0, 1e-7, 1e308, 2**63, 2**64 - 1]

    @rig.tool("t.stock")
    async def stock() -> Any:
        return {"widgets": 1, "ink": 2, "é": 3, "zz": {"nuts": numbers, "cap": 4}}

    told: list[str] = []

    @rig.flow("stock")
    async def count(ctx: FlowContext) -> Any:
        found = await ctx.call("t.stock")
        told.append(repr(found))
        for name in found:
            await ctx.call("t.echo", x=[name, found[name]])
        await ctx.approve("ok", tier="low")
        return list(found)

    run_id = await rig.start("stock")
    await rig.work_until(run_id, "waiting_approval")
    await rig.approve(run_id)
    run = await rig.work_until(run_id)
    assert (run["status"], run["result"]) == ("succeeded", ["zz", "é", "ink", "widgets"]), run["error"]
    assert len(told) == 2 and told[0] == told[1]


async def test_a_flow_that_raises_fails_with_what_it_raised_and_where(rig: Rig) -> None:
    async def body(ctx: FlowContext) -> None:
        raise KeyError("since")

    error = await _failing(rig, body)
    assert (error["type"], error["message"]) == ("KeyError", "'since'")
    assert error["where"].startswith("body at test_flow.py:")


async def test_awaiting_what_is_no_step_is_refused_and_says_what_to_do(rig: Rig) -> None:
    async def body(ctx: FlowContext) -> None:
        await asyncio.sleep(1)

    error = await _failing(rig, body)
    assert error["type"] == "FlowUsageError" and "ctx.sleep instead of asyncio.sleep" in error["message"]


async def test_giving_way_to_the_loop_is_refused_too(rig: Rig) -> None:
    async def body(ctx: FlowContext) -> None:
        await asyncio.sleep(0)

    assert (await _failing(rig, body))["type"] == "FlowUsageError"


async def test_a_call_that_nobody_awaits_is_an_error_and_not_silence(rig: Rig, calls: list[str]) -> None:
    async def body(ctx: FlowContext) -> None:
        ctx.call("t.echo", x=1)

    error = await _failing(rig, body)
    assert error["message"] == 'ctx.call("t.echo") was asked for and never awaited'
    assert calls == []


async def test_asking_from_a_task_of_its_own_is_refused(rig: Rig, calls: list[str]) -> None:
    async def body(ctx: FlowContext) -> Any:
        async def inner() -> Any:
            return await ctx.call("t.echo", x=1)

        return await asyncio.create_task(inner())

    error = await _failing(rig, body)
    assert error["type"] == "FlowUsageError" and "ctx.gather instead of asyncio.gather" in error["message"]
    await asyncio.sleep(0)
    assert calls == []


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda ctx: ctx.call("t.echo", x=object()), "the input of t.echo is not JSON"),
        (lambda ctx: ctx.call("no such"), "'no such' is no name for a step's tool"),
        (lambda ctx: ctx.approve("ok", tier="huge"), "tier is low, med or high, not 'huge'"),
        (lambda ctx: ctx.sleep("soon"), "'soon' is not a duration"),
        (lambda ctx: ctx.child("sub", {"x": ctx.secret("s")}), "a secret can only go into the input of a tool"),
        (lambda ctx: ctx.call("t.echo", x="a\0b"), "a NUL character was asked with"),
        (lambda ctx: ctx.approve("ok", summary="a\0b"), "a NUL character was asked with"),
        (lambda ctx: ctx.step("a b"), "'a b' is no name for a step's key"),
        (lambda ctx: ctx.step(max_attempts=0), "max_attempts is at least 1"),
    ],
)
async def test_a_wrong_call_says_what_would_be_right(rig: Rig, ask: Any, says: str) -> None:
    async def body(ctx: FlowContext) -> None:
        await ask(ctx)

    error = await _failing(rig, body)
    assert error["type"] == "FlowUsageError" and says in error["message"]


async def test_a_result_that_cannot_be_kept_fails_the_run(rig: Rig) -> None:
    async def body(ctx: FlowContext) -> Any:
        return object()

    assert "what the flow returned cannot be kept" in (await _failing(rig, body))["message"]


async def test_a_finally_that_asks_for_more_does_not_disturb_the_wait(rig: Rig, calls: list[str]) -> None:
    @rig.flow("tidy")
    async def tidy(ctx: FlowContext) -> None:
        try:
            await ctx.approve("ok", tier="low")
        finally:
            await ctx.call("t.echo", x="tidied")

    run_id = await rig.start("tidy")
    await rig.work_until(run_id, "waiting_approval")
    assert calls == []
    await rig.approve(run_id)
    run = await rig.work_until(run_id)
    assert (run["status"], calls) == ("succeeded", ["t.echo=tidied"])
