"""A flow that waits for an external event: one that came before, one that comes later, and one that never comes."""

from typing import Any

import pytest

from interlock import EventTimeout, FlowContext
from tests.rig import Rig


def settled(rig: Rig) -> None:
    @rig.flow("settled")
    async def settled(ctx: FlowContext, input: dict[str, Any]) -> Any:
        try:
            paid = await ctx.wait(event="bank.settled", correlation=input["charge"], timeout="1h")
        except EventTimeout as missed:
            return {"missed": missed.step, "reason": missed.reason}
        await ctx.sleep("0s")
        return paid


async def send(rig: Rig, about: str, payload: Any) -> int:
    body = {"type": "bank.settled", "correlation": about, "payload": payload}
    answer = await rig.http().post("/api/events", json=body)
    assert answer.status_code == 202, answer.text
    matched: int = answer.json()["matched"]
    return matched


async def test_an_event_that_came_before_the_flow_asked_for_it_is_its_answer(rig: Rig) -> None:
    settled(rig)
    assert await send(rig, "ch_1", {"amount": 5}) == 0
    run = await rig.work_until(await rig.start("settled", {"charge": "ch_1"}))
    assert (run["status"], run["result"]) == ("succeeded", {"amount": 5})
    assert [(s["key"], s["kind"], s["status"], s["output"]) for s in run["steps"]] == [
        ("wait", "wait", "succeeded", {"amount": 5}),
        ("sleep", "wait", "succeeded", None),
    ]


async def test_an_event_wakes_the_flow_that_waits_for_it_and_no_other(rig: Rig) -> None:
    settled(rig)
    run_id, other = await rig.start("settled", {"charge": 7}), await rig.start("settled", {"charge": "${x}"})
    for waiting in (run_id, other):
        await rig.work_until(waiting, "waiting_external")
    shown = (await rig.http().get(f"/api/runs/{other}")).json()["steps"][0]["waits_for"]
    assert (shown["event"], shown["correlation"]) == ("bank.settled", "${x}")
    assert await send(rig, "7", {"amount": 6}) == 1
    assert (await rig.run(run_id))["status"] == "running"
    assert (await rig.work_until(run_id))["result"] == {"amount": 6}
    assert (await rig.run(other))["status"] == "waiting_external"
    assert await send(rig, "${x}", {"amount": 8}) == 1
    assert (await rig.work_until(other))["result"] == {"amount": 8}


async def test_a_flow_can_catch_that_no_event_came_in_time(rig: Rig) -> None:
    settled(rig)
    run_id = await rig.start("settled", {"charge": "ch_1"})
    rig.clock.freeze()
    await rig.work_until(run_id, "waiting_external")
    rig.clock.advance(3601)
    await rig.sweep()
    run = await rig.work_until(run_id)
    assert (run["status"], run["result"]) == ("succeeded", {"missed": "wait", "reason": "external_timeout"})
    assert await send(rig, "ch_1", {"amount": 5}) == 0


async def test_an_event_for_a_flow_that_is_canceled_is_kept_for_another(rig: Rig) -> None:
    settled(rig)
    run_id = await rig.start("settled", {"charge": "ch_1"})
    await rig.work_until(run_id, "waiting_external")
    assert (await rig.http().post(f"/api/runs/{run_id}/cancel")).json()["status"] == "canceled"
    assert await send(rig, "ch_1", {"amount": 5}) == 0
    assert (await rig.work_until(await rig.start("settled", {"charge": "ch_1"})))["result"] == {"amount": 5}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "either a duration or an event"),
        ({"duration": "5m", "event": "a"}, "either a duration or an event"),
        ({"duration": "5m", "timeout": "5m"}, "only a wait for an event"),
        ({"event": "a b", "correlation": "c"}, "not the type of an event"),
        ({"event": "a"}, "correlation: expected"),
        ({"event": "a", "correlation": ""}, "correlation: expected"),
        ({"event": "a", "correlation": "c", "timeout": 0}, "above zero"),
    ],
)
async def test_what_cannot_be_waited_for_is_refused_where_it_is_asked(rig: Rig, asked: Any, why: str) -> None:
    @rig.flow("odd")
    async def odd(ctx: FlowContext) -> Any:
        await ctx.wait(**asked)

    run = await rig.work_until(await rig.start("odd"))
    assert (run["status"], run["error"]["type"]) == ("failed", "FlowUsageError")
    assert why in run["error"]["message"]
