"""A pydantic-ai agent with its own loop inside a flow: its model and tool calls are steps of the flow.

pydantic-ai delegates everything an agent does beyond computing to a *durable backend*: model requests, tool calls,
discovery. Our backend asks the flow for a step for each. After a crash the agent runs again from its start and receives
the answers from the journal. Interlock's tools are called as from any flow. The agent's own functions have unknown
effects, so to the policy they are one tool, `agent.function`, that writes.

An agent needs an event loop and a flow has none, so all agents of a process share an event loop on another thread.
While an agent computes, its flow waits; while a step runs, the agent waits.
"""

import asyncio
import contextlib
import contextvars
import functools
import queue
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine
from fnmatch import fnmatchcase
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter
from pydantic_ai import RunContext
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    CapabilityOperationId,
    DurabilityEngineSpec,
    DurableOperationId,
    JournalCallableOperationBackend,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    conversation_id_from_run_id,
)
from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.messages import ModelResponse
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema, to_jsonable_python

from interlock.agents.model_turn import count
from interlock.agents.tool_names import is_reserved, wire_name
from interlock.errors import Terminal
from interlock.flows import FlowContext, FlowUsageError, StepFailed
from interlock.tools import Context, Registry, registry, tool

__all__ = ["Durability", "governed", "operations", "run_agent"]

# An agent that only computes yields its next operation quickly. After these slices we assume that it is blocked on I/O
# unknown to the run. Slices, so that a stopped process does not use up the time.
_THINKING_SLICES = 50
_SLICE_SECONDS = 0.1
_ODD = re.compile(r"[^A-Za-z0-9._:-]")


class _Operation:
    """An operation that the agent asks for and waits for. Lives in the agents' event loop."""

    def __init__(self, tool: str, key: str | None, input: dict[str, Any], body: Any = None) -> None:
        self.tool = tool
        self.key = key
        self.input = input
        self._body: Callable[[], Awaitable[object]] | None = body
        self._context = contextvars.copy_context()
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def answered(self) -> Any:
        return await self._answer

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Deliver the answer from the flow's thread."""
        self._answer.get_loop().call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._answer.done():
            return
        if error is None:
            self._answer.set_result(value)
        else:
            self._answer.set_exception(error)

    async def perform(self) -> object:
        """Perform the operation as the agent would have, within the context of its run."""
        assert self._body is not None

        async def body(do: Callable[[], Awaitable[object]]) -> object:
            # An agent that this operation calls is part of this step: the flow waits for the step and gets no requests.
            _current.set(None)
            return await do()

        return await asyncio.get_running_loop().create_task(body(self._body), context=self._context)


class _Run:
    """One run of an agent, for as long as its flow is in memory."""

    def __init__(self, name: str, run: Callable[[], Coroutine[Any, Any, AgentRunResult[Any]]]) -> None:
        self.name = name
        self._said: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._done = asyncio.run_coroutine_threadsafe(self._live(run), _loop())

    async def _live(self, run: Callable[[], Coroutine[Any, Any, AgentRunResult[Any]]]) -> AgentRunResult[Any]:
        _current.set(self)
        try:
            return await run()
        finally:
            self._said.put(None)

    async def ask(self, operation: _Operation) -> Any:
        self._said.put(operation)
        return await operation.answered()

    def next(self) -> _Operation | None:
        """Return the agent's next operation, or None when the agent has finished."""
        for _ in range(_THINKING_SLICES):
            with contextlib.suppress(queue.Empty):
                return self._said.get(timeout=_SLICE_SECONDS)
        raise FlowUsageError(
            f"agent {self.name} waits for something that is none of its steps; what it does besides asking its model "
            "and calling its tools belongs in a tool"
        )

    def result(self) -> AgentRunResult[Any]:
        return self._done.result()

    def close(self) -> None:
        self._done.cancel()


_current: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("interlock_agent", default=None)
# The operations of running steps in this process. Their bodies cannot be stored, and need not be.
_under_way: dict[tuple[UUID, str], _Operation] = {}


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all agents of the process; providers keep their connections in it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


# ---------------------------------------------------------------- called by flows


async def run_agent(
    ctx: FlowContext, agent: AbstractAgent[Any, Any], prompt: Any = None, /, **more: Any
) -> AgentRunResult[Any]:
    """Run `agent.run(prompt, **more)` as steps of this flow.

    The agent needs the `Durability` capability, and a name.
    """
    if Durability.from_agent(agent) is None:
        raise FlowUsageError(f"agent {agent.name or ''} is not durable: give it capabilities=[Durability()]")
    more.setdefault("run_id", str(ctx.uuid()))
    run = _Run(agent.name or "agent", functools.partial(agent.run, prompt, **more))
    try:
        while (operation := run.next()) is not None:
            await _do(ctx, operation)
        return run.result()
    finally:
        run.close()


