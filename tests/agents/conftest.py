"""A shop whose agent asks before it refunds, and people who talk to the agent over HTTP."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx2
import pytest

from interlock.api import admin
from interlock.api import policy as policy_api
from tests.rig import Hold, Rig

POLICY = """
@id("reads") permit(principal, action in Action::"read", resource);
@id("refund") @decision("needs_approval") @tier("med")
  permit(principal, action == Action::"shop.refund", resource) when { context.input.amount <= 100 };
@id("large") @decision("needs_approval") @tier("high")
  permit(principal, action == Action::"shop.refund", resource) when { context.input.amount > 100 };
@id("purge") forbid(principal, action == Action::"shop.purge", resource);
"""

SUPPORT = """
name: support
model: scripted
instructions: You help people with their charges.
tools: [shop.*]
script:
  - match: '^refund (?P<charge>\\w+) (?P<amount>\\d+)'
    turns:
      - say: Let me look at that charge.
        calls: [{tool: shop.lookup, args: {charge: "{charge}"}}]
      - say: I will refund it.
        calls: [{tool: shop.refund, args: {charge: "{charge}", amount: 40}}]
      - say: "Done: {result}"
  - match: '^large'
    turns:
      - calls: [{tool: shop.refund, args: {charge: ch_9, amount: 500}}]
      - say: It is done.
  - match: '^both'
    turns:
      - say: Looking and refunding twice.
        calls:
          - {tool: shop.lookup, args: {charge: ch_1}}
          - {tool: shop.refund, args: {charge: ch_1, amount: 10}}
          - {tool: shop.refund, args: {charge: ch_2, amount: 20}}
      - say: All is settled.
  - match: '^wrong'
    turns:
      - calls: [{tool: shop.refund, args: {charge: ch_1}}, {tool: shop.nothing, args: {}}]
      - say: "I was told: {result}"
  - match: '^purge'
    turns:
      - calls: [{tool: shop.purge, args: {}}]
      - say: "I was told: {result}"
  - match: '^slowly'
    turns:
      - say: This takes a very long time to say and is never said to its end.
        pause: 3600
  - match: '^hold'
    turns:
      - calls: [{tool: shop.hold, args: {}}]
      - say: It is over.
  - match: '^for ever'
    turns: [{calls: [{tool: shop.lookup, args: {charge: ch_1}}]}]
  - match: '^break'
    turns: [{fail: the provider said no}]
  - turns: [{say: "You said: {message}"}]
"""


@dataclass
class Talk:
    """The conversations of one key."""

    rig: Rig
    http: httpx2.AsyncClient
    refunds: list[str] = field(default_factory=list)
    hold: Hold = field(default_factory=Hold)

    async def say(self, content: str, **more: Any) -> tuple[int, Any]:
        body = {"content": content, **more}
        if "session_id" not in body:
            body.setdefault("agent", "support")
        answer = await self.http.post("/api/messages", json=body)
        return answer.status_code, answer.json()

    async def told(self, content: str, **more: Any) -> Any:
        status, body = await self.say(content, **more)
        assert status == 202, body
        return body

    async def get(self, path: str, **params: Any) -> Any:
        answer = await self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        answer = await self.http.post(path, json=body or {})
        return answer.status_code, answer.json()

    async def questions(self, run_id: str, status: str = "requested") -> list[Any]:
        items: list[Any] = (await self.get("/api/approvals", run_id=run_id, status=status))["items"]
        return sorted(items, key=lambda item: item["action"]["fields"].get("charge", ""))

    async def held(self, run_id: str) -> list[Any]:
        run = await self.rig.work_until(UUID(run_id), "waiting_approval")
        assert run["status"] == "waiting_approval", (run["status"], run["error"])
        return await self.questions(run_id)

    async def ended(self, run_id: str) -> dict[str, Any]:
        run = await self.rig.work_until(UUID(run_id))
        assert run["completed_at"], run
        return run

    async def events(self, session_id: str) -> list[Any]:
        items: list[Any] = (await self.get(f"/api/sessions/{session_id}/events"))["items"]
        return items


@dataclass
class Waiting:
    """The requests that wait on the server for a run, by run id."""

    runs: list[str] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def began(self, run_id: object) -> None:
        self.runs.append(str(run_id))
        self._more.set()

    async def for_run(self, run_id: str, requests: int) -> None:
        """Return once this many requests wait for the run."""
        await self._until(lambda: self.runs.count(run_id) >= requests)

    async def for_any(self, requests: int) -> None:
        await self._until(lambda: len(self.runs) >= requests)

    async def _until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not enough():
                self._more.clear()
                await self._more.wait()


@pytest.fixture
def waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    found, follower = Waiting(), rig.services.follower
    watching = follower.watching

    @contextmanager
    def watched(run_id: object) -> Iterator[asyncio.Event]:
        with watching(run_id) as news:
            found.began(run_id)
            yield news

    monkeypatch.setattr(follower, "watching", watched)
    return found


@pytest.fixture
async def talk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Talk:
    for module in (policy_api, admin):
        monkeypatch.setattr(module, "registry", rig.tools, raising=False)
    talk = Talk(rig, rig.http())

    @rig.tool("shop.lookup")
    async def lookup(charge: str) -> dict[str, Any]:
        """Look a charge up."""
        return {"charge": charge, "name": "Ada"}

    @rig.tool("shop.refund", writes=True, risk="med")
    async def refund(charge: str, amount: int) -> dict[str, Any]:
        talk.refunds.append(charge)
        return {"refunded": charge, "amount": amount}

    @rig.tool("shop.purge", writes=True, risk="high")
    async def purge() -> None:
        talk.refunds.append("purged")

    @rig.tool("shop.hold")
    async def hold() -> None:
        await talk.hold()

    published = await talk.http.put("/api/policy", content=POLICY.encode())
    assert published.status_code in (200, 201), published.text
    applied = await talk.http.post("/api/agents", content=SUPPORT.encode())
    assert applied.status_code == 201, applied.text
    return talk
