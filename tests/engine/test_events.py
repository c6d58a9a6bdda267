"""External events that arrive before, during or after their wait, or never: one event for one step, none missed."""

import asyncio
from collections.abc import Awaitable
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from tests.rig import Hold, Rig

from interlock.engine.access.principal import Principal
from interlock.engine.ingress import external_events
from interlock.engine.writing import deliver
from interlock.ids import uuid7
from interlock.journal import encode
from interlock.worker.worker import Worker

SETTLED = """
name: settled
steps:
  - {id: paid, wait: {event: bank.settled, correlation: "${input.charge}", timeout: 1h}}
  - {id: tell, wait: {duration: 0s}}
"""
AFTER_A_STEP = """
name: after
steps:
  - {id: pay, tool: t.pay}
  - {id: paid, wait: {event: bank.settled, correlation: "${input.charge}", timeout: 1h}}
  - {id: tell, tool: t.tell, input: {amount: "${steps.paid.output.amount}"}}
"""


def tools(rig: Rig) -> list[int]:
    told: list[int] = []

    @rig.tool("t.pay")
    async def pay() -> None: ...

    @rig.tool("t.tell")
    async def tell(amount: int) -> int:
        told.append(amount)
        return amount

    return told


async def send(
    rig: Rig, about: str, payload: Any = None, *, type: str = "bank.settled", id: str | None = None,
    who: Principal | None = None,
) -> Any:  # fmt: skip
    new = external_events.NewEvent(id or str(uuid7()), type, about, encode({} if payload is None else payload))
    return await rig.database.run_in_transaction(
        lambda tx: external_events.send(tx, rig.settings, rig.plans, who or rig.admin, new)
    )


async def nobody_is_missed(rig: Rig) -> None:
    """No stored event matches a waiting step, and no subscription remains of a step that does not wait."""
    missed = await rig.sql(
        "SELECT e.id, w.run_id FROM interlock.external_event e"
        " JOIN interlock.event_subscription w USING (tenant_id, type, correlation)"
        " WHERE e.consumed_at IS NULL AND (e.workspace_id IS NULL OR e.workspace_id = w.workspace_id)"
    )
    assert missed == []
    for wait in await rig.sql("SELECT run_id, step FROM interlock.event_subscription"):
        assert (await rig.run(wait["run_id"]))["step"][wait["step"]]["status"] == "waiting_external"


# ---------------------------------------------------------------- a single event


async def test_an_event_that_comes_after_its_wait_moves_the_run_at_once_and_without_a_worker(rig: Rig) -> None:
    tools(rig)
    await rig.apply(SETTLED)
    run_id = await rig.start("settled", {"charge": "ch_1"})
    waiting = await rig.run(run_id)
    assert (waiting["status"], waiting["step"]["paid"]["status"]) == ("waiting_external", "waiting_external")
    assert waiting["step"]["paid"]["waits_for"]["event"] == "bank.settled"
    sent = await send(rig, "ch_1", {"amount": 5}, id="evt_1")
    assert (sent.run_id, sent.step) == (run_id, "paid")
    run = await rig.run(run_id)
    step = run["step"]["paid"]
    assert (step["status"], step["output"], step["waits_for"]) == ("succeeded", {"amount": 5}, None)
    assert "paid: waiting_external -arrive-> succeeded" in await rig.journal(run_id)
    [entry] = await rig.sql(
        "SELECT actor, data FROM interlock.journal_entry WHERE run_id = $1 AND event = 'arrive' LIMIT 1", run_id
    )
    assert entry["actor"] == rig.admin.actor and '"id": "evt_1"' in entry["data"]
    await nobody_is_missed(rig)


