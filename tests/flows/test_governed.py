"""Steps of a flow are governed like any other: gate, approvals, edits, receipts, reversal, secrets, evidence."""

import asyncio
from typing import Annotated, Any
from uuid import UUID

import orjson
import pytest

from interlock import Context, FlowContext, Rejected, Secret
from interlock.audit import evidence
from interlock.errors import Terminal
from tests.governed.conftest import Shop, shop  # noqa: F401
from tests.rig import Rig

POLICY = """
@id("small") permit(principal, action, resource) when { context.input.amount <= 100 };
@id("large") @decision("needs_approval") @tier("med")
  permit(principal, action, resource) when { context.input.amount > 100 };
"""


@pytest.fixture
async def paid(rig: Rig, shop: Shop) -> list[Any]:  # noqa: F811
    done: list[Any] = []

    @rig.tool("bank.pay", writes=True, risk="low", undo="bank.take_back")
    async def pay(amount: int, note: str = "") -> dict[str, Any]:
        done.append((amount, note))
        return {"id": f"p{len(done)}"}

    @rig.tool("bank.take_back", writes=True, risk="low")
    async def take_back(id: str, amount: int) -> None:
        done.append(("back", id, amount))

    @rig.flow("pay")
    async def flow(ctx: FlowContext, input: dict[str, Any]) -> Any:
        try:
            return await ctx.call("bank.pay", amount=input["amount"], note="${not.an.expression}")
        except Rejected as refused:
            return f"refused: {refused.error['message']}"

    assert (await shop.admin.publish(POLICY))[0] == 200
    return done


async def test_a_flow_is_held_by_policy_and_goes_on_with_the_yes(rig: Rig, shop: Shop, paid: list[Any]) -> None:  # noqa: F811
    asker, approver = await shop.person("asker", "operator"), await shop.person("boss")
    run_id = await shop.start(asker, "pay", amount=500)
    question = await shop.held(run_id)
    assert question["action"]["fields"] == {"amount": 500, "note": "${not.an.expression}"} and paid == []
    assert (await approver.approve(question["id"]))[0] == 200
    run = await shop.ended(run_id)
    assert (run["status"], run["result"], paid) == ("succeeded", {"id": "p1"}, [(500, "${not.an.expression}")])


async def test_a_no_reaches_the_flow_as_an_exception(rig: Rig, shop: Shop, paid: list[Any]) -> None:  # noqa: F811
    asker, approver = await shop.person("asker", "operator"), await shop.person("boss")
    run_id = await shop.start(asker, "pay", amount=500)
    question = await shop.held(run_id)
    assert (await approver.reject(question["id"], reason="too much"))[0] == 200
    run = await shop.ended(run_id)
    assert (run["result"], paid) == ("refused: too much", [])


async def test_an_edited_action_of_a_flow_is_what_is_done(rig: Rig, shop: Shop, paid: list[Any]) -> None:  # noqa: F811
    asker, approver = await shop.person("asker", "operator"), await shop.person("boss")
    run_id = await shop.start(asker, "pay", amount=500)
    question = await shop.held(run_id)
    edited = await approver.approve(question["id"], patch={"amount": 400})
    assert edited[0] == 200, edited
    changed = await shop.question(run_id)
    another = await shop.person("another")
    assert (await another.approve(changed["id"], digest=changed["action"]["digest"]))[0] == 200
    run = await shop.ended(run_id)
    assert (run["status"], paid) == ("succeeded", [(400, "${not.an.expression}")]), run["error"]


async def test_an_effect_of_a_flow_can_be_undone(rig: Rig, shop: Shop, paid: list[Any]) -> None:  # noqa: F811
    run_id = await shop.start(shop.admin, "pay", amount=50)
    await shop.ended(run_id)
    [receipt] = await shop.receipts(run_id)
    status, undo = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse", {"reason": "wrong"})
    assert status == 201, undo
    await shop.ended(UUID(undo["id"]))
    assert paid[-1] == ("back", "p1", 50)


