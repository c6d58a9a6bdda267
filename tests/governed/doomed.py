"""Tools for a worker in a separate process. A real SIGKILL ends it at the place DOOMED_AT.

Each effect is a line in the file DOOMED_LEDGER, which outlives the process.
"""

import os
import signal
from pathlib import Path
from typing import Any

from interlock.engine.effects import receipts
from interlock.tools import Context, DidNotHappen, Happened, Registry, registry, tool
from interlock.worker import admission as passing
from interlock.worker import run_driver as driving
from interlock.worker.step_recorder import StepRecorder

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
    @tool("doomed.repeatable", writes=True, risk="low", idempotent=True, register=shelf)
    async def repeatable(ctx: Context) -> str:
        die("before")
        if ctx.idempotency_key not in lines():
            _write(ctx.idempotency_key)
        die("after")
        return "done"

    async def ask(ctx: Context) -> Happened | DidNotHappen:
        return Happened("done") if ctx.idempotency_key in lines() else DidNotHappen()

    @tool("doomed.askable", writes=True, risk="low", reconcile=ask, register=shelf)
    async def askable(ctx: Context) -> str:
        die("before")
        _write(ctx.idempotency_key)
        die("after")
        return "done"

    @tool("doomed.neither", writes=True, risk="low", register=shelf)
    async def neither(ctx: Context) -> str:
        die("before")
        _write(ctx.idempotency_key)
        die("after")
        return "done"


def doom() -> None:
    """Install the places that are not in a tool."""
    drive: Any = driving
    passage: Any = passing
    declare, execute, settle, seal = (
        passage.declare_intent,
        drive.execute,
        StepRecorder.settle,
        receipts.complete,
    )

    def declared(*args: Any) -> None:
        declare(*args)
        die("declared")

    async def executed(*args: Any) -> Any:
        die("intent")
        return await execute(*args)

    def settled(self: StepRecorder, *args: Any, **more: Any) -> None:
        die("settle")
        settle(self, *args, **more)

    async def sealed(*args: Any) -> None:
        await seal(*args)
        die("uncommitted")

    passage.declare_intent = declared
    setattr(StepRecorder, "settle", settled)  # noqa: B010
    drive.execute = executed
    setattr(receipts, "complete", sealed)  # noqa: B010


if os.environ.get("DOOMED_AT"):
    stock(registry)
    doom()
