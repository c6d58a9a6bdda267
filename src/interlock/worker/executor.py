"""The executor: perform one attempt at one step and return its outcome.

A call passes through these functions from top to bottom: `attempt` turns exceptions into an outcome, `perform` fills
secrets into the arguments, `call_tool` applies the time-out, and `finish` encodes the result for storage. Admission has
already allowed the call and stored its intent: see `admission`.
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from interlock import tracing
from interlock.engine.access.secrets import Use
from interlock.engine.expression_answers import with_answers
from interlock.errors import Retryable, Terminal, Unavailable
from interlock.ids import RunId, TenantId
from interlock.telemetry import scrubbed_lines
from interlock.tools import Canceled, RegisteredTool, Veil
from interlock.worker.local_lease import Lapsed
from interlock.worker.outcome import CallOutcome, Done, Failed, Interrupted, NotBegun, describe, failure, is_cut_off
from interlock.worker.output_encoding import dropped_output, encode_output
from interlock.worker.thread_runner import in_thread
from interlock.worker.tool_call import ExecutionResources, PreparedCall
from interlock.worker.tracing import traced_attempt, traced_tool


async def execute(shop: ExecutionResources, call: PreparedCall) -> CallOutcome:
    if tracing.spans is None:
        outcome = await attempt(shop, call)
    else:
        outcome = await traced_attempt(tracing.spans, call, attempt(shop, call))
    call.context.scrub_costs()
    return outcome


async def attempt(shop: ExecutionResources, call: PreparedCall) -> CallOutcome:
    try:
        result = await perform(shop, call)
    except Lapsed:
        return Interrupted(begun=False)  # the driver stops too; another worker continues
    except (asyncio.CancelledError, Canceled, Exception, SystemExit) as error:
        if isinstance(error, (asyncio.CancelledError, Canceled, NotBegun)) and told_to_stop():
            return Interrupted(begun=not isinstance(error, NotBegun))
        cut_off = call.tool.writes and not call.tool.idempotent and is_cut_off(error)
        return failure(error, call.context, in_doubt=cut_off)
    return finish(shop, call, result)


def told_to_stop() -> bool:
    """Return True if the worker canceled this task.

    Otherwise something that the tool awaited was canceled, which is an ordinary failure to the run.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def perform(shop: ExecutionResources, call: PreparedCall) -> Any:
    # Secrets are filled in here and not earlier: the proposed, judged, displayed and journaled call has only their
    # names.
    arguments = await fill(shop, call)
    if call.context.scrubber is None:
        return await run_tool(shop, call, arguments)
    with scrubbed_lines(call.context.scrub):
        return await run_tool(shop, call, arguments)


async def fill(shop: ExecutionResources, call: PreparedCall) -> dict[str, Any]:
    """Return the arguments with the values of the secrets they name.

    The input is rendered a second time with the values in place of the names. Searching the first rendering for names
    could replace text that only looks like one.
    """
    names = {name for asked in call.fold.secrets.values() for name in asked}
    if not names:
        return call.arguments
    try:
        use = Use(call.origin.workspace_id, call.tool.name)
        opened = await shop.secrets.open(call.origin.tenant_id, names, use)
    except Unavailable as error:
        raise Retryable(error.detail) from None  # nothing has started yet
    call.hide(opened.values.values(), opened.scrubber)
    render = partial(call.fold.input, call.scope, opened.values)
    return call.tool.validated(await with_answers(TenantId(call.context.tenant_id), render), show_input=False)


async def run_tool(shop: ExecutionResources, call: PreparedCall, arguments: dict[str, Any]) -> Any:
    try:
        if tracing.spans is None:
            return await call_tool(shop, call, arguments)
        return await traced_tool(tracing.spans, call, call_tool(shop, call, arguments))
    except (asyncio.CancelledError, Canceled, Lapsed, Exception, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # A panic in a Rust library, or a KeyboardInterrupt raised by the tool: the attempt failed but the worker did
        # not, so turn it into an error that `attempt` can classify.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def call_tool(shop: ExecutionResources, call: PreparedCall, arguments: dict[str, Any]) -> Any:
    function = await connected(call.tool)
    call.context.begins(call.timeout)
    if call.timeout is None:
        return await invoke(shop, call, function, arguments)
    try:
        async with asyncio.timeout(call.timeout) as limit:
            return await invoke(shop, call, function, arguments)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{call.tool.name} took longer than {call.timeout:g} s") from None
        raise


async def connected(tool: RegisteredTool) -> Callable[..., Any]:
    """Return the function to call. Connecting, if the tool needs it, does not count towards the call's time-out."""
    if tool.connect is None:
        return tool.function
    try:
        return await tool.connect()
    except (Retryable, Terminal):
        raise
    except (asyncio.CancelledError, Exception) as error:
        raise NotBegun(f"{tool.name} could not connect: {str(error) or type(error).__name__}") from None


async def invoke(
    shop: ExecutionResources, call: PreparedCall, function: Callable[..., Any], arguments: dict[str, Any]
) -> Any:
    args = (call.context,) if call.tool.wants_context else ()
    if call.tool.is_async:
        with shop.lease.acting(RunId(call.context.run_id), call.context.step, call.tool.name):
            return await function(*args, **arguments)
    return await in_thread(shop, call, args, arguments)


def finish(shop: ExecutionResources, call: PreparedCall, result: Any) -> Done | Failed:
    """Encode the result of a tool that returned.

    A write whose output cannot be stored is still done, with a marker as its output: a failure would cause a retry. A
    read exists only for its output, so it fails.
    """
    try:
        return Done(keep(shop, call, result), call.context)
    except Terminal as error:
        if call.tool.writes:
            why = describe(error, call.context.scrubber)["message"]
            return Done(dropped_output(call.tool, why), call.context)
        return failure(error, call.context)


def keep(shop: ExecutionResources, call: PreparedCall, result: Any) -> str:
    """Return the output to store, without the tool's secret fields and without the secrets passed to the tool."""
    veil = Veil()
    output = encode_output(result, shop.max_output_bytes, call.tool, veil)
    call.hide(veil.hidden)
    scrubber = call.context.scrubber
    # Use `json`, not orjson: orjson would read an integer of more than 64 bits as a float.
    return output if scrubber is None else json.dumps(scrubber.scrub(json.loads(output)), ensure_ascii=False)