@pytest.mark.parametrize("ending", ["in doubt", "canceled"])
async def test_a_retry_does_not_repeat_what_happened_though_its_step_did_not_succeed(
    ending: str,
    rig: Rig,
    shop: Shop,  # noqa: F811
) -> None:
    began = asyncio.Event()

    @rig.tool("bank.send", writes=True, risk="low")
    async def send() -> str:
        shop.done.append("sent")
        began.set()
        if ending == "in doubt":
            raise ConnectionResetError("gone")
        await asyncio.Event().wait()
        raise AssertionError

    @rig.flow("send")
    async def flow(ctx: FlowContext) -> Any:
        return [await ctx.call("bank.send")]

    run_id = await shop.start(shop.admin, "send")
    finder = await shop.person("finder")
    if ending == "in doubt":
        receipt_id = (await shop.held(run_id))["receipt_id"]
        assert (await finder.post(f"/api/receipts/{receipt_id}/resolve", {"outcome": "fail"}))[0] == 200
    elif ending == "canceled":
        async with rig.worker():
            await began.wait()
            assert (await shop.admin.post(f"/api/runs/{run_id}/cancel"))[0] == 200
            await rig.until(run_id)
    assert (await shop.ended(run_id))["status"] in ("failed", "canceled")
    [receipt] = await shop.receipts(run_id)
    if receipt["status"] == "in_doubt":
        happened = {"outcome": "happened", "output": {"id": "s1"}}
        assert (await finder.post(f"/api/receipts/{receipt['id']}/resolve", happened))[0] == 200
    status, again = await shop.admin.post(f"/api/runs/{run_id}/retry")
    assert status == 201, again
    run = await shop.ended(UUID(again["id"]))
    assert (run["status"], run["result"], shop.done) == ("succeeded", [{"id": "s1"}], ["sent"]), run["error"]


async def test_what_another_run_did_and_was_undone_since_is_not_taken_over_by_the_retry_of_a_retry(
    rig: Rig,
    shop: Shop,  # noqa: F811
) -> None:
    @rig.tool("room.cancel", writes=True, risk="low")
    async def cancel(room: str) -> None: ...

    @rig.tool("room.reserve", writes=True, risk="low", key="room:{room}", undo="room.cancel")
    async def reserve(room: str) -> dict[str, str]:
        shop.done.append(room)
        return {"room": room}

    @rig.tool("car.rent", writes=True, risk="low")
    async def rent() -> None:
        raise Terminal("none left")

    @rig.flow("room")
    async def only_room(ctx: FlowContext) -> None:
        await ctx.call("room.reserve", room="12")

    @rig.flow("trip")
    async def trip(ctx: FlowContext) -> None:
        await ctx.call("room.reserve", room="12")
        await ctx.call("car.rent")

    first = await shop.ended(await shop.start(shop.admin, "room"))
    run = await shop.ended(await shop.start(shop.admin, "trip"))
    _, again = await shop.admin.post(f"/api/runs/{run['id']}/retry")
    run = await shop.ended(UUID(again["id"]))
    assert (run["status"], shop.done) == ("failed", ["12"])
    [receipt] = await shop.receipts(first["id"])
    status, undo = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    assert status == 201, undo
    await shop.ended(UUID(undo["id"]))
    status, problem = await shop.admin.post(f"/api/runs/{run['id']}/retry")
    assert (status, problem["code"], problem["receipt_id"]) == (409, "EFFECT_UNDONE", receipt["id"])


async def test_no_secret_of_a_flow_is_written_down(rig: Rig, shop: Shop) -> None:  # noqa: F811
    seen: list[str] = []

    @rig.tool("vault.use", writes=True, risk="low")
    async def use(ctx: Context, token: str, pin: Annotated[str, Secret], plain: str) -> str:
        seen.append(f"{token} {pin} {plain}")
        return "done"

    @rig.flow("secretive")
    async def secretive(ctx: FlowContext) -> Any:
        await ctx.approve("first", tier="low")
        return await ctx.call("vault.use", token=ctx.secret("api", "Bearer {}"), pin="4711-pin", plain="seen")

    stored = await rig.http().put("/api/secrets/api", json={"value": "hush-hush", "tools": ["*"]})
    assert stored.status_code in (200, 201), stored.text
    run_id = await rig.start("secretive")
    await rig.work_until(run_id, "waiting_approval")
    await rig.approve(run_id)
    run = await rig.work_until(run_id)
    assert (run["status"], seen) == ("succeeded", ["Bearer hush-hush 4711-pin seen"]), run["error"]
    written = str([tuple(row) for row in await rig.sql("SELECT * FROM interlock.journal_entry")])
    written += str([tuple(row) for row in await rig.sql("SELECT * FROM interlock.receipt")])
    assert "seen" in written and "hush-hush" not in written and "4711-pin" not in written


async def test_a_flow_leaves_evidence_that_verifies(rig: Rig, shop: Shop, paid: list[Any]) -> None:  # noqa: F811
    run_id = await shop.start(shop.admin, "pay", amount=50)
    await shop.ended(run_id)
    await rig.prove()
    opened = evidence.open_envelope((await rig.http().get(f"/api/runs/{run_id}/evidence")).content)
    assert '"bank.pay"' in orjson.dumps(opened.statement).decode()
    assert (await rig.http().get("/api/audit/verify")).json()["ok"]
