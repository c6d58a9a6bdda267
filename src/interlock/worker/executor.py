"""The executor: one attempt at one step, resolve → perform, and how it went.

What a tool raises is sorted here, once: time-outs, lost connections, 429 and 5xx are worth another try, and so is
anything unknown; wrong input, other 4xx and whatever the tool calls Terminal are not.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
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
_LONGEST_RETRY_SECONDS = 86400.0
# Not after an escaped backslash: then it is six characters of text.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


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
    except (asyncio.CancelledError, Canceled) as error:
        if told_to_stop():
            return Interrupted()
        return Failed(describe(error), True, None, context)
    except (Exception, SystemExit) as error:
        retryable, after = sort(error)
        return Failed(describe(error), retryable, after, context)


def told_to_stop() -> bool:
    """Else a cancellation is the tool's own: of something it awaited, say. To the run that is a failure like others."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


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
    future = asyncio.get_running_loop().run_in_executor(threads, _call, tool, args, arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        token.set()
        await asyncio.wait([future], timeout=_THREAD_GRACE_SECONDS)
        if future.done() and not future.cancelled():
            future.exception()  # seen, so that it is not reported as lost
        raise


def _call(tool: Tool, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    try:
        return tool.function(*args, **arguments)
    except StopIteration as error:
        # A future takes any exception but this one: it would never be done.
        raise RuntimeError(f"{tool.name} raised StopIteration") from error


def encode_output(result: Any, limit: int) -> str:
    try:
        encoded = orjson.dumps(result)
    except TypeError:
        try:
            encoded = to_json(result, inf_nan_mode="null")
            orjson.loads(encoded)  # a number that nobody could read again
        except (PydanticSerializationError, ValueError) as error:
            raise Terminal(f"the output is not JSON: {error}") from None
    if len(encoded) > limit:
        raise Terminal(
            f"the output has {len(encoded):,} bytes; at most {limit:,} are kept (INTERLOCK_MAX_OUTPUT_BYTES)"
        )
    if _NUL.search(encoded):
        raise Terminal("the output contains a NUL character, which PostgreSQL cannot store")
    return encoded.decode()


def sort(error: BaseException) -> tuple[bool, float | None]:
    """Whether another try may help, and after how many seconds if the error says so."""
    match error:
        case Terminal() | ValidationError():
            return False, None
        case Retryable():
            return True, _seconds(error.after)
    response = getattr(error, "response", None)
    status = next((s for s in _statuses(error, response) if isinstance(s, int)), None)
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return False, None
    headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    get: Callable[[str], Any] = getattr(headers, "get", lambda _: None)
    return True, _seconds(get("Retry-After") or get("retry-after"))


def _statuses(error: BaseException, response: Any) -> Iterator[Any]:
    """httpx and requests have a response, most SDKs a `status_code`, aiohttp and urllib a `status`."""
    yield getattr(response, "status_code", None)
    yield getattr(error, "status_code", None)
    yield getattr(error, "status", None)


def _seconds(value: Any) -> float | None:
    """What a foreign system says is bounded: a run must not be lost to a nonsensical number."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None  # not said, or as a date
    return min(seconds, _LONGEST_RETRY_SECONDS) if seconds >= 0 else None


def describe(error: BaseException) -> dict[str, Any]:
    kind = type(error).__name__
    message = (str(error) or kind)[:2000].replace("\x00", "\ufffd")
    # Names of files may have bytes that are no text.
    return {"type": kind, "message": message.encode(errors="replace").decode()}


def elapsed_ms(since: float) -> float:
    return round((time.perf_counter() - since) * 1000, 3)
