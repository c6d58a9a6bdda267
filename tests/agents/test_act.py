"""An agent with a loop of its own: each of its calls goes through the gate, and comes back done or pending."""

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest

from interlock.api import runs
from interlock.wire import Act
from tests.agents.conftest import Talk


async def test_a_read_is_answered_with_its_result(talk: Talk) -> None:
    async with talk.rig.worker():
        status, act = await talk.post("/api/acts", {"tool": "shop.lookup", "args": {"charge": "ch_1"}})
    assert (status, act["status"]) == (201, "done")
    assert act["result"] == {"charge": "ch_1", "name": "Ada"}


async def test_a_write_is_pending_until_people_say_yes_and_is_then_done_once(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_POLL_SECONDS", 60.0)  # nobody waits for more than the news
    agent = Talk(talk.rig, talk.rig.http(await talk.rig.key("bot", "agent")))
    body = {"tool": "shop.refund", "args": {"charge": "ch_1", "amount": 5}, "request_id": "call-1"}
    async with talk.rig.worker(), asyncio.timeout(15):
        status, act = await agent.post("/api/acts", body)
        assert (status, act["status"]) == (201, "pending_approval")
        again = (await agent.post("/api/acts", body))[1]
        assert (again["id"], again["approval_id"]) == (act["id"], act["approval_id"])
        refused = await agent.post(f"/api/approvals/{act['approval_id']}/approve")
        assert refused[0] == 403
        await talk.post(f"/api/approvals/{act['approval_id']}/approve")
        done = await agent.get(f"/api/acts/{act['id']}", wait=20)
    assert (done["status"], done["result"]) == ("done", {"refunded": "ch_1", "amount": 5})
    assert talk.refunds == ["ch_1"]


async def test_what_is_forbidden_or_does_not_fit_fails_with_the_reason(talk: Talk) -> None:
    async with talk.rig.worker():
        denied, unfit = await asyncio.gather(
            talk.post("/api/acts", {"tool": "shop.purge"}),
            talk.post("/api/acts", {"tool": "shop.refund", "args": {"charge": "ch_1"}}),
        )
    assert (denied[1]["status"], denied[1]["reason"]) == ("failed", "policy_denied")
    assert "amount: Field required" in unfit[1]["error"]["message"]
    assert talk.refunds == []


async def test_a_run_is_no_act(talk: Talk) -> None:
    sent = await talk.told("hello")
    answer = await talk.http.get(f"/api/acts/{sent['run_id']}")
    assert (answer.status_code, answer.json()["code"]) == (404, "ACT_NOT_FOUND")


def test_the_example_with_a_loop_of_its_own_waits_for_people() -> None:
    loop = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_loop" / "loop.py"))
    acts: list[Any] = []

    class Interlock:
        def act(self, tool: str, args: dict[str, Any], *, idempotency_key: str) -> Act:
            acts.append((tool, args, idempotency_key))
            return Act(id="1", tool=tool, status="pending_approval", approval_id="2")

        def acted(self, act_id: str, *, wait: float) -> Act:
            return Act(id=act_id, tool="shop.refund", status="done", result={"refunded": "ch_1"})

    answer = loop["call"](Interlock(), "shop__refund", '{"charge": "ch_1"}', "call-1")
    assert (answer, acts) == ('{"refunded": "ch_1"}', [("shop.refund", {"charge": "ch_1"}, "call-1")])
