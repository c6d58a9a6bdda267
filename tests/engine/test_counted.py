"""Metrics and logs count every transition, from every source, and how long each state lasted."""

from typing import Any

import pytest
import structlog
from tests.rig import Rig

from interlock.engine.queueing.leases import reclaim_lost
from interlock.errors import Retryable
from interlock.telemetry import detail, metrics

GATED = """
name: gated
steps:
  - {id: ask, approval: {tier: low}}
  - {id: nap, wait: {duration: 40s}}
  - {id: a, tool: t.echo}
"""


@pytest.fixture(autouse=True)
def echo(rig: Rig) -> None:
    rig.clock.freeze()

    @rig.tool("t.echo")
    async def echo() -> None: ...


def moved(machine: str, before: str, after: str) -> float:
    return metrics.transition(machine, before, after)._value.get()  # type: ignore[no-any-return]


def lasted(machine: str, state: str) -> tuple[float, float]:
    """Return how many transitions left the state, and the total time in it."""
    name, labels = f"interlock_{machine}_state_seconds", {"state": state}
    found = [metrics.registry.get_sample_value(f"{name}_{part}", labels) for part in ("count", "sum")]
    return found[0] or 0.0, found[1] or 0.0


def since(before: tuple[float, float], machine: str, state: str) -> Any:
    now = lasted(machine, state)
    return pytest.approx((now[0] - before[0], now[1] - before[1]), abs=0.01)


async def test_a_run_that_a_timer_wakes_is_counted_as_resumed(rig: Rig) -> None:
    await rig.apply("{name: nap, steps: [{id: nap, wait: {duration: 40s}}, {id: a, tool: t.echo}]}")
    before = moved("run", "waiting_external", "running")
    await rig.start("nap")
    rig.clock.advance(41)
    await rig.sweep()
    assert moved("run", "waiting_external", "running") == before + 1


async def test_one_that_a_timer_only_brings_to_its_next_try_has_not_moved(rig: Rig) -> None:
    @rig.tool("t.busy")
    async def busy() -> None:
        raise Retryable("busy")

    await rig.apply("{name: busy, steps: [{id: a, tool: t.busy, retry: {max_attempts: 2, base_delay: 40s}}]}")
    run_id = await rig.start("busy")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
    before = moved("run", "running", "running")
    rig.clock.advance(3600)
    await rig.sweep()
    assert await rig.sql("SELECT FROM interlock.ready_run")
    assert moved("run", "running", "running") == before


async def test_a_question_that_ends_with_its_run_is_counted_and_how_long_it_was_open(rig: Rig) -> None:
    await rig.apply(GATED)
    before, waited = moved("approval", "requested", "canceled"), lasted("approval", "requested")
    run_id = await rig.start("gated")
    rig.clock.advance(30)
    await rig.cancel(run_id)
    assert moved("approval", "requested", "canceled") == before + 1
    assert since(waited, "approval", "requested") == (1, 30)
    run_id = await rig.start("gated")
    rig.clock.advance(20)
    await rig.approve(run_id)
    assert since(waited, "approval", "requested") == (2, 50)


async def test_a_lost_worker_was_running_until_it_was_missed(rig: Rig) -> None:
    before = lasted("worker", "running")
    await rig.claim_by_hand()
    rig.clock.advance(60)
    await reclaim_lost(rig.database)
    assert since(before, "worker", "running") == (1, 60)


@pytest.mark.parametrize("often", [False, True], ids=["sealed together", "sealed one after the other"])
async def test_how_long_runs_and_steps_were_in_a_state_is_known_from_the_journal(rig: Rig, often: bool) -> None:
    await rig.apply(GATED)
    states = [("run", "waiting_approval"), ("run", "waiting_external"), ("step", "waiting_approval"),
              ("step", "waiting_external"), ("run", "running"), ("run", "pending")]  # fmt: skip
    before = [lasted(*state) for state in states]

    async def seal() -> None:
        if often:
            await rig.prove()

    run_id = await rig.start("gated")
    await seal()
    rig.clock.advance(30)
    await rig.approve(run_id)
    await seal()
    rig.clock.advance(41)
    await rig.sweep()
    await seal()
    rig.clock.advance(5)
    assert (await rig.work_until(run_id))["status"] == "succeeded"
    await rig.prove()
    assert [since(was, *state) for was, state in zip(before, states, strict=True)] == [
        (1, 30), (1, 41), (1, 30), (1, 46), (1, 5), (1, 0),
    ]  # fmt: skip
    await rig.prove()
    assert lasted("run", "waiting_approval")[0] == before[0][0] + 1


async def test_at_level_debug_every_transition_of_a_run_is_logged_with_who_made_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.apply("{name: echo, steps: [{id: a, tool: t.echo}]}")
    await rig.apply(GATED)
    monkeypatch.setattr(detail, "wanted", True)
    with structlog.testing.capture_logs() as logs:
        short, run_id = await rig.start("echo"), await rig.start("gated")
        await rig.approve(run_id)
        rig.clock.advance(41)
        await rig.sweep()
        await rig.work_until(run_id)
        canceled = await rig.start("gated")
        await rig.cancel(canceled)

    def told(of: Any) -> list[str]:
        lines = [line for line in logs if line["event"] == "run_transition" and line["run_id"] == str(of)]
        return [f"{line['from_state']} {line['to_state']} {line['initiator']}" for line in lines]

    assert told(short) == ["pending running system", "running succeeded system"]
    assert told(run_id) == [
        "pending waiting_approval system", "waiting_approval waiting_external approval",
        "waiting_external running system", "running succeeded system",
    ]  # fmt: skip
    assert told(canceled) == ["pending waiting_approval system", "waiting_approval canceled user"]
