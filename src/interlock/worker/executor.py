"""The executor: one attempt at one step. Perform the call, say how it went."""

import asyncio
import json
import time
from contextvars import copy_context
from functools import partial
from inspect import iscoroutinefunction
from threading import Event
from typing import Any

from interlock import tracing
from interlock.errors import Retryable, Terminal, Unavailable
from interlock.telemetry import scrubbed_lines
from interlock.tools import Canceled, DidNotHappen, Happened, Tool, Veil
from interlock.worker.call import Call, Workshop
from interlock.worker.outcome import Done, Failed, Interrupted, NotBegun, Outcome, describe, failure, is_cut_off
from interlock.worker.output import encode_output

_THREAD_GRACE_SECONDS = 5.0


async def execute(shop: Workshop, call: Call) -> Outcome:
    outcome = await attempt(shop, call) if tracing.spans is None else await traced_attempt(tracing.spans, shop, call)
    call.context.scrub_costs()
    return outcome


async def attempt(shop: Workshop, call: Call) -> Outcome:
    try:
        result = await perform(shop, call)
    except (asyncio.CancelledError, Canceled, Exception, SystemExit) as error:
        if isinstance(error, (asyncio.CancelledError, Canceled, NotBegun)) and told_to_stop():
            return Interrupted(begun=not isinstance(error, NotBegun))
        cut_off = call.tool.writes and not call.tool.idempotent and is_cut_off(error)
        return failure(error, call.context, in_doubt=cut_off)
    return finish(shop, call, result)


def told_to_stop() -> bool:
    """Else a cancellation is the tool's own: of something it awaited, say. To the run that is a failure like others."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def perform(shop: Workshop, call: Call) -> Any:
    # Here and nowhere earlier: what is proposed, judged, shown and journaled has the names of secrets, not the values.
    arguments = await fill(shop, call)
    if call.context.scrubber is None:
        return await run_tool(shop, call, arguments)
    with scrubbed_lines(call.context.scrub):
        return await run_tool(shop, call, arguments)


async def fill(shop: Workshop, call: Call) -> dict[str, Any]:
    """The arguments with the values of the secrets they name. The input is rendered anew, and no text is searched."""
    names = {name for asked in call.fold.secrets.values() for name in asked}
    if not names:
        return call.arguments
    try:
        opened = await shop.secrets.open(call.context.tenant_id, names)
    except Unavailable as error:
        raise Retryable(error.detail) from None  # nothing was begun
    call.hide(opened.values.values(), opened.scrubber)
    return call.tool.validated(call.fold.input(call.scope, opened.values), show_input=False)


async def run_tool(shop: Workshop, call: Call, arguments: dict[str, Any]) -> Any:
    try:
        if tracing.spans is None:
            return await call_tool(shop, call, arguments)
        return await traced_tool(tracing.spans, shop, call, arguments)
    except (asyncio.CancelledError, Canceled, Exception, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a library's panic, a KeyboardInterrupt: the attempt has failed, and we go on
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def call_tool(shop: Workshop, call: Call, arguments: dict[str, Any]) -> Any:
    if call.timeout is None:
        return await invoke(shop, call, arguments)
    try:
        async with asyncio.timeout(call.timeout) as limit:
            return await invoke(shop, call, arguments)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{call.tool.name} took longer than {call.timeout:g} s") from None
        raise


async def invoke(shop: Workshop, call: Call, arguments: dict[str, Any]) -> Any:
    args = (call.context,) if call.tool.wants_context else ()
    if call.tool.is_async:
        return await call.tool.function(*args, **arguments)
    return await in_thread(shop, call, args, arguments)


async def in_thread(shop: Workshop, call: Call, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    """A thread cannot be stopped from outside: it is told, and given a moment to notice at its next heartbeat."""
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


def _not_begun(tool: Tool) -> NotBegun:
    return NotBegun(f"{tool.name} was not begun: no thread was free in its time")


def _call(tool: Tool, args: tuple[Any, ...], arguments: dict[str, Any], token: Event) -> Any:
    # A thread may take it up at the very moment in which it is told to stop.
    if token.is_set():
        raise _not_begun(tool)
    try:
        return tool.function(*args, **arguments)
    except StopIteration as error:
        # A future takes any exception but this one: it would never be done.
        raise RuntimeError(f"{tool.name} raised StopIteration") from error


def finish(shop: Workshop, call: Call, result: Any) -> Outcome:
    """It was done. What it returned may still be nothing that can be kept, which fails the step and undoes nothing."""
    try:
        return Done(keep(shop, call, result), call.context)
    except Terminal as error:
        return Failed(describe(error, call.context.scrubber), False, None, call.context, happened=True)


def keep(shop: Workshop, call: Call, result: Any) -> str:
    """The output as it is kept: without what the tool calls secret, nor any secret that it was given."""
    veil = Veil()
    output = encode_output(result, shop.max_output_bytes, call.tool, veil)
    call.hide(veil.hidden)
    scrubber = call.context.scrubber
    # Not by orjson, to which a number of more than 64 bits is another one.
    return output if scrubber is None else json.dumps(scrubber.scrub(json.loads(output)), ensure_ascii=False)


async def reconcile(shop: Workshop, call: Call) -> Happened | DidNotHappen | None:
    """Ask the system that was acted on. None: it cannot be asked, or did not know."""
    if call.tool.reconcile is None:
        return None
    args = (call.context,) if call.tool.wants_context else ()
    try:
        async with asyncio.timeout(call.timeout or 60):
            ask = partial(call.tool.reconcile, *args, **await fill(shop, call))
            with scrubbed_lines(call.context.scrub):
                # A plain function waits for the other system too, and nobody else is to wait with it.
                plain = not iscoroutinefunction(call.tool.reconcile)
                answer = await asyncio.wrap_future(shop.threads.submit(copy_context().run, ask)) if plain else ask()
                answer = await answer if asyncio.iscoroutine(answer) else answer
    except Exception as error:
        call.context.log.warning("reconcile_failed", error=str(error))
        return None
    return answer if isinstance(answer, (Happened, DidNotHappen)) else None


async def traced_attempt(spans: tracing.Spans, shop: Workshop, call: Call) -> Outcome:
    context = call.context
    about = {
        "interlock.run_id": str(context.run_id), "interlock.step": context.step, "interlock.attempt": context.attempt,
    }  # fmt: skip
    with spans.span(f"step {context.step}", about, parent=context._traceparent) as span:
        outcome = await attempt(shop, call)
        span.set_attribute("interlock.outcome", type(outcome).__name__.lower())
        # As it is kept in the journal: without secrets.
        tracing.fail(span, str(outcome.error.get("message")) if isinstance(outcome, Failed) else None)
    return outcome


async def traced_tool(spans: tracing.Spans, shop: Workshop, call: Call, arguments: dict[str, Any]) -> Any:
    with spans.span(f"tool {call.tool.name}", {"interlock.tool": call.tool.name}) as span:
        try:
            return await call_tool(shop, call, arguments)
        except BaseException as error:
            tracing.fail(span, describe(error, call.context.scrubber)["message"])
            raise


def elapsed_ms(since: float) -> float:
    return round((time.perf_counter() - since) * 1000, 3)
