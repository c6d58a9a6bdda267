"""Tools that say how they fail, how their effect is named, and how to find out whether it happened."""

import json
from pathlib import Path
from typing import Annotated

from interlock import Context, DidNotHappen, Happened, Secret, Terminal, tool

LEDGER = Path("ledger.jsonl")


async def was_transferred(ctx: Context, account: str, amount: int, token: str) -> Happened | DidNotHappen:
    """Ask the bank whether an interrupted transfer happened."""
    found = [line for line in read() if line["key"] == ctx.idempotency_key]
    return Happened(found[0]) if found else DidNotHappen()


@tool(
    "bank.transfer",
    writes=True,
    risk="low",
    key="bank:transfer:{account}:{amount}",
    target="{account}",
    show=["amount"],
    reconcile=was_transferred,
)
async def transfer(ctx: Context, account: str, amount: int, token: Annotated[str, Secret]) -> dict:
    """Transfer money. The connection breaks after the bank has booked it, so the answer is lost."""
    if amount <= 0:
        raise Terminal(f"the amount is {amount}; it must be positive")
    write({"key": ctx.idempotency_key, "account": account, "amount": amount})
    raise ConnectionError("the bank closed the connection")


def write(line: dict) -> None:
    with LEDGER.open("a") as ledger:
        ledger.write(json.dumps(line) + "\n")


def read() -> list[dict]:
    return [json.loads(line) for line in LEDGER.read_text().splitlines()] if LEDGER.exists() else []
