"""Every row of the run table that the engine can produce, one test per row.

Three rows have no test here, because nothing produces them yet: waiting_external returns to running before it can
succeed or hold, and only a run that a worker holds enters canceling.
"""

import asyncio

import pytest
from tests.rig import Hold, Rig

from interlock import Terminal
from interlock.engine.runs import runs
from interlock.errors import Conflict
from interlock.store.pool import Tx

TOOL = """
name: tool
steps:
  - {id: a, tool: t.hold}
"""

GATE = """
name: gate
steps:
  - {id: ask, approval: {summary: "${input.what}"}}
"""

WAIT = """
name: wait
steps:
  - {id: rest, wait: {duration: 10m}}
"""

GATE_THEN_TOOL = """
name: gate-then-tool
steps:
  - {id: ask, approval: {expires_in: 1h}}
  - {id: a, tool: t.hold}
"""

WAIT_THEN_TOOL = """
name: wait-then-tool
steps:
  - {id: rest, wait: {duration: 10m}}
  - {id: a, tool: t.hold}
"""

GATE_BESIDE_WAIT = """
name: gate-beside-wait
steps:
  - {id: ask, needs: [], approval: {}}
  - {id: rest, needs: [], wait: {duration: 10m}}
"""


def holding(rig: Rig, name: str = "t.hold") -> Hold:
    hold = Hold()

    @rig.tool(name)
    async def stay() -> str:
        await hold()
        return "done"

    return hold


def free(rig: Rig, name: str = "t.hold") -> Hold:
    hold = holding(rig, name)
    hold.release.set()
    return hold


# ---------------------------------------------------------------- pending


async def test_pending_starts_when_its_first_step_is_claimed(rig: Rig) -> None:
    hold = holding(rig)
    await rig.apply(TOOL)
    run_id = await rig.start("tool")
    assert (await rig.run(run_id))["status"] == "pending"
    assert (await rig.run(run_id))["started_at"] is None
    async with rig.worker():
        await hold.inside()
        run = await rig.run(run_id)
        assert (run["status"], await rig.journal(run_id)) == (
            "running",
            ["run:  -create-> pending", "run: pending -start-> running"],
        )
        assert run["started_at"] is not None
        hold.release.set()
        await rig.until(run_id, "succeeded")


async def test_pending_holds_without_a_worker_when_its_first_step_is_a_gate(rig: Rig) -> None:
    await rig.apply(GATE)
    run_id = await rig.start("gate", {"what": "it"})
    assert (await rig.run(run_id))["status"] == "waiting_approval"
    assert await rig.journal(run_id) == [
        "run:  -create-> pending",
        "ask: pending -open-> waiting_approval",
        "run: pending -hold-> waiting_approval",
    ]


async def test_pending_parks_without_a_worker_when_its_first_step_is_a_wait(rig: Rig) -> None:
    await rig.apply(WAIT)
    run_id = await rig.start("wait")
    assert (await rig.run(run_id))["status"] == "waiting_external"
    assert await rig.journal(run_id) == [
        "run:  -create-> pending",
        "rest: pending -park-> waiting_external",
        "run: pending -park-> waiting_external",
    ]


async def test_pending_fails_when_its_deadline_passes_in_the_queue(rig: Rig) -> None:
    await rig.apply(TOOL)
    rig.clock.freeze()
    run_id = await rig.start("tool", deadline_seconds=60)
    rig.clock.advance(59)
    await rig.sweep()
    assert (await rig.run(run_id))["status"] == "pending"
    rig.clock.advance(1)
    await rig.sweep()
    run = await rig.run(run_id)
    assert (run["status"], run["reason"], run["step"]["a"]["status"]) == ("failed", "timed_out", "canceled")
    assert (await rig.journal(run_id))[-1] == "run: pending -fail-> failed"
    assert await rig.sql("SELECT * FROM interlock.ready_run") == []


async def test_pending_fails_when_its_first_gate_cannot_say_what_it_asks(rig: Rig) -> None:
    await rig.apply(GATE)
    run_id = await rig.start("gate", {})
    run = await rig.run(run_id)
    assert (run["status"], run["reason"], run["error"]["step"]) == ("failed", "terminal_error", "ask")
    assert (await rig.journal(run_id))[1:] == ["ask: running -fail-> failed", "run: pending -fail-> failed"]


