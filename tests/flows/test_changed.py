"""A flow that changed under its runs: they continue with the version they started with, or report what does not fit."""

import contextlib
from typing import Any

import pytest

from interlock import FlowContext
from interlock.engine.queueing import leases
from interlock.engine.runs import flow_deployments
from interlock.errors import Invalid
from interlock.flows.registry import version_of
from interlock.lifecycle import WorkerEvent, WorkerState
from interlock.tools import Registry, flow
from interlock.worker.worker import Worker
from tests.rig import Hold, Rig
from tests.supervised.conftest import until


@pytest.fixture(autouse=True)
def tools(rig: Rig) -> None:
    @rig.tool("t.echo")
    async def echo(x: Any = None) -> Any:
        return x

    @rig.tool("t.other")
    async def other(x: Any = None) -> Any:
        return x

    @rig.tool("t.write", writes=True, risk="low")
    async def write(amount: int, note: str = "") -> Any:
        return amount


def deploy(rig: Rig, function: Any, name: str = "f", **options: Any) -> None:
    """Simulate another process with new code: the earlier definitions are gone."""
    rig.tools.flows.__init__()  # type: ignore[misc]
    rig.flow(name, **options)(function)


async def as_it_was(ctx: FlowContext) -> Any:
    await ctx.call("t.echo", x=1)
    await ctx.call("t.write", amount=5, note="a")
    ctx.random()
    await ctx.approve("ok", tier="low")
    return await ctx.call("t.echo", x=2)


async def _another_call(ctx: FlowContext) -> Any:
    await ctx.call("t.other", x=1)
    await ctx.call("t.write", amount=5, note="a")


async def _another_order(ctx: FlowContext) -> Any:
    await ctx.call("t.write", amount=5, note="a")
    await ctx.call("t.echo", x=1)


async def _another_input(ctx: FlowContext) -> Any:
    await ctx.call("t.echo", x=1)
    await ctx.call("t.write", amount=6, note="a")


async def _no_value(ctx: FlowContext) -> Any:
    await ctx.call("t.echo", x=1)
    await ctx.call("t.write", amount=5, note="a")
    await ctx.approve("ok", tier="low")


async def _a_value_for_a_call(ctx: FlowContext) -> Any:
    with contextlib.suppress(Exception):  # the flow does not decide about this
        ctx.now()


async def _an_end_too_soon(ctx: FlowContext) -> Any:
    return await ctx.call("t.echo", x=1)


async def _other_terms(ctx: FlowContext) -> Any:
    await ctx.call("t.echo", x=1)
    await ctx.call("t.write", amount=5, note="a")
    ctx.random()
    await ctx.approve("ok", tier="high")


@pytest.mark.parametrize(
    ("changed", "step", "says"),
    [
        (
            _another_call,
            "t.echo",
            'ctx.call("t.other"); its history has ctx.call("t.echo") (step t.echo) there',
        ),
        (
            _another_order,
            "t.echo",
            'ctx.call("t.write"); its history has ctx.call("t.echo") (step t.echo) there',
        ),
        (_another_input, "t.write", "with another input than its history has (amount)"),
        (_no_value, "ctx.random()", 'asks for ctx.approve("ok"); its history has ctx.random() there'),
        (_a_value_for_a_call, "t.echo", 'asks for ctx.now() where its history has ctx.call("t.echo") (step t.echo)'),
        (_an_end_too_soon, "t.write", 'returned; its history has ctx.call("t.write") (step t.write), which it did not'),
        (_other_terms, "ok", 'ctx.approve("ok") with other terms than its history has'),
    ],
)
async def test_a_changed_flow_stops_and_names_the_step(rig: Rig, changed: Any, step: str, says: str) -> None:
    deploy(rig, as_it_was, version=1)
    run_id = await rig.start("f")
    await rig.work_until(run_id, "waiting_approval")
    deploy(rig, changed, version=1)
    await rig.approve(run_id)
    run = await rig.work_until(run_id)
    assert (run["status"], run["reason"]) == ("failed", "resume_failed")
    assert (run["error"]["code"], run["error"]["step"]) == ("NONDETERMINISM", step)
    assert says in run["error"]["message"], run["error"]