async def test_an_event_that_comes_first_is_kept_and_is_there_when_the_step_waits(rig: Rig) -> None:
    told = tools(rig)
    await rig.apply(AFTER_A_STEP)
    sent = await send(rig, "ch_1", {"amount": 7})
    assert sent.run_id is None
    run = await rig.work_until(await rig.start("after", {"charge": "ch_1"}))
    assert (run["status"], run["result"], told) == ("succeeded", 7, [7])
    [row] = await rig.sql("SELECT run_id, step, consumed_at FROM interlock.external_event")
    assert (row["run_id"], row["step"]) == (run["id"], "paid") and row["consumed_at"] is not None


async def test_a_first_step_that_waits_finds_what_came_before_without_a_worker(rig: Rig) -> None:
    await rig.apply(SETTLED.replace("{id: tell, wait: {duration: 0s}}", "{id: ask, approval: {}}"))
    await send(rig, "ch_1")
    run = await rig.run(await rig.start("settled", {"charge": "ch_1"}))
    assert (run["status"], run["step"]["paid"]["output"]) == ("waiting_approval", {})


async def test_a_waiting_run_costs_one_row_and_no_lease(rig: Rig) -> None:
    tools(rig)
    await rig.apply(AFTER_A_STEP)
    run_id = await rig.start("after", {"charge": "ch_1"})
    async with rig.worker() as worker:
        await rig.until(run_id, "waiting_external")
        await asyncio.wait_for(worker.idle(), 10)  # the notification may precede the worker's own confirmation
        assert worker.drivers == {}
        assert len(await rig.sql("SELECT FROM interlock.event_subscription")) == 1
        [row] = await rig.sql("SELECT lease_worker, resume_at FROM interlock.run")
        assert (row["lease_worker"], row["resume_at"]) == (None, None)
        assert await rig.sql("SELECT FROM interlock.ready_run") == []
        await send(rig, "ch_1", {"amount": 1})
        assert (await rig.until(run_id))["status"] == "succeeded"
    assert await rig.sql("SELECT FROM interlock.event_subscription") == []


async def test_each_event_is_for_one_step_and_the_longest_wait_comes_first(rig: Rig) -> None:
    await rig.apply(SETTLED)
    first, second = [await rig.start("settled", {"charge": "ch_1"}) for _ in range(2)]
    assert [(await send(rig, "ch_1")).run_id for _ in range(3)] == [first, second, None]
    third = await rig.start("settled", {"charge": "ch_1"})
    assert (await rig.run(third))["step"]["paid"]["status"] == "succeeded"
    await nobody_is_missed(rig)


async def test_kept_events_are_taken_in_the_order_they_came(rig: Rig) -> None:
    await rig.apply(SETTLED)
    for n in range(3):
        await send(rig, "ch_1", {"n": n})
    outputs = [(await rig.run(await rig.start("settled", {"charge": "ch_1"})))["step"]["paid"] for _ in range(3)]
    assert [step["output"]["n"] for step in outputs] == [0, 1, 2]


async def test_an_event_of_another_type_thing_tenant_or_workspace_never_matches(rig: Rig) -> None:
    await rig.apply(SETTLED)
    run_id = await rig.start("settled", {"charge": "ch_1"})
    other = await rig.tenant("other")
    admin = rig.admin
    elsewhere = Principal(admin.key_id, admin.tenant_id, "default", "w", admin.role, workspace_id="w1")
    for sent in (
        await send(rig, "ch_2"), await send(rig, "ch_1", type="bank.failed"), await send(rig, "ch_1", who=other),
        await send(rig, "ch_1", who=elsewhere),
    ):  # fmt: skip
        assert sent.run_id is None
    assert (await rig.run(run_id))["status"] == "waiting_external"
    # The same holds if the event arrived first.
    again = await rig.start("settled", {"charge": "ch_1"})
    assert (await rig.run(again))["status"] == "waiting_external"


async def test_a_number_is_a_correlation_too_and_nothing_else_is(rig: Rig) -> None:
    await rig.apply(SETTLED)
    run_id = await rig.start("settled", {"charge": 17})
    assert (await send(rig, "17")).run_id == run_id
    for wrong in (None, "", True, [1], "x" * 501):
        run = await rig.run(await rig.start("settled", {"charge": wrong}))
        assert (run["status"], run["reason"]) == ("failed", "terminal_error")
        assert "it must be a number or a text of 1 to 500 characters" in run["error"]["message"]
    assert await rig.sql("SELECT FROM interlock.event_subscription") == []