async def _do(ctx: FlowContext, operation: _Operation) -> None:
    asked = ctx.step(operation.key).call(operation.tool, **operation.input)
    place = ctx.run_id, asked.step.key  # type: ignore[attr-defined]
    _under_way[place] = operation
    try:
        operation.settle(await asked)
    except StepFailed as failed:
        operation.settle(error=failed)
    finally:
        _under_way.pop(place, None)


# ---------------------------------------------------------------- the capability


class _Backend(JournalCallableOperationBackend[None]):
    async def execute(
        self, *, operation_id: DurableOperationId, name: str, body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...], config: None,
    ) -> object:  # fmt: skip
        run = _current.get()
        assert run is not None
        match operation_id:
            case ToolsetCallToolId():
                called, args = cache_key[0], to_jsonable_python(cache_key[1])
                given = {"agent": run.name, "function": called, "args": args}
                operation = _Operation("agent.function", _key(str(called)), given, body)
            case CapabilityOperationId():
                given = {"agent": run.name, "function": name, "args": {}}
                operation = _Operation("agent.function", _key(name), given, body)
            case _:
                operation = _Operation("agent.operation", _key(name), {"agent": run.name, "operation": name}, body)
        return await run.ask(operation)


def _key(name: str) -> str:
    return _ODD.sub("_", name)[:200]


class Durability(BaseDurabilityCapability[Any]):
    """Makes an agent durable within a flow; see `run_agent`. Has no effect outside of a flow.

    Tools are called one after the other, so that the agent asks for them in the same order on replay.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Interlock", durable_unit_noun="step", durable_container_noun="flow", codec=JSON_CODEC,
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        sequential_tools_in_durable_context=True,
    )  # fmt: skip

    @property
    def in_durable_context(self) -> bool:
        return _current.get() is not None

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    def get_durable_operation_backend(self) -> _Backend:
        config = RoleBasedOperationConfig[None](model=None, event=None, capability=None, tool=None)
        return _Backend(agent_name=self.name, default_model_id=self.default_model_id, config=config)


# ---------------------------------------------------------------- tools


def governed(*patterns: str, tools: Registry = registry) -> "AbstractToolset[Any]":
    """Return Interlock's tools with matching names, for an agent in a flow. Each call is a step and passes the gate."""
    return _Governed(patterns or ("*",), tools)


class _Governed(AbstractToolset[Any]):
    def __init__(self, patterns: tuple[str, ...], tools: Registry) -> None:
        self._patterns = patterns
        self._tools = tools
        self._anything = SchemaValidator(core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema()))

    @property
    def id(self) -> str:
        return "interlock"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        offered = {}
        for known in self._tools.all():
            if is_reserved(known) or not any(fnmatchcase(known.name, pattern) for pattern in self._patterns):
                continue
            name = wire_name(known.name)
            definition = ToolDefinition(
                name=name, description=known.description or known.name, parameters_json_schema=known.input_schema,
                metadata={"tool": known.name},
            )  # fmt: skip
            offered[name] = ToolsetTool(toolset=self, tool_def=definition, max_retries=1, args_validator=self._anything)
        return offered

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        run = _current.get()
        if run is None:
            raise FlowUsageError(
                "the tools of `governed` are called in a flow: run the agent with run_agent(ctx, agent, …), "
                "and not in a function of another"
            )
        try:
            return await run.ask(_Operation((tool.tool_def.metadata or {})["tool"], None, tool_args))
        except StepFailed as failed:
            raise ToolFailed(str(failed.error.get("message") or failed.reason)) from failed


def operations(register: Registry = registry) -> None:
    """Register the two tools that the steps of agents with their own loop call."""

    @tool("agent.operation", register=register)
    async def operation(ctx: Context, agent: str, operation: str) -> Any:
        """Perform an agent's operation without side effects, such as a model request or the discovery of tools."""
        done = await _perform(ctx)
        if ".model.request" in operation.replace("__", "."):
            _count(ctx, done)
        return done

    @tool("agent.function", writes=True, risk="med", register=register)
    async def function(ctx: Context, agent: str, function: str, args: dict[str, Any]) -> Any:
        """Call one of an agent's own functions. Its effects are unknown, so it counts as a write."""
        return await _perform(ctx)


async def _perform(ctx: Context) -> Any:
    operation = _under_way.get((ctx.run_id, ctx.step))
    if operation is None:
        raise Terminal(f"only an agent that runs in a flow calls this; call what {ctx.step} does by its own name")
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(operation.perform(), _loop()))


def _count(ctx: Context, done: Any) -> None:
    response = done.get("response", done) if isinstance(done, dict) else None
    if isinstance(response, dict) and "parts" in response:
        answer = _RESPONSE.validate_python(response)
        count(ctx, answer, "unknown")


_RESPONSE = TypeAdapter(ModelResponse)

operations()
