"""A conversation whose workers die has the same result: each write once, and no stored model answer requested twice."""

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from interlock import Context
from interlock.agents import model_turn
from interlock.worker import batch_committer
from interlock.worker.worker import Worker
from tests.agents.conftest import Talk
from tests.governed.conftest import lose

PAYING = """
name: paying
model: scripted
tools: [shop.*]
script:
  - turns:
      - say: First I look.
        calls: [{tool: shop.lookup, args: {charge: ch_1}}]
      - say: Then I pay, twice.
        calls: [{tool: shop.pay, args: {to: ada}}, {tool: shop.pay, args: {to: bob}}]
      - say: Both are paid.
"""


class World:
    """The payments by key, and the model requests whose answers were already stored."""

    def __init__(self, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.talk = talk
        self.paid: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.asked_in_vain: list[str] = []
        rig = talk.rig

        @rig.tool("shop.pay", writes=True, risk="low", idempotent=True)
        async def pay(ctx: Context, to: str) -> str:
            self.paid[f"{to} {ctx.idempotency_key}"] += 1
            return f"paid {to}"

        really = model_turn._ask

        async def ask(ctx: Context, *args: Any) -> dict[str, Any]:
            stored = "SELECT FROM interlock.journal_entry WHERE run_id = $1 AND step = $2 AND event = 'succeed'"
            if await rig.sql(stored, ctx.run_id, ctx.step):
                self.asked_in_vain.append(ctx.step)
            self.asked[ctx.step] += 1
            return await really(ctx, *args)

        monkeypatch.setattr(model_turn, "_ask", ask)

    async def die_at(self, number: int, *, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give a worker that is killed at its n-th commit: before the commit, or between the commit and its answer."""
        there, commits = asyncio.Event(), 0
        really = batch_committer.commit

        async def commit(*args: Any) -> Any:
            nonlocal commits
            commits += 1
            answers = await really(*args) if commits < number or after else None
            if commits >= number:
                there.set()
                await asyncio.Event().wait()
            return answers

        rig = self.talk.rig
        with monkeypatch.context() as patched:
            patched.setattr(batch_committer, "commit", commit)
            task = asyncio.create_task(
                Worker(rig.database, rig.settings, tools=rig.tools, capacity=2).run(asyncio.Event())
            )
            await asyncio.wait_for(there.wait(), 30)
            await lose(rig, task)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([(1, False), (2, True), (3, False), (4, True)], id="some"),
        pytest.param([(n, after) for n in range(1, 6) for after in (False, True)], id="ten", marks=pytest.mark.chaos),
    ],
)
async def test_a_conversation_survives_the_death_of_its_workers(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, points: list[tuple[int, bool]]
) -> None:
    world = World(talk, monkeypatch)
    policy = """
@id("reads") permit(principal, action in Action::"read", resource);
@id("pay") permit(principal, action == Action::"shop.pay", resource);
"""
    await talk.http.put("/api/policy", content=policy)
    await talk.http.post("/api/agents", content=PAYING)
    for number, after in points:
        sent = await talk.told("go", agent="paying")
        await world.die_at(number, after=after, monkeypatch=monkeypatch)
        run = await talk.ended(sent["run_id"])
        assert (run["status"], run["result"]) == ("succeeded", {"text": "Both are paid."}), (number, run["error"])
        receipts = await talk.rig.sql("SELECT status FROM interlock.receipt WHERE run_id = $1", UUID(sent["run_id"]))
        assert [receipt["status"] for receipt in receipts] == ["succeeded", "succeeded"]
    # Each payment has one key, however often it was attempted.
    assert len(world.paid) == 2 * len(points)
    assert world.asked_in_vain == []
    assert sum(world.asked.values()) <= 3 * len(points) + len(points)