async def test_the_database_refuses_to_give_an_event_away_twice(rig: Rig) -> None:
    await rig.apply(SETTLED)
    await rig.start("settled", {"charge": "ch_1"})
    await send(rig, "ch_1", id="a")
    with pytest.raises(asyncpg.CheckViolationError, match="cannot be changed"):
        await rig.sql("UPDATE interlock.external_event SET step = 'other' WHERE id = 'a'")
    await send(rig, "ch_1", id="b")
    with pytest.raises(asyncpg.UniqueViolationError):
        await rig.sql(
            "UPDATE interlock.external_event SET (run_id, step, consumed_at) ="
            " (SELECT run_id, step, consumed_at FROM interlock.external_event WHERE id = 'a') WHERE id = 'b'"
        )
    with pytest.raises(asyncpg.CheckViolationError):
        await rig.sql("UPDATE interlock.external_event SET consumed_at = now() WHERE id = 'b'")


# ---------------------------------------------------------------- time


async def test_without_its_event_in_time_the_run_fails_and_the_event_is_kept_for_others(rig: Rig) -> None:
    await rig.apply(SETTLED)
    rig.clock.freeze()
    run_id = await rig.start("settled", {"charge": "ch_1"})
    rig.clock.advance(3599)
    await rig.sweep()
    assert (await rig.run(run_id))["status"] == "waiting_external"
    rig.clock.advance(1)
    await rig.sweep()
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == ("failed", "external_timeout")
    assert run["error"]["message"] == "no bank.settled for ch_1 came in time"
    assert "paid: waiting_external -fail-> failed" in await rig.journal(run_id)
    assert (await send(rig, "ch_1")).run_id is None


async def test_on_timeout_continue_goes_on_without_an_output(rig: Rig) -> None:
    told = tools(rig)
    await rig.apply(
        "name: w\nsteps:\n  - {id: paid, wait: {event: e, correlation: c, timeout: 5s}, on_timeout: continue}\n"
        "  - {id: tell, tool: t.tell, when: 'steps.paid.output == null', input: {amount: 3}}\n"
    )
    rig.clock.freeze()
    run_id = await rig.start("w")
    rig.clock.advance(5)
    await rig.sweep()
    assert (await send(rig, "c", type="e")).run_id is None, "it comes too late, and is another's"
    run = await rig.work_until(run_id)
    assert (run["status"], run["step"]["paid"]["output"], told) == ("succeeded", None, [3])


async def test_without_a_timeout_it_waits_for_ever(rig: Rig) -> None:
    await rig.apply("name: w\nsteps: [{id: a, wait: {event: e, correlation: c}}]")
    rig.clock.freeze()
    run_id = await rig.start("w")
    rig.clock.advance(3650 * 86400)
    await rig.sweep()
    assert (await rig.run(run_id))["status"] == "waiting_external"
    assert (await send(rig, "c", type="e")).run_id == run_id
    assert (await rig.work_until(run_id))["status"] == "succeeded"


async def test_a_kept_event_is_forgotten_when_its_time_is_over(rig: Rig) -> None:
    await rig.apply(SETTLED)
    rig.clock.freeze()
    await send(rig, "ch_1")
    rig.clock.advance(rig.settings.event_keep_seconds)
    run_id = await rig.start("settled", {"charge": "ch_1"})
    assert (await rig.run(run_id))["status"] == "waiting_external"
    assert await external_events.forget_expired(rig.database) == 1
    assert await rig.sql("SELECT FROM interlock.external_event") == []


