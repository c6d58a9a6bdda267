"""The tools of a small mail-order company. Its systems are pretended: each tool only answers."""

from interlock import Context, tool


@tool("order.reserve", writes=True, risk="low")
async def reserve(article: str, count: int) -> dict:
    """Reserve goods in the warehouse."""
    return {"reservation": f"{count} x {article}", "amount": 25 * count}


@tool("order.release", writes=True, risk="low")
async def release(reservation: str) -> dict:
    """Give reserved goods back."""
    return {"released": reservation}


@tool("order.charge", writes=True, risk="low", idempotent=True)
async def charge(ctx: Context, customer: str, amount: int) -> dict:
    """Take money. The bank is away at the first attempt; the key makes the second one the same payment."""
    if ctx.attempt == 1:
        raise ConnectionError("the bank did not answer")
    return {"payment": ctx.idempotency_key, "amount": amount}


@tool("order.refund", writes=True, risk="low")
async def refund(payment: str) -> dict:
    """Give the money back."""
    return {"refunded": payment}


@tool("order.label")
async def label(customer: str) -> dict:
    """Print the parcel's label."""
    return {"parcel": f"parcel-{customer}"}


@tool("order.thank", writes=True, risk="low")
async def thank(customer: str) -> dict:
    """Send a message to a customer who bought several things."""
    return {"to": customer}
