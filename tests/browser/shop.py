"""The workflows for the console's tests."""

import asyncio
from typing import Any

from tests.rig import Rig

SCRIPT = "<script>document.title = 'broken in'</script>"

REFUND = """
name: refund
steps:
  - id: lookup
    tool: shop.lookup
    input: {charge: "${input.charge}"}
  - id: bank
    tool: shop.lookup
    needs: [lookup]
    input: {charge: "${input.charge}"}
  - id: risk
    tool: shop.lookup
    needs: [lookup]
    input: {charge: "${input.charge}"}
  - id: refund
    tool: shop.refund
    needs: [bank, risk]
    input: {charge: "${input.charge}", amount: "${input.amount}", note: "${input.note}"}
"""


def open_shop(rig: Rig) -> dict[str, Any]:
    """Register the shop's tools, and record their effects."""
    done: dict[str, Any] = {"refunds": [], "go": asyncio.Event()}

    @rig.tool("shop.lookup", writes=False)
    async def lookup(charge: str) -> dict[str, str]:
        return {"charge": charge, "name": SCRIPT}

    @rig.tool("shop.refund", writes=True, risk="med", key="shop:refund:{charge}")
    async def refund(charge: str, amount: int, note: str = "") -> dict[str, Any]:
        done["refunds"].append((charge, amount))
        return {"id": f"re_{charge}", "amount": amount}

    @rig.tool("shop.wait", writes=False)
    async def wait() -> dict[str, bool]:
        await done["go"].wait()
        return {"ok": True}

    return done


SUPPORT = """
name: support
model: scripted
tools: [shop.*]
script:
  - match: '^refund (?P<charge>\\w+)'
    turns:
      - say: I look first.
        calls: [{tool: shop.lookup, args: {charge: "{charge}"}}]
      - say: Now I would refund it.
        calls: [{tool: shop.refund, args: {charge: "{charge}", amount: 40}}]
      - say: The refund is done.
  - match: '^wait'
    turns:
      - say: I begin to wait.
        calls: [{tool: shop.wait, args: {}}]
      - say: Never said.
  - turns: [{say: "You said: {message}"}]
"""
