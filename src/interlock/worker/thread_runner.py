"""Tools that are plain functions: each call runs in a thread, which can be asked to stop but not forced to."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any

from interlock.ids import RunId
from interlock.tools import RegisteredTool
from interlock.worker.local_lease import LocalLease
from interlock.worker.outcome import NotBegun
from interlock.worker.tool_call import ExecutionResources, PreparedCall

_THREAD_GRACE_SECONDS = 5.0


async def in_thread(
    shop: ExecutionResources, call: PreparedCall, args: tuple[Any, ...], arguments: dict[str, Any]
) -> Any:
    """Call the tool in a thread.

    On cancellation, ask the thread to stop and give it time to notice at its next heartbeat. A call that was still
    waiting for a free thread was not started. A call that ends within the grace period counts as it ended. One that
    does not is left behind and may still act.
    """
    tool, token = call.tool, call.context.cancel_token()
    job = shop.threads.submit(copy_context().run, _call, shop.lease, call, args, arguments, token)
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
            return future.result()  # late, but done: the outcome is known
        if isinstance(error, NotBegun):
            raise error from None
        raise


def _call(lease: LocalLease, call: PreparedCall, args: tuple[Any, ...], arguments: dict[str, Any], token: Event) -> Any:
    tool, context = call.tool, call.context
    # A thread may start the call at the very moment at which it is canceled.
    if token.is_set():
        raise _not_begun(tool)
    with lease.acting(RunId(context.run_id), context.step, tool.name, token):
        return _without_stop(partial(tool.function, *args, **arguments), tool)


async def ask_in_thread(shop: ExecutionResources, tool: RegisteredTool, ask: Callable[[], Any]) -> Any:
    """Call another plain function by a tool's author in a thread."""
    return await asyncio.wrap_future(shop.threads.submit(copy_context().run, _without_stop, ask, tool))


def _without_stop(work: Callable[[], Any], tool: RegisteredTool) -> Any:
    """Run the function, and replace StopIteration: a future that receives it would never complete."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError(f"{tool.name} raised StopIteration") from error


def _not_begun(tool: RegisteredTool) -> NotBegun:
    return NotBegun(f"{tool.name} was not begun: no thread was free in its time")