async def test_a_flow_that_was_only_lengthened_goes_on(rig: Rig) -> None:
    async def longer(ctx: FlowContext) -> Any:
        await as_it_was(ctx)
        return await ctx.call("t.other", x="more")

    deploy(rig, as_it_was, version=1)
    run_id = await rig.start("f")
    await rig.work_until(run_id, "waiting_approval")
    deploy(rig, longer, version=1)
    await rig.approve(run_id)
    run = await rig.work_until(run_id)
    assert (run["status"], run["result"]) == ("succeeded", "more"), run["error"]


# ---------------------------------------------------------------- versions


async def first(ctx: FlowContext) -> str:
    await ctx.approve("ok", tier="low")
    return "first"


async def second(ctx: FlowContext) -> str:
    await ctx.approve("ok", tier="low")
    return "second"


async def test_a_run_keeps_the_version_it_began_with_while_that_is_deployed(rig: Rig) -> None:
    deploy(rig, first, version=1)
    old = await rig.start("f")
    deploy(rig, second, version=2)
    rig.flow("f", version=1, retired=True)(first)
    new = await rig.start("f")
    async with rig.worker():
        for run_id in (old, new):
            await rig.until(run_id, "waiting_approval")
            await rig.approve(run_id)
        ended = [await rig.until(run_id, "x") for run_id in (old, new)]
    assert [(run["workflow_version"], run["result"]) for run in ended] == [(1, "first"), (2, "second")]


async def test_a_run_whose_version_is_not_deployed_waits_visibly_and_goes_on_when_it_is(rig: Rig) -> None:
    deploy(rig, first)
    run_id = await rig.start("f")
    await rig.work_until(run_id, "waiting_approval")
    deploy(rig, second)
    await rig.approve(run_id)
    run = await rig.work_until(run_id, "waiting_external")
    shown = (await rig.http().get(f"/api/runs/{run_id}")).json()
    assert shown["status"] == "waiting_external"
    assert shown["waiting_for"] == f"a worker with flow f@{version_of(first)}"
    assert (await rig.journal(run_id))[-1] == "run: running -park-> waiting_external"
    deploy(rig, first)
    run = await rig.work_until(run_id)
    assert (run["status"], run["result"], run["waiting_for"]) == ("succeeded", "first", None)


async def test_runs_that_waited_for_a_version_with_a_cap_are_let_in_one_after_the_other(rig: Rig) -> None:
    deploy(rig, first, max_concurrency=1)
    waiting = [await rig.start("f") for _ in range(3)]
    deploy(rig, second, max_concurrency=1)
    async with rig.worker():
        for run_id in waiting:
            await rig.until(run_id, "waiting_external")
    await flow_deployments.resume_awaiting(
        rig.database, [f"f@{version_of(first)}"], "worker:w", ("default",), None, most=5
    )
    assert [(await rig.run(run_id))["status"] for run_id in waiting] == ["running"] * 3
    [(ready,)] = await rig.sql("SELECT count(*) FROM interlock.ready_run")
    [(held,)] = await rig.sql("SELECT count(*) FROM interlock.blocked_run")
    assert (ready, held) == (1, 2)
    deploy(rig, first, max_concurrency=1)
    async with rig.worker():
        for run_id in waiting:
            await rig.until(run_id, "waiting_approval")
            await rig.approve(run_id)
        assert [(await rig.until(run_id, "x"))["result"] for run_id in waiting] == ["first"] * 3


RESUMED = "run: waiting_external -resume-> running"


