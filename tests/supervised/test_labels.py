"""Labels and tenants: only workers with a step's label run it, and a worker serves only its configured tenants."""

from typing import Any
from uuid import UUID

import pytest

from interlock import FlowContext, Terminal
from interlock.definition.workflow import parse
from interlock.engine.queueing.leases import label_queue
from interlock.errors import DefinitionInvalid
from interlock.store import sql
from interlock.worker.worker import Worker
from tests.rig import Rig
from tests.supervised.conftest import Shop, until

MIXED = """
name: mixed
steps:
  - {id: before, tool: t.after}
  - {id: train, tool: t.after, runs_on: gpu}
  - {id: then, tool: t.after}
"""


async def actors(rig: Rig, run_id: UUID) -> dict[str, str]:
    rows = await rig.sql(
        "SELECT step, actor FROM interlock.journal_entry WHERE run_id = $1 AND event = 'succeed' AND step > ''", run_id
    )
    return {row["step"]: row["actor"] for row in rows}


async def pools_of(rig: Rig, run_id: UUID) -> list[str]:
    """Return the pool of the queue in which the run is ready, if it is."""
    queue = "interlock.ready_run JOIN interlock.queue ON queue.id = ready_run.queue_id"
    return [row["pool"] for row in await rig.sql(f"SELECT pool FROM {queue} WHERE run_id = $1", run_id)]


async def queues_are_clean(rig: Rig) -> None:
    assert await rig.sql("SELECT id FROM interlock.queue WHERE in_flight <> 0") == []


async def test_a_step_with_a_label_is_done_by_a_worker_that_has_it_and_the_others_are_not(shop: Shop, rig: Rig) -> None:
    await rig.apply(MIXED)
    plain = await shop.worker()
    run_id = await rig.start("mixed")

    async def is_in_the_queue() -> bool:
        return await pools_of(rig, run_id) == ["gpu"]

    await until(is_in_the_queue)
    gpu = await shop.worker(labels=("gpu",))
    assert (await rig.until(run_id))["status"] == "succeeded"
    assert await actors(rig, run_id) == {"before": plain.me.actor, "train": gpu.me.actor, "then": plain.me.actor}
    await queues_are_clean(rig)


async def test_a_worker_with_both_keeps_the_run(shop: Shop, rig: Rig) -> None:
    await rig.apply(MIXED)
    both = await shop.worker(labels=("default", "gpu"))
    run_id = await rig.start("mixed")
    assert (await rig.until(run_id))["status"] == "succeeded"
    assert set((await actors(rig, run_id)).values()) == {both.me.actor}
    (row,) = await rig.sql("SELECT lease_token FROM interlock.run WHERE id = $1", run_id)
    assert row["lease_token"] == 1
    await queues_are_clean(rig)


async def test_steps_of_a_graph_go_each_to_its_workers(shop: Shop, rig: Rig) -> None:
    await rig.apply(
        "{name: graph, steps: [{id: a, needs: [], tool: t.after, runs_on: gpu},"
        " {id: b, needs: [], tool: t.after, runs_on: fpga}, {id: c, needs: [a, b], tool: t.after}]}"
    )
    workers: dict[str, Worker] = {label: await shop.worker(labels=(label,)) for label in ("default", "gpu", "fpga")}
    run_id = await rig.start("graph")
    assert (await rig.until(run_id))["status"] == "succeeded"
    by = {
        step: next(label for label, w in workers.items() if w.me.actor == a)
        for step, a in (await actors(rig, run_id)).items()
    }
    assert by == {"a": "gpu", "b": "fpga", "c": "default"}
    await queues_are_clean(rig)


async def test_a_lost_worker_with_a_label_is_followed_by_another(shop: Shop, rig: Rig) -> None:
    await rig.apply("{name: hold, steps: [{id: a, tool: t.hold, runs_on: gpu}]}")
    await shop.worker()
    first = await shop.worker(labels=("gpu",))
    run_id = await rig.start("hold")
    await shop.hold.inside()
    shop.hold.entered.clear()
    second = await shop.worker(labels=("gpu",))
    await rig.http().post(f"/api/supervisor/workers/{first.me.id}/terminate")
    await shop.hold.inside()
    shop.hold.release.set()
    assert (await rig.until(run_id))["status"] == "succeeded"
    assert await actors(rig, run_id) == {"a": second.me.actor}
    await queues_are_clean(rig)


async def test_a_jobs_step_with_a_label_comes_back_to_the_jobs_workers(shop: Shop, rig: Rig) -> None:
    await rig.apply(MIXED)
    plain, gpu = await shop.worker(), await shop.worker(labels=("gpu",))
    job_id = await shop.job("mixed", runs=2)
    await shop.job_until(job_id, "completed")
    for run in await rig.sql("SELECT id FROM interlock.run WHERE job_id = $1", job_id):
        expected = {"before": plain.me.actor, "train": gpu.me.actor, "then": plain.me.actor}
        assert await actors(rig, run["id"]) == expected
    await queues_are_clean(rig)


