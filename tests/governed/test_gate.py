"""The gate: reads pass, low writes leave a receipt, and other writes wait for approval."""

from tests.rig import Rig

from interlock.tools import Context

FLOW = """
name: refund
steps:
  - {id: look, tool: shop.look, input: {charge: "${input.charge}"}}
  - {id: note, tool: shop.note, input: {charge: "${input.charge}"}}
  - {id: pay, tool: shop.refund, input: {charge: "${input.charge}", amount: "${input.amount}"}}
"""


async def test_reads_pass_low_writes_leave_receipts_and_high_writes_wait(rig: Rig) -> None:
    done: list[str] = []

    @rig.tool("shop.look")
    async def look(charge: str) -> dict[str, str]:
        return {"name": "Ada"}

    @rig.tool("shop.note", writes=True, risk="low", idempotent=True)
    async def note(charge: str) -> None:
        done.append("note")

    @rig.tool("shop.refund", writes=True, risk="high", key="shop:refund:{charge}:{amount}", target="{charge}")
    async def refund(ctx: Context, charge: str, amount: int) -> dict[str, int]:
        done.append(ctx.idempotency_key)
        return {"refunded": amount}

    await rig.apply(FLOW)
    run_id = await rig.start("refund", {"charge": "ch_1", "amount": 50})
    run = await rig.work_until(run_id, "waiting_approval")
    print(await rig.journal(run_id))
    assert run["status"] == "waiting_approval", run
    assert done == ["note"]
    receipts = await rig.sql("SELECT status, tool FROM interlock.receipt")
    assert [tuple(r) for r in receipts] == [("succeeded", "shop.note")]

    one, two = await rig.person("one", "approver"), await rig.person("two", "approver")
    await rig.decide(run_id, approves=True, who=one)
    await rig.decide(run_id, approves=True, who=two)
    run = await rig.work_until(run_id)
    print(await rig.journal(run_id))
    assert (run["status"], run["result"]) == ("succeeded", {"refunded": 50}), run
    assert done == ["note", "shop:refund:ch_1:50"]
    receipts = await rig.sql("SELECT status, tool, idempotency_key FROM interlock.receipt ORDER BY id")
    assert [tuple(r) for r in receipts][1] == ("succeeded", "shop.refund", "shop:refund:ch_1:50")
    assert len(await rig.sql("SELECT * FROM interlock.approval_use")) == 1


async def test_a_write_without_a_declared_risk_waits_for_a_person(rig: Rig) -> None:
    """specification DEV-5 (002): the tool does not declare it harmless, so the default policy asks for approval."""
    done: list[str] = []

    @rig.tool("shop.note", writes=True)
    async def note() -> None:
        done.append("note")

    @rig.tool("shop.mark", writes=True, risk="low")
    async def mark() -> None:
        done.append("mark")

    await rig.apply("{name: notes, steps: [{id: mark, tool: shop.mark}, {id: note, tool: shop.note}]}")
    run_id = await rig.start("notes")
    await rig.work_until(run_id, "waiting_approval")
    assert done == ["mark"]
    await rig.decide(run_id, approves=True, who=await rig.person("one", "approver"))
    assert ((await rig.work_until(run_id))["status"], done) == ("succeeded", ["mark", "note"])