async def test_pending_is_canceled_at_once(rig: Rig) -> None:
    await rig.apply(TOOL)
    run_id = await rig.start("tool")
    await rig.cancel(run_id)
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == ("canceled", "canceled_by_user")
    assert run["step"]["a"]["status"] == "canceled"
    assert (await rig.journal(run_id))[-1] == "run: pending -cancel-> canceled"
    assert await rig.sql("SELECT * FROM interlock.ready_run") == []


async def test_a_run_whose_only_gate_is_not_wanted_starts_and_succeeds(rig: Rig) -> None:
    """Pending reaches succeeded only through running."""
    await rig.apply("{name: idle, steps: [{id: ask, approval: {}, when: 'input.big'}]}")
    run_id = await rig.start("idle", {"big": False})
    assert (await rig.run(run_id))["status"] == "pending"
    run = await rig.work_until(run_id)
    assert (run["status"], run["reason"], run["step"]["ask"]["status"]) == ("succeeded", "completed", "skipped")
    assert await rig.journal(run_id) == [
        "run:  -create-> pending",
        "ask: pending -skip-> skipped",
        "run: pending -start-> running",
        "run: running -succeed-> succeeded",
    ]


async def test_a_wait_of_no_time_is_over_at_once(rig: Rig) -> None:
    await rig.apply("{name: blink, steps: [{id: rest, wait: {duration: 0s}}]}")
    assert (await rig.work_until(await rig.start("blink")))["status"] == "succeeded"


# ---------------------------------------------------------------- running


async def test_running_holds_at_a_gate_and_gives_its_lease_back(rig: Rig) -> None:
    free(rig)
    await rig.apply("{name: w, steps: [{id: a, tool: t.hold}, {id: ask, approval: {}}]}")
    run_id = await rig.start("w")
    async with rig.worker() as worker:
        await rig.until(run_id, "waiting_approval")
        assert (await rig.journal(run_id))[-2:] == [
            "ask: pending -open-> waiting_approval",
            "run: running -hold-> waiting_approval",
        ]
        [row] = await rig.sql("SELECT lease_worker FROM interlock.run")
        assert row["lease_worker"] is None
        await asyncio.wait_for(worker.idle(), 10)  # the row may change before the worker knows that its write is done
        assert worker.drivers == {}


async def test_running_parks_at_a_wait_and_gives_its_lease_back(rig: Rig) -> None:
    free(rig)
    await rig.apply("{name: w, steps: [{id: a, tool: t.hold}, {id: rest, wait: {duration: 1h}}]}")
    run_id = await rig.start("w")
    await rig.work_until(run_id, "waiting_external")
    assert (await rig.journal(run_id))[-2:] == [
        "rest: pending -park-> waiting_external",
        "run: running -park-> waiting_external",
    ]
    [row] = await rig.sql("SELECT lease_worker, resume_at IS NOT NULL AS wakes FROM interlock.run")
    assert (row["lease_worker"], row["wakes"]) == (None, True)


async def test_running_succeeds_when_its_last_step_is_settled(rig: Rig) -> None:
    free(rig)
    await rig.apply(TOOL)
    run = await rig.work_until(await rig.start("tool"))
    assert (run["status"], run["reason"], run["result"]) == ("succeeded", "completed", "done")
    assert (await rig.journal(run["id"]))[-1] == "run: running -succeed-> succeeded"
    assert run["duration_ms"] is not None and run["completed_at"] >= run["created_at"]


async def test_running_fails_when_a_step_fails(rig: Rig) -> None:
    @rig.tool("t.hold")
    async def broken() -> None:
        raise Terminal("no such charge")

    await rig.apply(TOOL)
    run = await rig.work_until(await rig.start("tool"))
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    assert run["error"] == {"step": "a", "type": "Terminal", "message": "no such charge"}
    assert (await rig.journal(run["id"]))[-2:] == ["a: running -fail-> failed", "run: running -fail-> failed"]


async def test_running_with_a_step_in_flight_is_canceled_through_canceling(rig: Rig) -> None:
    hold = holding(rig)
    await rig.apply(TOOL)
    run_id = await rig.start("tool")
    async with rig.worker():
        await hold.inside()
        await rig.cancel(run_id)
        [row] = await rig.sql("SELECT status FROM interlock.run")
        assert row["status"] == "canceling"
        run = await rig.until(run_id, "canceled")
    assert hold.interrupted
    assert (run["status"], run["reason"], run["step"]["a"]["status"]) == ("canceled", "canceled_by_user", "canceled")
    journal = await rig.journal(run_id)
    assert journal[2:] == [
        "a: running -cancel-> canceled",
        "run: running -cancel-> canceling",
        "run: canceling -stopped-> canceled",
    ]


