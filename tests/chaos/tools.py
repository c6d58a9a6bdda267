"""Tools for workers that are about to be hurt: each writes down when it begins and ends, one atomic line each."""

import asyncio
import os
import signal
import time

from interlock.tools import Context, tool

_file = os.open(os.environ["CHAOS_EXECUTIONS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(what: str, ctx: Context) -> None:
    # The clock is the machine's, the same for every process on it.
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
async def poison(ctx: Context) -> None:
    """Kills the worker that tries it."""
    note("begin", ctx)
    os.kill(os.getpid(), signal.SIGKILL)
