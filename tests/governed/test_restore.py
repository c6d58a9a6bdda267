"""A database restored to an earlier moment repeats no effect on a guess (reliability V8).

The snapshot is a copy of the database (CREATE DATABASE … TEMPLATE). The ledger of effects is outside the database.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import structlog
from tests.conftest import url_of
from tests.rig import Hold, Rig

from interlock.engine.ingress import schedules
from interlock.engine.proof import restore
from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.pool import Database, Tx
from interlock.testing import ManualClock, Scratch
from interlock.tools import Context, DidNotHappen, Happened

CHILD = "{name: child, steps: [{id: inner, tool: bank.once, input: {what: inner}}]}"
PARENT = """
name: pay
steps:
  - {id: before, tool: bank.once, input: {what: before}}
  - {id: go, wait: {event: go, correlation: "${input.n}"}}
  - {id: once, tool: bank.once, input: {what: once}}
  - {id: again, tool: bank.repeatable, input: {what: again}}
  - {id: asked, tool: bank.askable, input: {what: asked}}
  - {id: sub, flow: child}
"""
NOTHING_ELSE = '@id("all") permit(principal, action, resource);'


@dataclass
class Ledger:
    """The effects, recorded outside of every database."""

    done: list[tuple[str, str]] = field(default_factory=list)

    def note(self, ctx: Context, what: str) -> None:
        self.done.append((what, ctx.idempotency_key))

    def doubles(self) -> dict[tuple[str, str], int]:
        return {each: times for each, times in Counter(self.done).items() if times > 1}


@dataclass
class World:
    """Several databases, one after another, on which the same tools act."""

    server: embedded.Joined
    scratch: Scratch
    settings: Settings
    ledger: Ledger = field(default_factory=Ledger)
    rigs: list[Rig] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    async def open(self, url: str) -> Rig:
        database = await Database(url, self.settings, clock=ManualClock(), size=8).open()
        rig = Rig(database, self.settings, ManualClock())
        if not self.rigs:
            rig = await Rig.make(database, self.settings, rig.clock)
        else:
            rig.admin, rig.admin_key = self.rigs[0].admin, self.rigs[0].admin_key
            await rig.follower.start()
        self.rigs.append(rig)
        self._tools(rig)
        return rig

    def _tools(self, rig: Rig) -> None:
        ledger = self.ledger

        @rig.tool("bank.once", writes=True, idempotent=False)
        async def once(ctx: Context, what: str) -> str:
            ledger.note(ctx, what)
            return what

        @rig.tool("bank.repeatable", writes=True, idempotent=True)
        async def repeatable(ctx: Context, what: str) -> str:
            ledger.note(ctx, what)
            return what

        async def did_it(ctx: Context, what: str) -> Happened | DidNotHappen:
            return Happened(what) if (what, ctx.idempotency_key) in ledger.done else DidNotHappen()

        @rig.tool("bank.askable", writes=True, idempotent=False, reconcile=did_it)
        async def askable(ctx: Context, what: str) -> str:
            ledger.note(ctx, what)
            return what

    async def snapshot(self, rig: Rig) -> str:
        """Copy the current database. It must have no connections during the copy."""
        name = f"snapshot_{len(self.names)}_{rig.database.url.partition('@/')[2].partition('?')[0]}"
        await rig.follower.stop()
        await rig.database.close()
        source = rig.database.url.partition("@/")[2].partition("?")[0]
        admin: Any = await asyncpg.connect(self.server.url)
        await admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{source}'")
        await admin.close()
        await self.scratch.create(name, f"TEMPLATE {source}")
        self.names.append(name)
        await rig.database.open()
        await rig.follower.start()
        return url_of(self.server, name)

    async def close(self) -> None:
        for rig in self.rigs:
            await rig.close()
            await rig.database.close()
        for name in self.names:
            await self.scratch.drop(url_of(self.server, name))


@pytest.fixture
async def world(
    url: str, server: embedded.Joined, interlock_scratch: Scratch, settings: Settings
) -> AsyncIterator[World]:
    world = World(server, interlock_scratch, settings)
    yield world
    await world.close()


async def begun(world: World, url: str) -> tuple[Rig, UUID]:
    rig = await world.open(url)
    await rig.apply(CHILD)
    await rig.apply(PARENT)
    answer = await rig.http().put("/api/policy", content=NOTHING_ELSE)
    assert answer.status_code in (200, 201), answer.text
    run_id = await rig.start("pay", {"n": "1"})
    await rig.work_until(run_id, "waiting_external")
    return rig, run_id


async def go(rig: Rig) -> None:
    answer = await rig.http().post("/api/events", json={"id": "e1", "type": "go", "correlation": "1"})
    assert answer.status_code == 202, answer.text


async def run_on(rig: Rig, run_id: UUID) -> dict[str, Any]:
    async with rig.worker():
        while True:
            await rig.sweep()
            found = await rig.run(run_id)
            if found["completed_at"] or await questions(rig):
                return found


async def questions(rig: Rig) -> list[Any]:
    items: list[Any] = (await rig.http().get("/api/approvals", params={"status": "requested"})).json()["items"]
    return items


async def answer(rig: Rig, question: Any, *, happened: bool) -> None:
    body = {"outcome": "happened" if happened else "did_not_happen"}
    other = rig.http(await rig.key(f"other {question['id']}", "approver"))
    answer = await other.post(f"/api/receipts/{question['receipt_id']}/resolve", json=body)
    assert answer.status_code == 200, answer.text


async def test_without_a_new_epoch_effects_are_doubled(world: World, url: str) -> None:
    """The oracle can fail: doubled effects were the silent result before `interlock db restored` existed."""
    rig, run_id = await begun(world, url)
    earlier = await world.snapshot(rig)
    await go(rig)
    assert (await run_on(rig, run_id))["status"] == "succeeded"
    rig = await world.open(earlier)
    await go(rig)
    assert (await run_on(rig, run_id))["status"] == "succeeded"
    assert {what for what, _ in world.ledger.doubles()} == {"once", "again", "asked", "inner"}


async def test_in_a_new_epoch_no_effect_is_repeated_on_a_guess(world: World, url: str) -> None:
    rig, run_id = await begun(world, url)
    waiting = await rig.start("pay", {"n": "2"})
    earlier = await world.snapshot(rig)
    await go(rig)
    assert (await run_on(rig, run_id))["status"] == "succeeded"
    rig = await world.open(earlier)
    epoch = await restore.begin_epoch(rig.database)
    assert (epoch.number, epoch.runs) == (2, 2)
    assert (await rig.journal(run_id))[-1] == "run_restored"
    await go(rig)
    asked = []
    while not (await run_on(rig, run_id))["completed_at"]:
        for question in await questions(rig):
            asked.append((question["run_id"], question["step_key"], question["kind"]))
            assert "The database was restored to" in question["rationale"]["reason"]
            assert question["rationale"]["reason"].endswith("this may already have been done.")
            await answer(rig, question, happened=True)
    [child] = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", run_id)
    ours = [(run, step) for run, step, _ in asked if run != str(waiting)]
    assert ours == [(str(run_id), "once"), (str(child["id"]), "inner")]
    assert {what for what, _ in world.ledger.doubles()} == {"again"}, "the idempotent one, under the same key"
    assert (await rig.run(run_id))["status"] == "succeeded"
    # The engine also asks about a run without a start: a worker may have started and lost it.
    assert [step for run, step, _ in asked if run == str(waiting)] == ["before"]


async def test_what_a_person_says_did_not_happen_is_done(world: World, url: str) -> None:
    rig, run_id = await begun(world, url)
    earlier = await world.snapshot(rig)
    rig = await world.open(earlier)
    await restore.begin_epoch(rig.database)
    await go(rig)
    while not (await run_on(rig, run_id))["completed_at"]:
        for question in await questions(rig):
            await answer(rig, question, happened=False)
    assert [what for what, _ in world.ledger.done] == ["before", "once", "again", "asked", "inner"]
    assert not world.ledger.doubles()


async def test_a_new_epoch_takes_every_lease_back_and_pauses_every_schedule(world: World, url: str) -> None:
    rig, run_id = await begun(world, url)
    body = {"name": "nightly", "cron": "0 3 * * *", "workflow": "child"}
    assert (await rig.http().post("/api/schedules", json=body)).status_code == 201
    await go(rig)
    me, [row] = await rig.claim_by_hand()
    epoch = await restore.begin_epoch(rig.database)
    assert (epoch.runs, epoch.schedules) == (1, ["nightly"])
    [run] = await rig.sql("SELECT lease_worker, lease_token FROM interlock.run WHERE id = $1", run_id)
    assert run["lease_worker"] is None
    assert run["lease_token"] > row.lease_token + 2**31
    [worker] = await rig.sql("SELECT status FROM interlock.worker WHERE id = $1", me.id)
    assert worker["status"] == "terminated"
    shown = (await rig.http().get("/api/schedules/nightly")).json()
    assert shown["next_at"] is None and "the database was restored" in shown["paused_why"]


async def test_a_process_notices_that_the_database_went_back(world: World, url: str) -> None:
    rig, _run_id = await begun(world, url)
    body = {"name": "nightly", "cron": "* * * * *", "workflow": "child"}
    assert (await rig.http().post("/api/schedules", json=body)).status_code == 201
    await rig.prove()
    data_dir = world.settings.data_dir
    await restore.look(rig.database, data_dir)
    earlier = await world.snapshot(rig)
    await rig.start("child")
    await rig.prove()
    await restore.look(rig.database, data_dir)
    assert (await rig.http("").get("/readyz")).json() == {"status": "ready"}

    rig = await world.open(earlier)
    rig.clock.advance(3600)
    with structlog.testing.capture_logs() as logs:
        await restore.look(rig.database, data_dir)
        await restore.look(rig.database, data_dir)
    assert [line["event"] for line in logs] == ["database_went_back"]
    assert (await rig.http("").get("/readyz")).json() == {"status": "ready", "warnings": [restore.WENT_BACK]}
    assert await schedules.start_due(rig.database, rig.plans) == 0

    await restore.begin_epoch(rig.database)
    await restore.look(rig.database, data_dir)
    assert (await rig.http("").get("/readyz")).json() == {"status": "ready"}


async def test_workers_claim_nothing_until_the_restored_database_has_a_new_epoch(world: World, url: str) -> None:
    rig, run_id = await begun(world, url)
    await rig.prove()
    await restore.look(rig.database, world.settings.data_dir)
    earlier = await world.snapshot(rig)
    await go(rig)
    await rig.work_until(run_id, "waiting_approval", "succeeded")
    await rig.prove()
    await restore.look(rig.database, world.settings.data_dir)
    done = list(world.ledger.done)

    rig = await world.open(earlier)
    await go(rig)
    look_back = partial(restore.look, rig.database, world.settings.data_dir)
    async with rig.worker(look_back=look_back) as worker:
        async with asyncio.timeout(20):
            while rig.database.went_back is None:
                await rig.sweep()
        async with rig.database.connection() as connection:
            for _ in range(3):
                assert await worker.claimer._claim(Tx(connection)) == world.settings.poll_seconds
        assert not worker.may_begin
    assert world.ledger.done == done
    assert (await rig.http("").get("/readyz")).json()["warnings"] == [restore.WENT_BACK]

    await restore.begin_epoch(rig.database)
    async with rig.worker(look_back=partial(restore.look, rig.database, world.settings.data_dir)):
        await until_asked(rig)
    assert not world.ledger.doubles()
    assert world.ledger.done == done


async def until_asked(rig: Rig) -> None:
    async with asyncio.timeout(20):
        while not await questions(rig):
            await rig.sweep()


async def test_a_worker_gives_its_run_back_when_the_database_has_gone_back(rig: Rig) -> None:
    hold = Hold()
    rig.tool("t.hold")(hold.__call__)
    rig.tool("t.after")(hold.__call__)
    await rig.apply("{name: two, steps: [{id: a, tool: t.hold}, {id: b, tool: t.after}]}")
    async with rig.worker() as worker:
        run_id = await rig.start("two")
        await hold.inside()
        rig.database.went_back = restore.WENT_BACK
        hold.release.set()
        async with asyncio.timeout(20):
            await worker.idle()
        [run] = await rig.sql("SELECT status, lease_worker FROM interlock.run WHERE id = $1", run_id)
        assert (run["status"], run["lease_worker"], hold.entries) == ("running", None, 1)
        rig.database.went_back = None
        worker.claimer.look()
        await rig.until(run_id, "succeeded")


async def test_another_database_in_the_same_directory_is_no_restore(world: World, url: str) -> None:
    rig, _run_id = await begun(world, url)
    await rig.prove()
    await restore.look(rig.database, world.settings.data_dir)
    await rig.sql("UPDATE interlock.epoch SET id = gen_random_uuid()")
    await rig.sql("ALTER TABLE interlock.checkpoint DISABLE TRIGGER ALL")
    await rig.sql("DELETE FROM interlock.checkpoint")
    await restore.look(rig.database, world.settings.data_dir)
    assert rig.database.went_back is None