@pytest.mark.parametrize("lacks", ["label", "tenant", "room", "leave"])
async def test_a_worker_that_cannot_take_a_run_does_not_wake_it_for_its_version(rig: Rig, lacks: str) -> None:
    """A second worker that can run it but lacks the version would put it back, in an endless loop."""
    deploy(rig, first)
    run_id = await rig.start("f")
    deploy(rig, second)
    await rig.work_until(run_id, "waiting_external")
    acme, hold = await rig.tenant("acme"), Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply("{name: holds, steps: [{id: a, tool: t.hold}]}")
    serves: dict[str, Any] = {"label": {"labels": ("gpu",)}, "tenant": {"tenants": (acme.tenant_id,)}}.get(lacks, {})
    async with rig.worker(capacity=1, **serves) as worker:
        await until(lambda: _is_at(worker, WorkerState.RUNNING))
        if lacks == "room":
            await rig.start("holds")
            await hold.inside()
        if lacks == "leave":
            await leases.move_worker(rig.database, worker.me.id, WorkerEvent.PAUSE)
            await until(lambda: _is_at(worker, WorkerState.PAUSED))
        deploy(rig, first)
        await worker._check()
        assert RESUMED not in await rig.journal(run_id)
        hold.release.set()
    async with rig.worker(capacity=1):
        await rig.until(run_id, "waiting_approval")
    assert (await rig.journal(run_id)).count(RESUMED) == 1


async def _is_at(worker: Worker, state: WorkerState) -> bool:
    return worker.is_alive and worker.orders.status == state


async def test_a_run_that_waits_for_its_version_can_be_canceled(rig: Rig) -> None:
    deploy(rig, first)
    run_id = await rig.start("f")
    deploy(rig, second)
    await rig.work_until(run_id, "waiting_external")
    await rig.cancel(run_id)
    run = await rig.run(run_id)
    assert (run["status"], run["waiting_for"]) == ("canceled", None)


async def test_going_back_to_an_older_version_starts_that_one(rig: Rig) -> None:
    versions = []
    for function in (first, second, first):
        deploy(rig, function)
        versions.append((await rig.run(await rig.start("f")))["workflow_version"])
    assert versions == [1, 2, 1]


def test_comments_and_spacing_make_no_other_version() -> None:
    async def f(ctx: FlowContext) -> int:
        """Says something."""
        return 1  # one

    plain = version_of(f)

    async def f(ctx: FlowContext) -> int:  # type: ignore[no-redef]
        return (
            1
        )  # fmt: skip

    assert version_of(f) == plain

    async def f(ctx: FlowContext) -> int:  # type: ignore[no-redef]
        return 2

    assert version_of(f) != plain


async def test_a_name_is_a_workflow_or_a_flow_and_not_both(rig: Rig) -> None:
    deploy(rig, first)
    await rig.start("f")
    taken = await rig.http().post("/api/workflows", json={"name": "f", "steps": [{"id": "a", "tool": "t.echo"}]})
    assert (taken.status_code, taken.json()["code"]) == (409, "WORKFLOW_NAME_TAKEN")


async def not_a_flow(ctx: FlowContext, a: Any, b: Any) -> None: ...


def _plain(ctx: FlowContext) -> None: ...


@pytest.mark.parametrize(
    ("name", "function", "options", "says"),
    [
        ("No", first, {}, "lower-case letters"),
        ("f", _plain, {}, "is not an async function"),
        ("f", not_a_flow, {}, "takes ctx, or ctx and input"),
        ("f", first, {"version": "v" * 200}, "1 to 100 characters"),
    ],
)
def test_what_is_no_flow_is_refused_where_it_is_defined(name: str, function: Any, options: Any, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        flow(name, register=Registry(), **options)(function)


def test_two_flows_of_one_name_need_one_to_be_retired() -> None:
    shelf = Registry()
    flow("f", register=shelf)(first)
    flow("f", register=shelf)(first)  # loaded again
    with pytest.raises(Invalid, match="retired=True"):
        flow("f", register=shelf)(second)
    flow("f", version=0, retired=True, register=shelf)(second)
    assert shelf.flows.current("f") is not None
    with pytest.raises(Invalid, match="version 0 is defined twice"):
        flow("f", version=0, register=shelf)(as_it_was)
