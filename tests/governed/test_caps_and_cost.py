"""Writes per run, and the cost of the gate: zero for runs without writes."""

import asyncio
import time
from typing import Any

import pytest
from pydantic import SecretStr
from tests.governed.conftest import Shop, lose
from tests.rig import Hold, Rig

from interlock.engine.queueing.leases import WorkerIdentity
from interlock.engine.writing import commit as commit_module
from interlock.engine.writing.change import DeclareIntent
from interlock.errors import Retryable
from interlock.ids import WorkerId, uuid7
from interlock.store.pool import Tx
from interlock.store.records import ClaimedRun
from interlock.tools import Context
from interlock.worker import batch_committer
from interlock.worker.run_driver import Driver
from interlock.worker.worker import Worker


def steps(*tools: str) -> str:
    lines = [f"  - {{id: s{n}, tool: t.{name}, retry: {{base_delay: 0s}}}}" for n, name in enumerate(tools)]
    return "name: f\nsteps:\n" + "\n".join(lines)


async def test_a_run_may_write_as_often_as_its_tenant_allows(shop: Shop, rig: Rig) -> None:
    @rig.tool("t.write", writes=True, risk="low")
    async def write(ctx: Context) -> None:
        shop.done.append(ctx.step)

    @rig.tool("t.read")
    async def read() -> None: ...

    other = await rig.tenant("small", max_writes_per_run=2)
    await rig.apply(steps("write", "read", "write", "read", "write"), other)
    run = await rig.work_until(await rig.start("f", who=other))
    assert (run["status"], run["reason"], shop.done) == ("failed", "cap_exceeded", ["s0", "s2"])
    assert "(2)" in run["error"]["message"]


async def test_another_try_at_a_write_is_not_another_write(shop: Shop, rig: Rig) -> None:
    @rig.tool("t.write", writes=True, risk="low")
    async def write() -> None:
        shop.done.append("try")
        if len(shop.done) < 3:
            raise Retryable("busy")

    other = await rig.tenant("small", max_writes_per_run=1)
    await rig.apply(steps("write"), other)
    run = await rig.work_until(await rig.start("f", who=other))
    assert (run["status"], len(shop.done)) == ("succeeded", 3)


class Commits:
    """How often a worker commits, and how often a commit takes more than one statement."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = self.long = 0
        commit, fetch = commit_module.commit, Tx.fetch
        statements: dict[Tx, int] = {}

        async def counted(tx: Tx, changes: Any, *args: Any) -> Any:
            statements[tx] = 0
            results = await commit(tx, changes, *args)
            self.all += bool(changes)
            self.long += statements.pop(tx) > 1
            return results

        async def counted_statement(tx: Tx, name: str, *args: Any) -> Any:
            if tx in statements:
                statements[tx] += 1
            return await fetch(tx, name, *args)

        monkeypatch.setattr(batch_committer, "commit", counted)
        monkeypatch.setattr(Tx, "fetch", counted_statement)


async def test_steps_that_only_read_leave_no_receipt_and_cost_one_statement_each(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    @rig.tool("t.read")
    async def read() -> None: ...

    await rig.apply(steps(*["read"] * 5))
    commits = Commits(monkeypatch)
    run = await rig.work_until(await rig.start("f"))
    assert run["status"] == "succeeded"
    assert (commits.all, commits.long) == (5, 0)
    assert await rig.sql("SELECT * FROM interlock.receipt") == []


async def test_a_write_between_reads_costs_no_commit_of_its_own(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its intent is committed with the step before it, its receipt with its own end."""

    @rig.tool("t.read")
    async def read() -> None: ...

    @rig.tool("t.write", writes=True, risk="low")
    async def write() -> None: ...

    await rig.apply(steps("read", "read", "write", "read", "read"))
    commits = Commits(monkeypatch)
    assert (await rig.work_until(await rig.start("f")))["status"] == "succeeded"
    assert (commits.all, commits.long) == (5, 2)


async def test_the_gates_cost_is_measured(shop: Shop, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed without a limit: `make bench` has the limit."""

    @rig.tool("t.read")
    async def read(charge: str, amount: int) -> None: ...

    @rig.tool("t.write", writes=True, risk="low", key="w:{charge}:{amount}", target="{charge}")
    async def write(charge: str, amount: int) -> None: ...

    took = {}
    for name in ("read", "write"):
        lines = [
            f"  - {{id: s{n}, needs: [], tool: t.{name}, input: {{charge: c{n}, amount: {n}}}}}" for n in range(1000)
        ]
        await rig.apply("name: f\nsteps:\n" + "\n".join(lines))
        run_id = await rig.start("f")
        settings = rig.settings.model_copy(update={"redaction_key": SecretStr("k" * 64)})
        worker = Worker(rig.database, settings, tools=rig.tools)
        worker.me = WorkerIdentity(WorkerId(uuid7()), "bench")
        await worker.policies.current(rig.admin.tenant_id)
        (row,) = await rig.sql("SELECT * FROM interlock.leased_run WHERE id = $1", run_id)
        driver = Driver(worker, ClaimedRun(*row))
        await driver._load()
        folds = (await driver._advance()).start
        # CPU time of this process alone: other processes do not count towards the gate.
        began = time.process_time()
        calls = await driver._passage.ready(folds)
        took[name] = (time.process_time() - began) * 1e6 / 1000
        assert len(calls) == 1000
        intents = [effect for effect in driver.run.effects if isinstance(effect, DeclareIntent)]
        assert len(intents) == (1000 if name == "write" else 0)
    with capsys.disabled():
        print(f"\nthe gate: {took['write']:.0f} µs a write, {took['read']:.0f} µs a read")


async def test_what_a_lost_workers_steps_cost_is_part_of_what_the_run_cost(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.pay")
    async def pay(ctx: Context) -> None:
        ctx.cost(1.0)

    @rig.tool("t.stay")
    async def stay(ctx: Context) -> None:
        await hold()
        ctx.cost(0.5)

    await rig.apply(steps("pay", "stay", "pay"))
    run_id = await rig.start("f")
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await hold.inside()
    await lose(rig, task)
    hold.release.set()
    assert (await rig.work_until(run_id))["status"] == "succeeded"
    [shown] = (await rig.http().get("/api/runs")).json()["items"]
    assert shown["cost_usd"] == 2.5


async def test_what_a_lost_workers_steps_cost_counts_though_nobody_went_on(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.pay")
    async def pay(ctx: Context) -> None:
        ctx.cost(1.0)

    @rig.tool("t.stay")
    async def stay() -> None:
        await hold()

    await rig.apply(steps("pay", "stay"))
    run_id = await rig.start("f")
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await hold.inside()
    await lose(rig, task)
    await rig.cancel(run_id)
    [shown] = (await rig.http().get("/api/runs")).json()["items"]
    assert (shown["status"], shown["cost_usd"]) == ("canceled", 1.0)