async def test_running_with_nothing_in_flight_is_canceled_at_once(rig: Rig) -> None:
    @rig.tool("t.hold")
    async def flaky() -> None:
        raise ConnectionError("try later")

    await rig.apply(TOOL)
    run_id = await rig.start("tool")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
    assert (await rig.run(run_id))["status"] == "running"
    await rig.cancel(run_id)
    assert (await rig.run(run_id))["status"] == "canceled"
    assert (await rig.journal(run_id))[-1] == "run: running -cancel-> canceled"


# ---------------------------------------------------------------- waiting for people


async def test_waiting_approval_resumes_when_it_is_granted(rig: Rig) -> None:
    free(rig)
    await rig.apply(GATE_THEN_TOOL)
    run_id = await rig.start("gate-then-tool")
    await rig.approve(run_id)
    assert (await rig.run(run_id))["status"] == "running"
    assert (await rig.journal(run_id))[-2:] == [
        "ask: waiting_approval -grant-> succeeded",
        "run: waiting_approval -resume-> running",
    ]
    assert (await rig.work_until(run_id))["status"] == "succeeded"


async def test_waiting_approval_parks_when_only_a_wait_is_left(rig: Rig) -> None:
    await rig.apply(GATE_BESIDE_WAIT)
    run_id = await rig.start("gate-beside-wait")
    assert (await rig.run(run_id))["status"] == "waiting_approval"
    await rig.approve(run_id)
    assert (await rig.run(run_id))["status"] == "waiting_external"
    assert (await rig.journal(run_id))[-1] == "run: waiting_approval -park-> waiting_external"


async def test_a_timer_beside_a_gate_leaves_the_gate_open(rig: Rig) -> None:
    """The timer resumes the run; with only the gate left, a worker holds it again."""
    await rig.apply(GATE_BESIDE_WAIT)
    rig.clock.freeze()
    run_id = await rig.start("gate-beside-wait")
    rig.clock.advance(600)
    await rig.sweep()
    async with rig.worker():
        await rig.until_journal(run_id, "run: running -hold-> waiting_approval")
    assert (await rig.journal(run_id))[-3:] == [
        "run: waiting_approval -resume-> running",
        "rest: waiting_external -arrive-> succeeded",
        "run: running -hold-> waiting_approval",
    ]
    await rig.approve(run_id)
    assert (await rig.run(run_id))["status"] == "succeeded"


async def test_waiting_approval_succeeds_when_the_approval_was_the_last_step(rig: Rig) -> None:
    await rig.apply(GATE)
    run_id = await rig.start("gate", {"what": "it"})
    await rig.approve(run_id)
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == ("succeeded", "completed")
    assert (await rig.journal(run_id))[-2:] == [
        "ask: waiting_approval -grant-> succeeded",
        "run: waiting_approval -succeed-> succeeded",
    ]


async def test_waiting_approval_fails_when_it_is_rejected(rig: Rig) -> None:
    await rig.apply(GATE_THEN_TOOL)
    run_id = await rig.start("gate-then-tool")
    await rig.decide(run_id, approves=False, reason="not today")
    run = await rig.run(run_id)
    assert (run["status"], run["reason"], run["error"]["message"]) == ("failed", "rejected", "not today")
    assert {key: step["status"] for key, step in run["step"].items()} == {"ask": "failed", "a": "canceled"}
    assert (await rig.journal(run_id))[-2:] == [
        "ask: waiting_approval -refuse-> failed",
        "run: waiting_approval -fail-> failed",
    ]


async def test_waiting_approval_fails_when_nobody_decides_in_time(rig: Rig) -> None:
    await rig.apply(GATE_THEN_TOOL)
    rig.clock.freeze()
    run_id = await rig.start("gate-then-tool")
    rig.clock.advance(3599)
    await rig.sweep()
    assert (await rig.run(run_id))["status"] == "waiting_approval"
    rig.clock.advance(1)
    await rig.sweep()
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == ("failed", "approval_expired")
    [approval] = await rig.sql("SELECT status FROM interlock.approval")
    assert approval["status"] == "expired"
    assert (await rig.journal(run_id))[-1] == "run: waiting_approval -fail-> failed"


