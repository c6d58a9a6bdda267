"""The tools of a small shop whose books are a JSON file. They know the shop and nothing of workflows."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from interlock import Context, Terminal, tool

FOLDER = Path(os.environ.get("INTERLOCK_DATA_DIR") or ".interlock") / "demo"

OPENING_BOOKS: dict[str, Any] = {
    "charges": {
        "ch_1042": {"name": "Ada Lind", "amount": 349, "item": "espresso machine", "refunded": 0},
        "ch_1043": {"name": "Ben Osei", "amount": 89, "item": "desk lamp", "refunded": 0},
        "ch_1044": {"name": "Cleo Marsh", "amount": 1290, "item": "road bicycle", "refunded": 0},
    },
    "refunds": {},
}


@tool("shop.lookup_charge")
async def lookup_charge(charge: str) -> dict[str, Any]:
    """Find a charge in the shop's books."""
    await asyncio.sleep(0.03)
    found = _charge(read_books(), charge)
    return {"name": found["name"], "item": found["item"], "amount": found["amount"]}


@tool("shop.fraud_score")
async def fraud_score(ctx: Context, name: str) -> dict[str, Any]:
    """Ask the fraud service, which is having a bad day: its first answer never comes."""
    await asyncio.sleep(0.12)
    if ctx.attempt == 1:
        raise ConnectionError("the fraud service did not answer")
    return {"score": 0.04, "verdict": "looks genuine"}


@tool("shop.past_orders")
def past_orders(name: str) -> dict[str, Any]:
    """How often this customer bought something. A plain function: it runs in a thread."""
    time.sleep(0.25)
    return {"orders": 7, "refunds": 0}


# A low risk, so that the policy lets it pass: the workflow asks a person itself. With risk="high" the policy that comes
# with Interlock would ask two more, about this step alone.
@tool("shop.refund", writes=True, risk="low", idempotent=True, key="shop:refund:{charge}", target="{charge}")
async def refund(ctx: Context, charge: str, amount: int) -> dict[str, Any]:
    """Give money back. The books remember the key, so a second call with it changes nothing."""
    await asyncio.sleep(0.5)
    books = read_books()
    if done := books["refunds"].get(ctx.idempotency_key):
        return {**done, "again": True}
    found = _charge(books, charge)
    if amount > found["amount"] - found["refunded"]:
        raise Terminal(f"{charge} has {found['amount'] - found['refunded']} EUR left to refund, not {amount}")
    found["refunded"] += amount
    books["refunds"][ctx.idempotency_key] = {"charge": charge, "amount": amount}
    write_books(books)
    return {"charge": charge, "amount": amount}


@tool("shop.tell", writes=True, risk="low")
async def tell(to: str, text: str) -> dict[str, Any]:
    """Put a message into the shop's outbox."""
    await asyncio.sleep(0.02)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "outbox.txt").open("a", encoding="utf-8") as outbox:
        outbox.write(f"to {to}: {text}\n")
    return {"to": to}


def read_books() -> dict[str, Any]:
    try:
        text = (FOLDER / "shop.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        write_books(OPENING_BOOKS)
        text = json.dumps(OPENING_BOOKS)
    books: dict[str, Any] = json.loads(text)
    return books


def write_books(books: dict[str, Any]) -> None:
    """Whole or not at all: the new file takes the old one's place in one move."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    fresh = FOLDER / "shop.json.new"
    fresh.write_text(json.dumps(books, indent=2) + "\n", encoding="utf-8")
    fresh.replace(FOLDER / "shop.json")


def _charge(books: dict[str, Any], charge: str) -> dict[str, Any]:
    found: dict[str, Any] | None = books["charges"].get(charge)
    if found is None:
        raise Terminal(f"the books have no charge {charge}")
    return found
