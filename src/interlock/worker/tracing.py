"""The spans of an attempt: one for the step and, below it, one for its tool. Used only if tracing is on."""

from collections.abc import Awaitable
from typing import Any

from interlock import tracing
from interlock.worker.outcome import CallOutcome, Failed, describe
from interlock.worker.tool_call import PreparedCall


async def traced_attempt(spans: tracing.Spans, call: PreparedCall, attempting: Awaitable[CallOutcome]) -> CallOutcome:
    context = call.context
    about = {
        "interlock.run_id": str(context.run_id), "interlock.step": context.step, "interlock.attempt": context.attempt,
    }  # fmt: skip
    with spans.span(f"step {context.step}", about, parent=context._traceparent) as span:
        outcome = await attempting
        span.set_attribute("interlock.outcome", type(outcome).__name__.lower())
        # The error as the journal has it, without secrets.
        tracing.fail(span, str(outcome.error.get("message")) if isinstance(outcome, Failed) else None)
    return outcome


async def traced_tool(spans: tracing.Spans, call: PreparedCall, calling: Awaitable[Any]) -> Any:
    with spans.span(f"tool {call.tool.name}", {"interlock.tool": call.tool.name}) as span:
        try:
            return await calling
        except BaseException as error:
            tracing.fail(span, describe(error, call.context.scrubber)["message"])
            raise
