"""Tools for a worker in a process of its own that is killed, really, at the place DOOMED_AT names.

What they do to the world is a line in the file DOOMED_LEDGER, which outlives the process.
"""

import os
import signal
from pathlib import Path
from typing import Any

from interlock.engine import receipts
from interlock.tools import Context, DidNotHappen, Happened, Registry, registry, tool
from interlock.worker import drive as driving
from interlock.worker import passage as passing
from interlock.worker.settle import Settler

PLACES = ("declared", "intent", "before", "after", "settle", "uncommitted")


def die(place: str) -> None:
    if os.environ.get("DOOMED_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


def ledger() -> Path:
    return Path(os.environ["DOOMED_LEDGER"])


def lines() -> list[str]:
    return ledger().read_text().splitlines() if ledger().exists() else []


def _write(line: str) -> None:
    with ledger().open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def stock(shelf: Registry) -> None:
    @tool("doomed.repeatable", writes=True, idempotent=True, register=shelf)
    async def repeatable(ctx: Context) -> str:
        die("before")
        if ctx.idempotency_key not in lines():
            _write(ctx.idempotency_key)
        die("after")
        return "done"

    async def ask(ctx: Context) -> Happened | DidNotHappen:
        return Happened("done") if ctx.idempotency_key in lines() else DidNotHappen()

    @tool("doomed.askable", writes=True, reconcile=ask, register=shelf)
    async def askable(ctx: Context) -> str:
        die("before")
        _write(ctx.idempotency_key)
        die("after")
        return "done"

    @tool("doomed.neither", writes=True, register=shelf)
    async def neither(ctx: Context) -> str:
        die("before")
        _write(ctx.idempotency_key)
        die("after")
        return "done"


def doom() -> None:
    """The places that are not in a tool."""
    drive: Any = driving
    passage: Any = passing
    declare, execute, settle, seal = passage.declare, drive.execute, Settler.settle, receipts.seal

    def declared(*args: Any) -> None:
        declare(*args)
        die("declared")

    async def executed(*args: Any) -> Any:
        die("intent")
        return await execute(*args)

    def settled(self: Settler, *args: Any, **more: Any) -> None:
        die("settle")
        settle(self, *args, **more)

    async def sealed(*args: Any) -> None:
        await seal(*args)
        die("uncommitted")

    passage.declare = declared
    setattr(Settler, "settle", settled)  # noqa: B010
    drive.execute = executed
    setattr(receipts, "seal", sealed)  # noqa: B010


if os.environ.get("DOOMED_AT"):
    stock(registry)
    doom()
