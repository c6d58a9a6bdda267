"""Tools that are plain functions: each call runs in a thread, which can be told to stop but not made to."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any

from interlock.tools import Tool
from interlock.worker.call import Call, Workshop
from interlock.worker.outcome import NotBegun

_THREAD_GRACE_SECONDS = 5.0


async def in_thread(shop: Workshop, call: Call, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    """Call the tool in a thread. When that is canceled the thread is told, and given a moment to notice at its next
    heartbeat.

    A call that was still waiting for a free thread was not begun. One that ends within the grace counts as it ended.
    One that does not is left behind: whatever it was doing, it may still do.
    """
    tool, token = call.tool, call.context.cancel_token()
    job = shop.threads.submit(copy_context().run, _call, tool, args, arguments, token)
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        token.set()
        if job.cancel():
            raise _not_begun(tool) from None
        await asyncio.wait([future], timeout=_THREAD_GRACE_SECONDS)
        if not future.done():
            call.left_behind = True
            raise
        error = future.exception()
        if error is None:
            return future.result()  # late, but done: nobody has to ask what became of it
        if isinstance(error, NotBegun):
            raise error from None
        raise


def _call(tool: Tool, args: tuple[Any, ...], arguments: dict[str, Any], token: Event) -> Any:
    # A thread may take the call up at the very moment at which it is told to stop.
    if token.is_set():
        raise _not_begun(tool)
    return _without_stop(partial(tool.function, *args, **arguments), tool)


async def ask_in_thread(shop: Workshop, tool: Tool, ask: Callable[[], Any]) -> Any:
    """Something else that a tool's author wrote as a plain function."""
    return await asyncio.wrap_future(shop.threads.submit(copy_context().run, _without_stop, ask, tool))


def _without_stop(work: Callable[[], Any], tool: Tool) -> Any:
    """A future takes any exception but StopIteration: it would never be done."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError(f"{tool.name} raised StopIteration") from error


def _not_begun(tool: Tool) -> NotBegun:
    return NotBegun(f"{tool.name} was not begun: no thread was free in its time")
