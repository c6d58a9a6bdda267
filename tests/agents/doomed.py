"""Tools and a model for workers in separate processes. A real SIGKILL ends each worker at the point DOOMED_AT.

Each effect is a line in the file DOOMED_LEDGER, which outlives the processes.
"""

import os
import signal
from pathlib import Path
from typing import Any

from interlock import Context
from interlock.agents import model_turn
from interlock.tools import Registry, registry, tool

AGENT = """
name: doomed
model: scripted
tools: [doomed.*]
script:
  - turns:
      - say: First I look.
        calls: [{tool: doomed.look, args: {}}]
      - say: Then I pay.
        calls: [{tool: doomed.pay, args: {to: ada}}]
      - say: It is paid.
"""
STEPS = ("model", "doomed.look", "model#2", "doomed.pay", "model#3")
POINTS = tuple(f"{when} {step}" for step in STEPS for when in ("before", "after"))


def ledger() -> list[str]:
    path = Path(os.environ["DOOMED_LEDGER"])
    return path.read_text().splitlines() if path.exists() else []


def _note(line: str) -> None:
    with Path(os.environ["DOOMED_LEDGER"]).open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def _pass(point: str) -> None:
    """With DOOMED_ALL the server that started the worker dies with it."""
    if os.environ.get("DOOMED_AT") == point:
        if os.environ.get("DOOMED_ALL"):
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def stock(shelf: Registry) -> None:
    @tool("doomed.look", register=shelf)
    async def look(ctx: Context) -> str:
        _pass(f"before {ctx.step}")
        _note("looked")
        _pass(f"after {ctx.step}")
        return "a charge"

    @tool("doomed.pay", writes=True, risk="low", idempotent=True, register=shelf)
    async def pay(ctx: Context, to: str) -> str:
        _pass(f"before {ctx.step}")
        if f"paid {to} {ctx.idempotency_key}" not in ledger():  # as a bank with idempotency keys would
            _note(f"paid {to} {ctx.idempotency_key}")
        _pass(f"after {ctx.step}")
        return f"paid {to}"


def watch_model() -> None:
    really = model_turn._ask

    async def ask(ctx: Context, *args: Any) -> dict[str, Any]:
        _pass(f"before {ctx.step}")
        answer = await really(ctx, *args)
        _note(f"asked {ctx.step}")
        _pass(f"after {ctx.step}")
        return answer

    model_turn._ask = ask


if os.environ.get("DOOMED_AT"):
    stock(registry)
    watch_model()
