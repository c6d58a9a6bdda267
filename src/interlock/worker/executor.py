"""The executor: one attempt at one step. Prepare the call, perform it, say how it went.

What a tool raises is sorted here, once: time-outs, lost connections, 429 and 5xx are worth another try, and so is
anything unknown; wrong input, other 4xx and whatever the tool calls Terminal are not. A write that was cut off in the
middle is neither: it may have happened.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor as Threads
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event
from typing import Any
from uuid import UUID

import orjson
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from interlock import tracing
from interlock.definition.expression import Scope
from interlock.engine.keyfiles import Salts
from interlock.engine.secrets import Secrets
from interlock.errors import Retryable, Terminal, Unavailable
from interlock.governance.action import ProposedAction
from interlock.governance.redact import Scrubber
from interlock.journal import StepFold
from interlock.lifecycle import StepState
from interlock.telemetry import scrubbed_lines
from interlock.tools import Canceled, Context, DidNotHappen, Happened, Registry, Tool, Veil, default_key, explain
from interlock.waiting import retry_after
from interlock.wire.grammar import DEEPEST, is_too_deep

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
    # A write that was cut off: whether it happened is not known.
    in_doubt: bool = False
    # It was done, and then something else went wrong.
    happened: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """It was told to stop, and did; perhaps before anything was done."""

    begun: bool = True


class NotBegun(Retryable):
    """It waited for a thread until it was told to stop or its time was over."""


Outcome = Done | Failed | Interrupted


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every execution in this process shares."""

    tools: Registry
    threads: Threads
    max_output_bytes: int
    salts: Salts
    secrets: Secrets


@dataclass(slots=True)
class Call:
    """A step made ready: the tool, what it is called with and, for a write, the action that is proposed."""

    fold: StepFold
    tool: Tool
    arguments: dict[str, Any]
    context: Context
    scope: Scope
    action: ProposedAction | None = None
    receipt_id: UUID | None = None
    # For a read that was judged: the decision that let it through.
    grounds: dict[str, Any] | None = None
    # Values that must not be seen: what the tool calls secret and, once they are opened, the secrets it is given.
    hidden: set[str] = field(default_factory=set)
    # In a thread that did not end when it was told to: what it does, it does still.
    left_behind: bool = False

    @property
    def timeout(self) -> float | None:
        return self.fold.step.timeout or self.tool.timeout

    def hide(self, values: Iterable[str], scrubber: Scrubber | None = None) -> None:
        """From now on; `scrubber` is one that knows exactly these, if somebody has made it already."""
        new = frozenset(values) - self.hidden
        if new:
            self.context.scrubber = scrubber if scrubber and not self.hidden else Scrubber(self.hidden | new)
            self.hidden |= new


def prepare(
    shop: Workshop, fold: StepFold, scope: Scope, run_id: UUID, tenant_id: UUID,
    effect: Callable[[], str] | None = None,
) -> Call | Failed:  # fmt: skip
    """Resolve the tool and render its input. A step that cannot be called has failed.

    `effect` says what its effect is called if its tool does not: see `effect_key`.
    """
    try:
        tool = find(shop.tools, fold.step.tool or "")
    except Retryable as error:
        return failure(error)
    return prepare_as(tool, shop, fold, scope, run_id, tenant_id, effect)


def prepare_as(
    tool: Tool,
    shop: Workshop,
    fold: StepFold,
    scope: Scope,
    run_id: UUID,
    tenant_id: UUID,
    effect: Callable[[], str] | None = None,
) -> Call | Failed:
    try:
        arguments = tool.validated(fold.input(scope))
        veil = Veil(shop.salts(tenant_id) if tool.secret else None)
        shown = tool.shown(arguments, veil) if tool.writes or tool.secret else None
        action = tool.propose(arguments, shown, fold.secrets) if tool.writes and shown is not None else None
        context = Context(
            run_id=run_id, tenant_id=tenant_id, step=fold.step.key,
            idempotency_key=_begun_with(fold)
            or tool.effect_key(arguments, shown)
            or (effect_key(effect() if effect else default_key(run_id, fold.step.key), action) if action else None),
            attempt=fold.attempt + (fold.status == StepState.PENDING),
        )  # fmt: skip
        call = Call(fold, tool, arguments, context, scope, action)
        call.hide(veil.hidden)
        return call
    except (Retryable, Terminal) as error:
        return failure(error)
    except Exception as error:  # a template or an argument that nobody can make sense of
        return failure(Terminal(str(error) or type(error).__name__))


