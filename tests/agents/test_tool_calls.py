"""An agent with its own loop: each call goes through the gate and returns done or pending."""

import asyncio
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from interlock.api import runs
from interlock.wire import ToolCall
from tests.agents.conftest import Talk, Waiting


async def test_a_read_is_answered_with_its_result(talk: Talk) -> None:
    async with talk.rig.worker():
        status, made = await talk.post("/api/tool-calls", {"tool": "shop.lookup", "args": {"charge": "ch_1"}})
    assert (status, made["status"]) == (200, "done")
    assert made["result"] == {"charge": "ch_1", "name": "Ada"}


async def test_a_write_is_pending_until_people_say_yes_and_is_then_done_once(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_POLL_SECONDS", 60.0)  # the wait must rely on the notification alone
    agent = Talk(talk.rig, talk.rig.http(await talk.rig.key("bot", "agent")))
    body = {"tool": "shop.refund", "args": {"charge": "ch_1", "amount": 5}, "request_id": "call-1"}
    async with talk.rig.worker(), asyncio.timeout(15):
        status, act = await agent.post("/api/tool-calls", body)
        assert (status, act["status"]) == (202, "pending_approval")
        again = (await agent.post("/api/tool-calls", body))[1]
        assert (again["id"], again["approval_id"]) == (act["id"], act["approval_id"])
        refused = await agent.post(f"/api/approvals/{act['approval_id']}/approve")
        assert refused[0] == 403
        await talk.post(f"/api/approvals/{act['approval_id']}/approve")
        done = await agent.get(f"/api/tool-calls/{act['id']}", wait=20)
    assert (done["status"], done["result"]) == ("done", {"refunded": "ch_1", "amount": 5})
    assert talk.refunds == ["ch_1"]


async def test_what_is_forbidden_or_does_not_fit_fails_with_the_reason(talk: Talk) -> None:
    async with talk.rig.worker():
        denied, unfit = await asyncio.gather(
            talk.post("/api/tool-calls", {"tool": "shop.purge"}),
            talk.post("/api/tool-calls", {"tool": "shop.refund", "args": {"charge": "ch_1"}}),
        )
    assert (denied[1]["status"], denied[1]["reason"]) == ("failed", "policy_denied")
    assert "amount: Field required" in unfit[1]["error"]["message"]
    assert talk.refunds == []


async def test_a_misspelt_tool_is_named_at_once(talk: Talk) -> None:
    """The call waited for a worker with such a tool, for more than a minute."""
    called = {"tool": "shop.refnd", "args": {"charge": "ch_1", "amount": 1}, "wait": 0}
    answer = await talk.http.post("/api/tool-calls", json=called)
    said = (answer.status_code, answer.json()["code"], answer.json()["detail"])
    assert said == (404, "TOOL_NOT_FOUND", "no tool shop.refnd here; did you mean `shop.refund`?")
    # A worker with a label may have a tool that the server does not have.
    taken = await talk.http.post("/api/tool-calls", params={"allow_unknown_tools": True}, json=called)
    assert (taken.status_code, taken.json()["status"]) == (202, "running")


async def test_a_run_is_not_a_tool_call(talk: Talk) -> None:
    sent = await talk.told("hello")
    answer = await talk.http.get(f"/api/tool-calls/{sent['run_id']}")
    assert (answer.status_code, answer.json()["code"]) == (404, "TOOL_CALL_NOT_FOUND")


@dataclass
class Counting:
    """The agent's client for the shipped loops, which counts its requests."""

    talk: Talk
    loop: asyncio.AbstractEventLoop
    requests: list[str] = field(default_factory=list)

    def _ask(self, request: Any) -> ToolCall:
        answer = asyncio.run_coroutine_threadsafe(request, self.loop).result(30)
        return ToolCall.model_validate(answer[1] if isinstance(answer, tuple) else answer)

    def tool_call(self, tool: str, args: dict[str, Any], *, idempotency_key: str) -> ToolCall:
        self.requests.append("POST")
        body = {"tool": tool, "args": args, "request_id": idempotency_key}
        return self._ask(self.talk.post("/api/tool-calls", body))

    def get_tool_call(self, tool_call_id: str, *, wait: float) -> ToolCall:
        self.requests.append("GET")
        return self._ask(self.talk.get(f"/api/tool-calls/{tool_call_id}", wait=wait))


@pytest.fixture
async def bot(talk: Talk) -> Talk:
    return Talk(talk.rig, talk.rig.http(await talk.rig.key("bot", "agent")))


REFUND = {"tool": "shop.refund", "args": {"charge": "ch_1", "amount": 5}, "request_id": "call-1"}


async def test_a_held_call_waits_until_it_is_decided_and_done(
    talk: Talk, bot: Talk, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """agents 1: `wait=` returned at once while the call was pending_approval."""
    monkeypatch.setattr(runs, "_HELD_POLL_SECONDS", 60.0)  # only the notification may end the wait
    async with talk.rig.worker(), asyncio.timeout(20):
        held = (await bot.post("/api/tool-calls", REFUND))[1]
        answer = asyncio.create_task(bot.get(f"/api/tool-calls/{held['id']}", wait=60))
        await waiting.for_run(held["id"], 2)
        await talk.post(f"/api/approvals/{held['approval_id']}/approve")
        done = await answer
    assert (done["status"], done["result"]["refunded"]) == ("done", "ch_1")


async def test_a_wait_that_is_over_says_what_the_call_waits_for(talk: Talk, bot: Talk) -> None:
    async with talk.rig.worker():
        held = (await bot.post("/api/tool-calls", REFUND))[1]
    still = await bot.get(f"/api/tool-calls/{held['id']}", wait=0.05)
    assert (still["status"], still["approval_id"]) == ("pending_approval", held["approval_id"])


async def test_waiting_calls_hold_no_connection_to_the_database(talk: Talk, bot: Talk, waiting: Waiting) -> None:
    async with talk.rig.worker(), asyncio.timeout(30):
        held = (await bot.post("/api/tool-calls", REFUND))[1]
        path = f"/api/tool-calls/{held['id']}"
        many = talk.rig.settings.pool_size * 3
        answers = [asyncio.create_task(bot.get(path, wait=60)) for _ in range(many)]
        await waiting.for_run(held["id"], many + 1)
        assert (await talk.get(path))["status"] == "pending_approval", "others are still served"
        await talk.post(f"/api/approvals/{held['approval_id']}/approve")
        assert {done["status"] for done in await asyncio.gather(*answers)} == {"done"}


async def test_the_shipped_loop_makes_two_requests_for_a_call_that_is_held(
    talk: Talk, bot: Talk, waiting: Waiting
) -> None:
    """agents 1: examples/own_loop made 2,922 requests in 6.7 seconds."""
    loop = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_loop" / "loop.py"))
    counting = Counting(bot, asyncio.get_running_loop())
    async with talk.rig.worker(), asyncio.timeout(20):
        answer = asyncio.create_task(
            asyncio.to_thread(loop["call"], counting, "shop__refund", '{"charge": "ch_1", "amount": 5}', "call-1")
        )
        await waiting.for_any(2)
        [asked] = (await talk.get("/api/approvals", status="requested"))["items"]
        await talk.post(f"/api/approvals/{asked['id']}/approve")
        assert '"refunded": "ch_1"' in await answer
    assert counting.requests == ["POST", "GET"]


async def test_the_same_call_with_another_wait_is_the_same_call(talk: Talk, bot: Talk) -> None:
    first = (await bot.post("/api/tool-calls", REFUND | {"wait": 0}))[1]
    async with talk.rig.worker():
        status, again = await bot.post("/api/tool-calls", REFUND | {"wait": 20})
    assert (status, again["id"], again["status"]) == (202, first["id"], "pending_approval")


async def test_an_agent_cancels_its_own_call_and_no_other(talk: Talk, bot: Talk) -> None:
    held = (await bot.post("/api/tool-calls", REFUND | {"wait": 0}))[1]
    other = Talk(talk.rig, talk.rig.http(await talk.rig.key("other", "agent")))
    assert (await other.post(f"/api/tool-calls/{held['id']}/cancel"))[0] == 403
    status, canceled = await bot.post(f"/api/tool-calls/{held['id']}/cancel", {"reason": "changed my mind"})
    assert (status, canceled["status"], canceled["reason"]) == (200, "failed", "canceled_by_user")