async def test_waiting_approval_fails_at_the_deadline_and_withdraws_its_question(rig: Rig) -> None:
    await rig.apply(GATE_THEN_TOOL)
    rig.clock.freeze()
    run_id = await rig.start("gate-then-tool", deadline_seconds=60)
    rig.clock.advance(60)
    await rig.sweep()
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == ("failed", "timed_out")
    assert (await rig.journal(run_id))[-1] == "run: waiting_approval -fail-> failed"
    [approval] = await rig.sql("SELECT status FROM interlock.approval")
    assert approval["status"] == "canceled"


async def test_waiting_approval_is_canceled_at_once_and_withdraws_its_question(rig: Rig) -> None:
    await rig.apply(GATE_THEN_TOOL)
    run_id = await rig.start("gate-then-tool")
    await rig.cancel(run_id)
    run = await rig.run(run_id)
    assert (run["status"], {s["status"] for s in run["steps"]}) == ("canceled", {"canceled"})
    assert (await rig.journal(run_id))[-1] == "run: waiting_approval -cancel-> canceled"
    [approval] = await rig.sql("SELECT status FROM interlock.approval")
    assert approval["status"] == "canceled"


# ---------------------------------------------------------------- waiting for time


async def test_waiting_external_resumes_when_its_timer_is_due(rig: Rig) -> None:
    free(rig)
    await rig.apply(WAIT_THEN_TOOL)
    rig.clock.freeze()
    run_id = await rig.start("wait-then-tool")
    rig.clock.advance(599)
    await rig.sweep()
    assert (await rig.run(run_id))["status"] == "waiting_external"
    rig.clock.advance(1)
    await rig.sweep()
    assert (await rig.run(run_id))["status"] == "running"
    assert (await rig.journal(run_id))[-1] == "run: waiting_external -resume-> running"
    run = await rig.work_until(run_id)
    assert run["status"] == "succeeded"
    assert (await rig.journal(run_id))[-3:] == [
        "rest: waiting_external -arrive-> succeeded",
        "a: running -succeed-> succeeded",
        "run: running -succeed-> succeeded",
    ]


async def test_waiting_external_fails_at_the_deadline(rig: Rig) -> None:
    await rig.apply(WAIT)
    rig.clock.freeze()
    run_id = await rig.start("wait", deadline_seconds=60)
    rig.clock.advance(60)
    await rig.sweep()
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == ("failed", "timed_out")
    assert (await rig.journal(run_id))[-1] == "run: waiting_external -fail-> failed"


async def test_waiting_external_is_canceled_at_once(rig: Rig) -> None:
    await rig.apply(WAIT)
    run_id = await rig.start("wait")
    await rig.cancel(run_id)
    assert (await rig.run(run_id))["status"] == "canceled"
    assert (await rig.journal(run_id))[-1] == "run: waiting_external -cancel-> canceled"


# ---------------------------------------------------------------- canceling


async def test_canceling_fails_when_the_deadline_had_passed_before(rig: Rig) -> None:
    """Both commands reach the holder together; the earlier decision determines how the run ends."""
    hold = holding(rig)
    await rig.apply(TOOL)
    rig.clock.freeze()
    run_id = await rig.start("tool", deadline_seconds=60)
    async with rig.worker():
        await hold.inside()
        rig.clock.advance(61)

        async def both(tx: Tx) -> None:
            await runs.time_out(tx, rig.plans, rig.admin.tenant_id, run_id)
            await runs.cancel(tx, rig.plans, rig.admin, run_id)

        await rig.database.run_in_transaction(both)
        run = await rig.until(run_id, "failed")
    assert (run["status"], run["reason"]) == ("failed", "timed_out")
    assert (await rig.journal(run_id))[-2:] == [
        "run: running -cancel-> canceling",
        "run: canceling -fail-> failed",
    ]


# ---------------------------------------------------------------- the end


async def test_an_ended_run_is_never_moved_again(rig: Rig) -> None:
    """Late deadlines, timers, approvals and cancels change nothing."""
    await rig.apply(GATE_THEN_TOOL)
    rig.clock.freeze()
    run_id = await rig.start("gate-then-tool", deadline_seconds=60)
    await rig.cancel(run_id)
    before = await rig.journal(run_id)
    rig.clock.advance(7200)
    await rig.sweep()
    with pytest.raises(Conflict):
        await rig.approve(run_id)
    await rig.cancel(run_id)
    assert await rig.journal(run_id) == before