async def test_a_run_that_ends_waits_no_more(rig: Rig) -> None:
    tools(rig)
    await rig.apply(SETTLED)
    run_id = await rig.start("settled", {"charge": "ch_1"})
    await rig.cancel(run_id)
    assert await rig.sql("SELECT FROM interlock.event_subscription") == []
    assert (await send(rig, "ch_1")).run_id is None


# ---------------------------------------------------------------- while a worker holds the run

SIDE_BY_SIDE = """
name: both
steps:
  - {id: slow, needs: [], tool: t.hold}
  - {id: paid, needs: [], wait: {event: e, correlation: c, timeout: 1h}}
  - {id: end, needs: [slow, paid], wait: {duration: 0s}}
"""


async def test_a_word_for_a_run_that_is_held_goes_through_its_inbox(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply(SIDE_BY_SIDE)
    run_id = await rig.start("both")
    async with rig.worker():
        await hold.inside()
        await rig.until_journal(run_id, "paid: pending -park-> waiting_external")
        assert (await send(rig, "c", 1, type="e")).run_id == run_id
        await rig.until_journal(run_id, "paid: waiting_external -arrive-> succeeded")
        hold.release.set()
        run = await rig.until(run_id)
    assert (run["status"], run["step"]["paid"]["output"]) == ("succeeded", 1)


async def test_an_event_in_the_inbox_of_a_worker_that_dies_is_not_lost(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply(SIDE_BY_SIDE)
    run_id = await rig.start("both")
    stuck = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await hold.inside()
    await rig.until_journal(run_id, "paid: pending -park-> waiting_external")
    stuck.cancel()
    await asyncio.wait([stuck])
    assert (await send(rig, "c", 1, type="e")).run_id == run_id
    assert len(await rig.sql("SELECT FROM interlock.run_command")) == 1
    rig.clock.advance(60)
    await rig.sweep()
    hold.release.set()
    run = await rig.work_until(run_id)
    assert (run["status"], run["step"]["paid"]["output"]) == ("succeeded", 1)


# ---------------------------------------------------------------- at the same moment


async def _blocked(rig: Rig, statement: str) -> None:
    """Wait until a session blocks on an advisory lock in this statement."""
    busy = "SELECT FROM pg_stat_activity WHERE wait_event = 'advisory' AND query LIKE $1"
    async with asyncio.timeout(10):
        while not await rig.sql(busy, f"%/* {statement} */%"):
            pass


async def test_who_keeps_an_event_is_seen_by_who_begins_to_wait_meanwhile(rig: Rig) -> None:
    await rig.apply(SETTLED)
    new = external_events.NewEvent("a", "bank.settled", "ch_1", "{}")
    async with rig.database.transaction() as tx:
        assert (await external_events.send(tx, rig.settings, rig.plans, rig.admin, new)).run_id is None
        starting = asyncio.create_task(rig.start("settled", {"charge": "ch_1"}))
        await _blocked(rig, "await_events")
    run = await rig.run(await starting)
    assert run["step"]["paid"]["status"] == "succeeded"
    await nobody_is_missed(rig)


async def test_who_begins_to_wait_is_seen_by_who_sends_meanwhile(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.apply(SETTLED)
    begun, go = asyncio.Event(), asyncio.Event()
    save = deliver.save

    async def hesitating(*args: Any) -> Any:
        begun.set()
        await go.wait()
        return await save(*args)

    monkeypatch.setattr(deliver, "save", hesitating)
    starting = asyncio.create_task(rig.start("settled", {"charge": "ch_1"}))
    await begun.wait()
    monkeypatch.setattr(deliver, "save", save)
    sending = asyncio.create_task(send(rig, "ch_1"))
    await _blocked(rig, "lock_event")
    go.set()
    run_id = await starting
    assert (await sending).run_id == run_id
    assert (await rig.run(run_id))["step"]["paid"]["status"] == "succeeded"


class Races:
    """Many runs that each wait for one event, and the winner of each race."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def all_won(self, runs: list[UUID]) -> None:
        for run_id in runs:
            run = await self.rig.until(run_id)
            assert (run["status"], run["step"]["paid"]["status"]) == ("succeeded", "succeeded")
        rows = await self.rig.sql("SELECT run_id FROM interlock.external_event")
        assert sorted(row["run_id"] for row in rows) == sorted(runs), "each event is one run's"
        assert await self.rig.sql("SELECT FROM interlock.event_subscription") == []


async def _all(*work: Awaitable[Any], at_once: int = 6) -> list[Any]:
    gate = asyncio.Semaphore(at_once)

    async def one(item: Awaitable[Any]) -> Any:
        async with gate:
            return await item

    return await asyncio.gather(*(one(item) for item in work))


COUNTS = pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.chaos)])


@COUNTS
async def test_events_before_their_waits(rig: Rig, count: int) -> None:
    told = tools(rig)
    await rig.apply(AFTER_A_STEP)
    await _all(*(send(rig, f"ch_{n}", {"amount": n}) for n in range(count)))
    runs = await _all(*(rig.start("after", {"charge": f"ch_{n}"}) for n in range(count)))
    async with rig.worker(100):
        await Races(rig).all_won(runs)
    assert sorted(told) == list(range(count))


@COUNTS
async def test_events_after_their_waits(rig: Rig, count: int) -> None:
    told = tools(rig)
    await rig.apply(AFTER_A_STEP)
    runs = await _all(*(rig.start("after", {"charge": f"ch_{n}"}) for n in range(count)))
    async with rig.worker(100):
        for run_id in runs:
            await rig.until(run_id, "waiting_external")
        await _all(*(send(rig, f"ch_{n}", {"amount": n}) for n in range(count)))
        await Races(rig).all_won(runs)
    assert sorted(told) == list(range(count))


@COUNTS
async def test_events_at_the_moment_of_their_waits(rig: Rig, count: int) -> None:
    told = tools(rig)
    await rig.apply(AFTER_A_STEP)
    async with rig.worker(100):
        # Send each event together with the start of its run: the wait starts while the event is being delivered.
        pairs = [(rig.start("after", {"charge": f"ch_{n}"}), send(rig, f"ch_{n}", {"amount": n})) for n in range(count)]
        runs = (await _all(*(work for pair in pairs for work in pair)))[::2]
        await Races(rig).all_won(runs)
    assert sorted(told) == list(range(count))


async def _time_out(rig: Rig, run_id: UUID) -> None:
    tenant = rig.admin.tenant_id
    await rig.database.run_in_transaction(lambda tx: external_events.time_out(tx, rig.plans, tenant, run_id, "paid"))


@COUNTS
async def test_a_time_out_that_races_its_event_has_one_winner(rig: Rig, count: int) -> None:
    told = tools(rig)
    await rig.apply(AFTER_A_STEP)
    runs = await _all(*(rig.start("after", {"charge": f"ch_{n}"}) for n in range(count)))
    async with rig.worker(100):
        for run_id in runs:
            await rig.until(run_id, "waiting_external")
    rig.clock.advance(3600)
    async with rig.worker(100):
        pairs = [(send(rig, f"ch_{n}", {"amount": n}), _time_out(rig, run_id)) for n, run_id in enumerate(runs)]
        # Run both side by side, with alternating order.
        await _all(*(work for n, pair in enumerate(pairs) for work in (pair if n % 2 else pair[::-1])))
        ended = [await rig.until(run_id) for run_id in runs]
    assert await rig.sql("SELECT FROM interlock.event_subscription") == []
    consumed = {
        row["run_id"] for row in await rig.sql("SELECT run_id FROM interlock.external_event WHERE run_id IS NOT NULL")
    }
    for run in ended:
        won = run["status"] == "succeeded"
        assert won or run["reason"] == "external_timeout", run
        assert (run["id"] in consumed) == won, "a run that timed out has taken no event"
    assert len(told) == len(consumed) and len(await rig.sql("SELECT FROM interlock.external_event")) == count
    assert 0 < len(consumed) < count, "neither side won them all"
