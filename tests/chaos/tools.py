"""Tools for workers that tests kill: each writes one atomic line when it starts and one when it ends."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from interlock.tools import Context, DidNotHappen, Happened, tool

_file = os.open(os.environ["CHAOS_EXECUTIONS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(what: str, ctx: Context) -> None:
    # The machine's clock is the same for every process on it.
    line = f"{what} {ctx.run_id} {ctx.step} {ctx.attempt} {os.getpid()} {time.monotonic_ns()}\n"
    os.write(_file, line.encode())


@tool("chaos.nothing")
async def nothing() -> None:
    """Does nothing, unseen: for backlogs where the tool is not the point."""


@tool("chaos.work")
async def work(ctx: Context, ms: float = 5) -> str:
    """Takes a few milliseconds on the worker's loop."""
    note("begin", ctx)
    await asyncio.sleep(ms / 1000)
    note("end", ctx)
    return ctx.step


@tool("chaos.counted")
async def counted(ctx: Context, ms: float) -> None:
    """Notes its end also when it is canceled."""
    note("begin", ctx)
    try:
        await asyncio.sleep(ms / 1000)
    finally:
        note("end", ctx)


@tool("chaos.once", writes=True, idempotent=False, risk="low")
async def once(ctx: Context, ms: float) -> str:
    """Makes its effect at once. Nobody can be asked whether it did, except people."""
    note("begin", ctx)
    note("effect", ctx)
    await asyncio.sleep(ms / 1000)
    note("end", ctx)
    return ctx.step


@tool("chaos.block")
def block(ctx: Context, ms: float = 5) -> str:
    """The same in a thread of the worker."""
    note("begin", ctx)
    time.sleep(ms / 1000)
    note("end", ctx)
    return ctx.step


@tool("chaos.long_once")
async def long_once(ctx: Context, mark: str) -> None:
    """Takes half a minute the first time, wherever that is, and no time ever after."""
    note("begin", ctx)
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        await asyncio.sleep(30)
    note("end", ctx)


@tool("chaos.poison")
async def poison(ctx: Context, ms: float = 0) -> None:
    """Kills the worker that tries it, when others had time to begin beside it."""
    note("begin", ctx)
    await asyncio.sleep(ms / 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def paid(ctx: Context, ms: float) -> Happened | DidNotHappen:
    """Look into the ledger."""
    note("asked", ctx)
    lines = Path(os.environ["CHAOS_EXECUTIONS"]).read_text().splitlines()
    happened = any(line.startswith(f"effect {ctx.run_id} {ctx.step} ") for line in lines)
    return Happened(ctx.step) if happened else DidNotHappen()


@tool("chaos.pay", writes=True, idempotent=False, risk="low", reconcile=paid)
async def pay(ctx: Context, ms: float) -> str:
    """Makes its effect in the middle of its time."""
    note("begin", ctx)
    try:
        await asyncio.sleep(ms / 2000)
        note("effect", ctx)
        await asyncio.sleep(ms / 2000)
    finally:
        note("end", ctx)
    return ctx.step


@tool("chaos.pay_in_thread", writes=True, idempotent=False, risk="low", reconcile=paid)
def pay_in_thread(ctx: Context, ms: float) -> str:
    """The same in a thread that never looks whether it shall stop."""
    note("begin", ctx)
    time.sleep(ms / 2000)
    note("effect", ctx)
    time.sleep(ms / 2000)
    note("end", ctx)
    return ctx.step


@tool("chaos.hog")
async def hog(ctx: Context, ms: float) -> None:
    """Blocks the worker's event loop."""
    note("begin", ctx)
    time.sleep(ms / 1000)  # noqa: ASYNC251 — must block the event loop
    note("end", ctx)


@tool("chaos.hold_interpreter")
def hold_interpreter(ctx: Context, ms: float) -> None:
    """Stops every thread of the worker, as a long regular expression does: PyDLL keeps the interpreter lock."""
    note("begin", ctx)
    ctypes.PyDLL(None).usleep(int(ms * 1000))
    note("end", ctx)


def hold_and_pay(ctx: Context, ms: float) -> str:
    """Holds the interpreter, then makes its effect before any other thread of the worker has run."""
    note("begin", ctx)
    sys.setswitchinterval(60)
    ctypes.PyDLL(None).usleep(int(ms * 1000))
    note("effect", ctx)
    sys.setswitchinterval(0.005)
    note("end", ctx)
    return ctx.step


tool("chaos.hold_and_pay", writes=True, idempotent=False, risk="low", reconcile=paid)(hold_and_pay)


@tool("chaos.leave_process")
async def leave_process(ctx: Context, ms: float) -> int:
    """Starts a process and does not wait for it."""
    process = await asyncio.create_subprocess_exec("sleep", "600")
    note("begin", ctx)
    await asyncio.sleep(ms / 1000)
    return process.pid