def propose_read(shop: Workshop, call: Call) -> ProposedAction | Failed:
    """The action of a tool that only reads, for a policy that has something to say about it."""
    try:
        veil = Veil(shop.salts(call.context.tenant_id) if call.tool.secret else None)
        return call.tool.propose(call.arguments, call.tool.shown(call.arguments, veil), call.fold.secrets)
    except Exception as error:
        return failure(Terminal(str(error) or type(error).__name__), call.context)


def effect_key(effect: str, action: ProposedAction) -> str:
    """For a tool that does not name its effects. An edited action is another effect, and has another key."""
    return f"{effect}:{action.digest[:16]}"


def _begun_with(fold: StepFold) -> str | None:
    """The key of an effect that was cut off. The tool may name it otherwise by now; its system knows it by this one."""
    return fold.idempotency_key if fold.status == StepState.RUNNING and fold.receipt_id is not None else None


def told_to_stop() -> bool:
    """Else a cancellation is the tool's own: of something it awaited, say. To the run that is a failure like others."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def find(tools: Registry, name: str) -> Tool:
    tool = tools.find(name)
    if tool is None:
        # Not terminal: the worker may be older than the workflow, and the next to try may know it.
        raise Retryable(f"no tool {name} in this worker; add its file to INTERLOCK_TOOLS")
    return tool


async def execute(shop: Workshop, call: Call) -> Outcome:
    outcome = await attempt(shop, call) if tracing.spans is None else await traced_attempt(tracing.spans, shop, call)
    call.context.scrub_costs()
    return outcome


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


async def attempt(shop: Workshop, call: Call) -> Outcome:
    try:
        result = await perform(shop, call)
    except (asyncio.CancelledError, Canceled, Exception, SystemExit) as error:
        if isinstance(error, (asyncio.CancelledError, Canceled, NotBegun)) and told_to_stop():
            return Interrupted(begun=not isinstance(error, NotBegun))
        cut_off = call.tool.writes and not call.tool.idempotent and is_cut_off(error)
        return failure(error, call.context, in_doubt=cut_off)
    return finish(shop, call, result)


def finish(shop: Workshop, call: Call, result: Any) -> Outcome:
    """It was done. What it returned may still be nothing that can be kept, which fails the step and undoes nothing."""
    try:
        return Done(keep(shop, call, result), call.context)
    except Terminal as error:
        return Failed(describe(error, call.context.scrubber), False, None, call.context, happened=True)


async def perform(shop: Workshop, call: Call) -> Any:
    # Here and nowhere earlier: what is proposed, judged, shown and journaled has the names of secrets, not the values.
    arguments = await fill(shop, call)
    if call.context.scrubber is None:
        return await run_tool(shop, call, arguments)
    with scrubbed_lines(call.context.scrub):
        return await run_tool(shop, call, arguments)


async def run_tool(shop: Workshop, call: Call, arguments: dict[str, Any]) -> Any:
    try:
        if tracing.spans is None:
            return await call_tool(shop, call, arguments)
        return await traced_tool(tracing.spans, shop, call, arguments)
    except (asyncio.CancelledError, Canceled, Exception, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a library's panic, a KeyboardInterrupt: the attempt has failed, and we go on
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def traced_tool(spans: tracing.Spans, shop: Workshop, call: Call, arguments: dict[str, Any]) -> Any:
    with spans.span(f"tool {call.tool.name}", {"interlock.tool": call.tool.name}) as span:
        try:
            return await call_tool(shop, call, arguments)
        except BaseException as error:
            tracing.fail(span, describe(error, call.context.scrubber)["message"])
            raise


async def call_tool(shop: Workshop, call: Call, arguments: dict[str, Any]) -> Any:
    tool, context, timeout = call.tool, call.context, call.timeout
    args = (context,) if tool.wants_context else ()
    if timeout is None:
        if tool.is_async:
            return await tool.function(*args, **arguments)
        return await in_thread(shop, call, args, arguments)
    try:
        async with asyncio.timeout(timeout) as limit:
            if tool.is_async:
                return await tool.function(*args, **arguments)
            return await in_thread(shop, call, args, arguments)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{tool.name} took longer than {timeout:g} s") from None
        raise


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


async def reconcile(shop: Workshop, call: Call) -> Happened | DidNotHappen | None:
    """Ask the system that was acted on. None: it cannot be asked, or did not know."""
    if call.tool.reconcile is None:
        return None
    args = (call.context,) if call.tool.wants_context else ()
    try:
        async with asyncio.timeout(call.timeout or 60):
            arguments = await fill(shop, call)
            with scrubbed_lines(call.context.scrub):
                answer = call.tool.reconcile(*args, **arguments)
                answer = await answer if asyncio.iscoroutine(answer) else answer
    except Exception as error:
        call.context.log.warning("reconcile_failed", error=str(error))
        return None
    return answer if isinstance(answer, (Happened, DidNotHappen)) else None


def keep(shop: Workshop, call: Call, result: Any) -> str:
    """The output as it is kept: without what the tool calls secret, nor any secret that it was given."""
    veil = Veil()
    output = encode_output(result, shop.max_output_bytes, call.tool, veil)
    call.hide(veil.hidden)
    scrubber = call.context.scrubber
    # Not by orjson, to which a number of more than 64 bits is another one.
    return output if scrubber is None else json.dumps(scrubber.scrub(json.loads(output)), ensure_ascii=False)


def encode_output(result: Any, limit: int, tool: Tool, veil: Veil) -> str:
    return _fitting(tool.kept(result, veil) if tool.result is not None else _as_json(result, veil), limit)


def encode_result(result: Any, limit: int) -> str:
    """What a flow returned, as it is kept."""
    return _fitting(_as_json(result, Veil()), limit)


def _fitting(encoded: bytes, limit: int) -> str:
    if len(encoded) > limit:
        raise Terminal(
            f"the output has {len(encoded):,} bytes; at most {limit:,} are kept (INTERLOCK_MAX_OUTPUT_BYTES)"
        )
    if _NUL.search(encoded):
        raise Terminal("the output contains a NUL character, which PostgreSQL cannot store")
    if is_too_deep(encoded):
        raise Terminal(f"the output is nested deeper than {DEEPEST} levels")
    return encoded.decode()


def _as_json(result: Any, veil: Veil) -> bytes:
    try:
        # Dataclasses are left to pydantic, which knows what in its own is secret.
        return orjson.dumps(result, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError:
        pass
    try:
        encoded = to_json(result, context=veil, inf_nan_mode="null")
        orjson.loads(encoded)  # a number that nobody could read again
        return encoded
    except (PydanticSerializationError, ValueError) as error:
        raise Terminal(f"the output is not JSON: {error}") from None


def failure(error: BaseException, context: Context | None = None, *, in_doubt: bool = False) -> Failed:
    retryable, after = sort(error)
    return Failed(describe(error, context.scrubber if context else None), retryable, after, context, in_doubt)


def is_cut_off(error: BaseException) -> bool:
    """The other side may have acted, and the answer got lost or was not understood.

    Unless it was refused in so many words, or the tool says Retryable or Terminal, which is its word that nothing was
    done. Clients have their own time-outs and connection errors; no list of them would be complete.
    """
    if isinstance(error, (Retryable, Terminal)):
        return False
    status = _status(error)
    return status is None or status == 408 or not 400 <= status < 500


def sort(error: BaseException) -> tuple[bool, float | None]:
    """Whether another try may help, and after how many seconds if the error says so."""
    match error:
        case Terminal() | ValidationError():
            return False, None
        case Retryable():
            return True, _after(error.after)
    status = _status(error)
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return False, None
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None)
    get: Callable[[str], Any] = getattr(headers, "get", lambda _: None)
    return True, _after(get("Retry-After") or get("retry-after"))


def _after(value: Any) -> float | None:
    return retry_after(value, datetime.now(UTC), _LONGEST_RETRY_SECONDS) if value is not None else None


def _status(error: BaseException) -> int | None:
    return next((s for s in _statuses(error, getattr(error, "response", None)) if isinstance(s, int)), None)


def _statuses(error: BaseException, response: Any) -> Iterator[Any]:
    """httpx and requests have a response, most SDKs a `status_code`, aiohttp and urllib a `status`."""
    yield getattr(response, "status_code", None)
    yield getattr(error, "status_code", None)
    yield getattr(error, "status", None)


def describe(error: BaseException, scrubber: Scrubber | None = None) -> dict[str, Any]:
    kind = type(error).__name__
    message = str(error) if scrubber is None else _scrubbed(error, scrubber)
    message = (message or kind)[:2000].replace("\x00", "\ufffd")
    # Names of files may have bytes that are no text.
    return {"type": kind, "message": message.encode(errors="replace").decode()}


def _scrubbed(error: BaseException, scrubber: Scrubber) -> str:
    """Before it is cut to size: half a secret would not be found. Pydantic shows inputs cut already, so not at all."""
    return scrubber.scrub(explain(error, show_input=False) if isinstance(error, ValidationError) else str(error))


def elapsed_ms(since: float) -> float:
    return round((time.perf_counter() - since) * 1000, 3)
