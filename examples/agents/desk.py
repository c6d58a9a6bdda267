"""The tools of a support desk. An agent may look things up freely; a refund needs a person."""

from interlock import tool


@tool("desk.lookup")
async def lookup(charge: str) -> dict:
    """Find a charge."""
    return {"charge": charge, "name": "Cleo Marsh", "amount": 40}


@tool("desk.refund", writes=True, risk="med", key="desk:refund:{charge}", target="{charge}")
async def refund(charge: str, amount: int) -> dict:
    """Give money back."""
    return {"refunded": amount}