async def test_a_flows_step_with_a_label_is_done_there_and_the_flow_comes_home(shop: Shop, rig: Rig) -> None:
    @rig.flow("trains")
    async def trains(ctx: FlowContext) -> None:
        await ctx.step("before").call("t.after")
        await ctx.gather(ctx.step("train", runs_on="gpu").call("t.after"), ctx.step("beside").call("t.after"))
        await ctx.step("then").call("t.after")

    plain, gpu = await shop.worker(), await shop.worker(labels=("gpu",))
    run_id = await rig.start("trains")
    assert (await rig.until(run_id))["status"] == "succeeded"
    home = dict.fromkeys(("before", "beside", "then"), plain.me.actor)
    assert await actors(rig, run_id) == home | {"train": gpu.me.actor}
    await queues_are_clean(rig)


async def test_a_flow_that_asks_for_no_label_is_told_so(shop: Shop, rig: Rig) -> None:
    @rig.flow("wrong")
    async def wrong(ctx: FlowContext) -> None:
        await ctx.step(runs_on="G P U").call("t.after")

    run = await rig.work_until(await rig.start("wrong"))
    assert run["status"] == "failed" and "expected the label of a worker such as gpu" in run["error"]["message"]


async def test_what_was_done_on_a_label_is_undone_there(shop: Shop, rig: Rig) -> None:
    @rig.tool("t.fail")
    async def fail() -> None:
        raise Terminal("no")

    await rig.apply(
        "{name: undoes, steps: [{id: a, tool: t.after, runs_on: gpu, compensate: {tool: t.after}},"
        " {id: b, tool: t.fail}]}"
    )
    await shop.worker()
    gpu = await shop.worker(labels=("gpu",))
    run_id = await rig.start("undoes")
    assert (await rig.until(run_id))["status"] == "failed"
    assert set((await actors(rig, run_id)).values()) == {gpu.me.actor} and shop.after == 2
    await queues_are_clean(rig)


async def test_what_a_lost_worker_did_for_a_label_is_not_done_by_one_without(shop: Shop, rig: Rig) -> None:
    """The worker had both labels, so it kept the run while a step for the other label was running."""
    await rig.apply("{name: hold, steps: [{id: a, tool: t.after}, {id: b, tool: t.hold, runs_on: gpu}]}")
    both = await shop.worker(labels=("default", "gpu"))
    run_id = await rig.start("hold")
    await shop.hold.inside()
    await rig.until_journal(run_id, "b: pending -claim-> running")
    shop.hold.entered.clear()
    await shop.worker()
    await rig.http().post(f"/api/supervisor/workers/{both.me.id}/terminate")

    async def is_in_the_queue() -> bool:
        return await pools_of(rig, run_id) == ["gpu"]

    await until(is_in_the_queue)
    assert not shop.hold.entered.is_set()
    gpu = await shop.worker(labels=("gpu",))
    await shop.hold.inside()
    shop.hold.release.set()
    assert (await rig.until(run_id))["status"] == "succeeded"
    assert await actors(rig, run_id) == {"a": both.me.actor, "b": gpu.me.actor}
    assert "b: running -reclaim-> running" in await rig.journal(run_id)
    await queues_are_clean(rig)


async def test_a_queue_that_rested_has_no_credit_in_its_pool(shop: Shop, rig: Rig) -> None:
    await rig.apply(MIXED)
    run_id = await rig.start("mixed")
    queue_id = label_queue(rig.admin.tenant_id, "gpu")
    acme = await rig.tenant("acme")
    other_id = label_queue(acme.tenant_id, "gpu")
    await sql.add_label_queue(rig.database, queue_id=queue_id, tenant_id=rig.admin.tenant_id, label="gpu")
    await sql.add_label_queue(rig.database, queue_id=other_id, tenant_id=acme.tenant_id, label="gpu")
    await rig.sql("UPDATE interlock.queue SET has_work = true, virtual_time = 70 WHERE id = $1", other_id)
    await shop.worker()

    async def woke() -> Any:
        (row,) = await rig.sql("SELECT virtual_time, has_work FROM interlock.queue WHERE id = $1", queue_id)
        return row["virtual_time"] if row["has_work"] else None

    assert await until(woke) == 70
    assert (await rig.run(run_id))["status"] == "running"


async def test_a_worker_serves_the_tenants_it_is_told_to(shop: Shop, rig: Rig) -> None:
    acme = await rig.tenant("acme")
    await rig.apply("{name: two, steps: [{id: a, tool: t.after}]}", acme)
    theirs = await shop.worker(tenants=(acme.tenant_id,))
    ours = await rig.start("two")
    run_id = await rig.start("two", who=acme)
    assert (await rig.until(run_id))["status"] == "succeeded"
    assert await actors(rig, run_id) == {"a": theirs.me.actor}
    assert (await rig.run(ours))["status"] == "pending"
    shop.hold.release.set()
    async with rig.worker():
        assert (await rig.until(ours))["status"] == "succeeded"


@pytest.mark.parametrize("wrong", ["GPU", "''", "[a]", "a b"])
def test_a_label_is_a_word(wrong: Any) -> None:
    with pytest.raises(DefinitionInvalid, match="runs_on"):
        parse(f"{{name: x, steps: [{{id: a, tool: t, runs_on: {wrong}}}]}}")


def test_only_a_tool_step_has_a_label() -> None:
    with pytest.raises(DefinitionInvalid, match="only a tool step has `runs_on`"):
        parse("{name: x, steps: [{id: a, wait: {duration: 1s}, runs_on: gpu}]}")
