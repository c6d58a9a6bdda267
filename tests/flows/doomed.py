"""A flow for workers in separate processes. A real SIGKILL ends each worker at the step DOOMED_STEP.

Each effect of its steps is a line in the file DOOMED_LEDGER, which outlives the processes.
"""

import os
import signal
from pathlib import Path
from typing import Any

from interlock import FlowContext
from interlock.tools import Registry, flow, registry, tool

STEPS = 200


def ledger() -> list[str]:
    path = Path(os.environ["DOOMED_LEDGER"])
    return path.read_text().splitlines() if path.exists() else []


def _write(line: str) -> None:
    with Path(os.environ["DOOMED_LEDGER"]).open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def dies_inside(n: int) -> bool:
    """A quarter of the workers die after the step's work; the others die before it, after the preceding step."""
    return n % 4 == 0


def stock(shelf: Registry) -> None:
    @tool("doomed.step", writes=True, risk="low", idempotent=True, register=shelf)
    async def step(n: int) -> int:
        doomed = os.environ.get("DOOMED_STEP") == str(n)
        if doomed and not dies_inside(n):
            os.kill(os.getpid(), signal.SIGKILL)
        _write(str(n))
        if doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    @flow("doomed", version=1, register=shelf)
    async def doomed(ctx: FlowContext) -> Any:
        return [await ctx.call("doomed.step", n=n) for n in range(STEPS)]


if os.environ.get("DOOMED_STEP"):
    stock(registry)
