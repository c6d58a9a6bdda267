"""The executor: one attempt at one step. Perform the call, say how it went.

A call goes through these functions from top to bottom: what a tool raises becomes an outcome (`attempt`), secrets are
put into its arguments (`perform`), it runs under its time-out (`call_tool`), and what it returned is made fit to be
kept (`finish`). That it is allowed, and that its intent is stored, was seen to before: see `passage`.
"""

import asyncio
import json
from typing import Any

from interlock import tracing
from interlock.errors import Retryable, Terminal, Unavailable
from interlock.telemetry import scrubbed_lines
from interlock.tools import Canceled, Veil
from interlock.worker.call import Call, Workshop
from interlock.worker.outcome import Done, Failed, Interrupted, NotBegun, Outcome, describe, failure, is_cut_off
from interlock.worker.output import encode_output
from interlock.worker.spans import traced_attempt, traced_tool
from interlock.worker.threads import in_thread


async def execute(shop: Workshop, call: Call) -> Outcome:
    if tracing.spans is None:
        outcome = await attempt(shop, call)
    else:
        outcome = await traced_attempt(tracing.spans, call, attempt(shop, call))
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
    """Whether the worker canceled this task. If it did not, the cancellation is of something that the tool awaited
    itself, and to the run that is a failure like any other."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def perform(shop: Workshop, call: Call) -> Any:
    # Secrets are filled in here and nowhere earlier: what is proposed, judged, shown and journaled has their names.
    arguments = await fill(shop, call)
    if call.context.scrubber is None:
        return await run_tool(shop, call, arguments)
    with scrubbed_lines(call.context.scrub):
        return await run_tool(shop, call, arguments)


async def fill(shop: Workshop, call: Call) -> dict[str, Any]:
    """The arguments with the values of the secrets they name.

    The input is rendered a second time, with the values in place of the names. Searching the first rendering for names
    could replace what only looks like one.
    """
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
        return await traced_tool(tracing.spans, call, call_tool(shop, call, arguments))
    except (asyncio.CancelledError, Canceled, Exception, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # A panic of a library in Rust, or a KeyboardInterrupt that the tool raised: the attempt failed, the worker did
        # not, so it becomes an error that `attempt` can sort.
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


def finish(shop: Workshop, call: Call, result: Any) -> Outcome:
    """The tool has done it. If what it returned cannot be kept, the step fails; what was done stays done."""
    try:
        return Done(keep(shop, call, result), call.context)
    except Terminal as error:
        return Failed(describe(error, call.context.scrubber), False, None, call.context, happened=True)


def keep(shop: Workshop, call: Call, result: Any) -> str:
    """The output as it is kept: without what the tool calls secret, and without any secret that it was given."""
    veil = Veil()
    output = encode_output(result, shop.max_output_bytes, call.tool, veil)
    call.hide(veil.hidden)
    scrubber = call.context.scrubber
    # By `json` and not by orjson, which would read an integer of more than 64 bits as a float.
    return output if scrubber is None else json.dumps(scrubber.scrub(json.loads(output)), ensure_ascii=False)
