"""Tools that are plain functions: each call runs in a thread, which can be told to stop but not made to."""

import asyncio
from contextvars import copy_context
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
    try:
        return tool.function(*args, **arguments)
    except StopIteration as error:
        # A future takes any exception but this one: it would never be done.
        raise RuntimeError(f"{tool.name} raised StopIteration") from error


def _not_begun(tool: Tool) -> NotBegun:
    return NotBegun(f"{tool.name} was not begun: no thread was free in its time")
