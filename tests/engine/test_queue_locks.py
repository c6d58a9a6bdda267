"""Locks on a tenant's queue row (`lane`): when a transaction takes them, and in which order (reliability V5, V10)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from tests.rig import Hold, Rig

from interlock import FlowContext
from interlock.engine import policies
from interlock.engine.queueing import leases
from interlock.engine.runs import runs
from interlock.engine.writing.deliver import deliver_command
from interlock.engine.writing.load import open_run
from interlock.journal import CommandType, RunCommand
from interlock.lifecycle import RunReason
from interlock.policy.policy import compile_policy
from interlock.store.pool import Database, Tx

CAPPED = "{name: capped, caps: {max_concurrency: 1}, steps: [{id: a, tool: t.work}]}"
GATED = """
name: gated
caps: {max_concurrency: 1}
steps:
  - {id: ask, approval: {tier: low, summary: ok}}
  - {id: a, tool: t.work}
"""


@pytest.fixture
async def other(database: Database) -> AsyncIterator[Any]:
    """A session of another process."""
    connection: Any = await asyncpg.connect(database.url)
    yield connection
    await connection.close()


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch, other: Any) -> list[str]:
    """The statements after which an open transaction holds a tenant's queue row.

    The process could stop right there. No other process could then claim or end a run of that tenant.
    """
    found: list[str] = []
    looking = asyncio.Lock()

    async def look(tx: Tx, name: str) -> None:
        if not tx.connection.is_in_transaction():
            return
        # The other session's statement releases its lock by itself; this transaction continues after the check.
        async with looking:
            for _ in range(50):
                free = await other.fetchval(
                    "SELECT count(*) FROM (SELECT FROM interlock.queue WHERE tenant_id IS NOT NULL"
                    " FOR NO KEY UPDATE SKIP LOCKED) AS l"
                )
                if free == await other.fetchval("SELECT count(*) FROM interlock.queue WHERE tenant_id IS NOT NULL"):
                    return
            found.append(name)

    def spied(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(tx: Tx, name: str, *args: Any) -> Any:
            answer = await method(tx, name, *args)
            await look(tx, name)
            return answer

        return call

    for method in ("fetch", "row", "value"):
        monkeypatch.setattr(Tx, method, spied(getattr(Tx, method)))
    return found


def cancel() -> RunCommand:
    return RunCommand(CommandType.CANCEL, "test", {"reason_code": RunReason.CANCELED_BY_USER, "said": None})


async def blocked(other: Any) -> bool:
    return bool(await other.fetchval("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')"))


async def until_blocked_or(task: "asyncio.Task[Any]", other: Any) -> None:
    async with asyncio.timeout(10):
        while not task.done() and not await blocked(other):
            await asyncio.wait([task], timeout=0.01)


# ---------------------------------------------------------------- V5: not over a round trip


async def test_commands_hold_no_queue_row_between_two_statements(rig: Rig, held: list[str]) -> None:
    """reliability V5: start, approve, cancel and publish, of workflows with and without a cap."""
    rig.tool("t.work")(Hold().__call__)
    http = rig.http()
    await rig.apply(CAPPED)
    await rig.apply(GATED)
    await rig.apply("{name: free, steps: [{id: a, tool: t.work}]}")
    for workflow in ("capped", "capped", "free", "gated", "gated"):
        answer = await http.post(
            "/api/runs", json={"workflow": workflow}, headers={"Idempotency-Key": f"{workflow}-{len(held)}"}
        )
        assert answer.status_code == 201, answer.text
        await rig.start(workflow)
    items = (await http.get("/api/runs")).json()["items"]
    for run in items:
        if run["status"] == "waiting_approval":
            await rig.approve(UUID(run["id"]))
    for run in items:
        assert (await http.post(f"/api/runs/{run['id']}/cancel")).status_code == 200
    await rig.apply(CAPPED.replace("1", "2"))
    compiled = compile_policy(POLICY, rig.policies.facts())
    await rig.database.run_in_transaction(lambda tx: policies.publish(tx, rig.admin, POLICY, compiled.digest))
    assert not held


POLICY = '@id("all") permit(principal, action, resource);'


async def test_starts_of_a_paced_tenant_hold_no_queue_row_between_two_statements(rig: Rig, held: list[str]) -> None:
    """reliability V5: places in a minute are counted apart from the queue row."""
    rig.tool("t.work")(Hold().__call__)
    await rig.apply("{name: free, steps: [{id: a, tool: t.work}]}")
    await rig.apply(GATED)
    await rig.sql("UPDATE interlock.tenant_limits SET max_runs_per_min = 3")
    http = rig.http()
    for number, workflow in enumerate(("free", "gated", "free", "free", "gated")):
        asked = {"json": {"workflow": workflow}, "headers": {"Idempotency-Key": f"k{number}"}}
        assert (await http.post("/api/runs", **asked)).status_code == 201
    assert [r["n"] for r in await rig.sql("SELECT count(*) AS n FROM interlock.run WHERE resume_at IS NOT NULL")] == [2]
    assert not held


@pytest.mark.parametrize("workflow", ["plain", "capped_write", "parent"])
async def test_workers_hold_no_queue_row_between_two_statements(rig: Rig, held: list[str], workflow: str) -> None:
    """reliability V5: an append that is more than one statement (receipts, caps, child runs) locks the queue last."""

    @rig.tool("t.write", writes=True, risk="low")
    async def write() -> str:
        return "done"

    await rig.apply("{name: plain, steps: [{id: a, tool: t.write}]}")
    await rig.apply("{name: capped_write, caps: {max_concurrency: 1}, steps: [{id: a, tool: t.write}]}")

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> None:
        await ctx.child("capped_write")
        await ctx.call("t.write")

    first, second = await rig.start(workflow), await rig.start(workflow)
    async with rig.worker():
        for _ in range(400):
            await rig.sweep()
            ended = [await rig.run(run_id) for run_id in (first, second)]
            if all(run["completed_at"] for run in ended):
                break
    assert [run["status"] for run in ended] == ["succeeded", "succeeded"]
    assert not held
    assert [row["in_flight"] for row in await rig.sql("SELECT in_flight FROM interlock.queue")] == [0]


async def test_others_go_on_while_a_process_is_stopped_before_its_commit(rig: Rig) -> None:
    """reliability V5: the worst point is just before COMMIT, with everything written."""
    rig.tool("t.work")(lambda: None)
    await rig.apply(CAPPED)
    await rig.apply("{name: free, steps: [{id: a, tool: t.work}]}")
    first, second = await rig.start("capped"), await rig.start("capped")
    async with rig.database.transaction() as stopped:
        await runs.cancel(stopped, rig.plans, rig.admin, first)
        async with asyncio.timeout(5):
            assert (await rig.work_until(await rig.start("free")))["status"] == "succeeded"
    assert (await rig.work_until(second))["status"] == "succeeded"


# ---------------------------------------------------------------- V10: lock order


async def test_canceling_a_run_that_a_cap_holds_back_meets_nobody(rig: Rig, other: Any) -> None:
    """reliability V10: one client cancels a held-back run while another frees the place that it waited for."""
    rig.tool("t.work")(Hold().__call__)
    await rig.apply(CAPPED)
    queued, held_back, last = [await rig.start("capped") for _ in range(3)]
    async with rig.database.transaction() as tx:
        run = await open_run(tx, rig.plans, rig.admin.tenant_id, held_back)

        async def free_the_place() -> None:
            async with rig.database.transaction() as second:
                await runs.cancel(second, rig.plans, rig.admin, queued)

        freeing = asyncio.create_task(free_the_place())
        await until_blocked_or(freeing, other)
        await deliver_command(tx, run, cancel())
    await freeing
    assert [(await rig.run(r))["status"] for r in (queued, held_back)] == ["canceled", "canceled"]
    assert [row["run_id"] for row in await rig.sql("SELECT run_id FROM interlock.ready_run")] == [last]


async def test_a_place_that_a_failed_command_passed_over_is_given_away_soon(rig: Rig) -> None:
    """A command that ends without a commit had its held-back run locked when the place became free."""
    rig.tool("t.work")(Hold().__call__)
    await rig.apply(CAPPED)
    queued, held_back = await rig.start("capped"), await rig.start("capped")

    async def fail(tx: Tx) -> None:
        await open_run(tx, rig.plans, rig.admin.tenant_id, held_back)
        await rig.cancel(queued)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await rig.database.run_in_transaction(fail)
    assert not await rig.sql("SELECT FROM interlock.ready_run")
    await rig.sweep()
    assert [row["run_id"] for row in await rig.sql("SELECT run_id FROM interlock.ready_run")] == [held_back]


# ---------------------------------------------------------------- V5, V11: declaring workers lost


async def test_a_worker_in_a_write_delays_neither_its_heartbeat_nor_the_loss_of_others(rig: Rig, other: Any) -> None:
    """reliability V5: its row was locked against its own beat, and `lose_workers` waited for it."""
    rig.clock.freeze()
    cut_off = await leases.register(rig.database, capacity=1, lease_seconds=5)
    silent = await leases.register(rig.database, capacity=1, lease_seconds=5)
    for me in (cut_off, silent):
        await rig.sql("UPDATE interlock.worker SET status = 'running' WHERE id = $1", me.id)
    rig.tool("t.work")(Hold().__call__)
    await rig.apply(CAPPED)
    await rig.start("capped")
    async with rig.database.transaction() as tx:
        assert await leases.claim(tx, cut_off, 1)
        async with asyncio.timeout(5):
            await leases.heartbeat(rig.database, cut_off)
        rig.clock.advance(60)
        async with asyncio.timeout(5):
            await leases.reclaim_lost(rig.database)
        lost = await rig.sql("SELECT id FROM interlock.worker WHERE stopped_at IS NOT NULL")
        assert [row["id"] for row in lost] == [silent.id]
    await leases.reclaim_lost(rig.database)
    assert not await rig.sql("SELECT FROM interlock.worker WHERE stopped_at IS NULL")
