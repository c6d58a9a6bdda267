"""The tools that the policy is about."""

from interlock import tool


@tool("till.lookup")
async def lookup(charge: str) -> dict:
    """Find a charge."""
    return {"charge": charge, "amount": 349}


@tool("till.refund", writes=True, risk="med", target="{charge}")
async def refund(charge: str, amount: int) -> dict:
    """Give money back."""
    return {"refunded": amount}
