"""The executor: one attempt at one step, resolve → perform, and how it went.

What a tool raises is sorted here, once: time-outs, lost connections, 429 and 5xx are worth another try, and so is
anything unknown; wrong input, other 4xx and whatever the tool calls Terminal are not.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Executor as Threads
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from interlock.definition.expression import Scope
from interlock.errors import Retryable, Terminal
from interlock.journal import StepFold
from interlock.tools import Canceled, Context, Registry, Tool

_THREAD_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Done:
    output: str
    context: Context


@dataclass(frozen=True, slots=True)
class Failed:
    error: dict[str, Any]
    retryable: bool
    after: float | None
    context: Context | None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """It was told to stop, and did."""


Outcome = Done | Failed | Interrupted


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every execution in this process shares."""

    tools: Registry
    threads: Threads
    max_output_bytes: int


async def execute(shop: Workshop, fold: StepFold, scope: Scope, run_id: UUID, tenant_id: UUID) -> Outcome:
    context: Context | None = None
    try:
        tool, arguments = resolve(shop.tools, fold, scope)
        context = Context(
            run_id=run_id, tenant_id=tenant_id, step=fold.step.key, attempt=fold.attempt,
            idempotency_key=tool.effect_key(arguments),
        )  # fmt: skip
        result = await perform(shop, tool, arguments, context, fold.step.timeout or tool.timeout)
        return Done(encode_output(result, shop.max_output_bytes), context)
    except (asyncio.CancelledError, Canceled):
        return Interrupted()
    except Exception as error:
        retryable, after = sort(error)
        return Failed(describe(error), retryable, after, context)


def resolve(tools: Registry, fold: StepFold, scope: Scope) -> tuple[Tool, dict[str, Any]]:
    """The tool and the arguments to call it with."""
    name = fold.step.tool or ""
    tool = tools.find(name)
    if tool is None:
        # Not terminal: the worker may be older than the workflow, and the next to try may know it.
        raise Retryable(f"no tool {name} in this worker; add its file to INTERLOCK_TOOLS")
    try:
        return tool, tool.validated(fold.step.input.render(scope))
    except ValueError as error:
        raise Terminal(str(error)) from None


async def perform(
    shop: Workshop, tool: Tool, arguments: dict[str, Any], context: Context, timeout: float | None
) -> Any:
    args = (context,) if tool.wants_context else ()
    if timeout is None:
        if tool.is_async:
            return await tool.function(*args, **arguments)
        return await in_thread(shop.threads, tool, args, arguments, context)
    try:
        async with asyncio.timeout(timeout) as limit:
            if tool.is_async:
                return await tool.function(*args, **arguments)
            return await in_thread(shop.threads, tool, args, arguments, context)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{tool.name} took longer than {timeout:g} s") from None
        raise


async def in_thread(
    threads: Threads, tool: Tool, args: tuple[Any, ...], arguments: dict[str, Any], context: Context
) -> Any:
    """A thread cannot be stopped from outside: it is told, and given a moment to notice at its next heartbeat."""
    token = context.cancel_token()
    future = asyncio.get_running_loop().run_in_executor(threads, lambda: tool.function(*args, **arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        token.set()
        await asyncio.wait([future], timeout=_THREAD_GRACE_SECONDS)
        if future.done() and not future.cancelled():
            future.exception()  # seen, so that it is not reported as lost
        raise


def encode_output(result: Any, limit: int) -> str:
    try:
        encoded = orjson.dumps(result)
    except TypeError:
        try:
            encoded = to_json(result)
        except (PydanticSerializationError, ValueError) as error:
            raise Terminal(f"the output is not JSON: {error}") from None
    if len(encoded) > limit:
        raise Terminal(
            f"the output has {len(encoded):,} bytes; at most {limit:,} are kept (INTERLOCK_MAX_OUTPUT_BYTES)"
        )
    if b"\\u0000" in encoded:
        raise Terminal("the output contains a NUL character, which PostgreSQL cannot store")
    return encoded.decode()


def sort(error: Exception) -> tuple[bool, float | None]:
    """Whether another try may help, and after how many seconds if the error says so."""
    match error:
        case Terminal() | ValidationError():
            return False, None
        case Retryable():
            return True, error.after
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        return False, None
    return True, _retry_after(getattr(response, "headers", None))


def _retry_after(headers: Any) -> float | None:
    value = headers.get("retry-after") if isinstance(headers, Mapping) else None
    return float(value) if isinstance(value, str) and value.strip().isdigit() else None


def describe(error: Exception) -> dict[str, Any]:
    kind = type(error).__name__
    return {"type": kind, "message": (str(error) or kind)[:2000].replace("\x00", "\ufffd")}


def elapsed_ms(since: float) -> float:
    return round((time.perf_counter() - since) * 1000, 3)
