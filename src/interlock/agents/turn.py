"""One turn: a model is told the conversation so far, and what it says and wants done is the step's output."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from pydantic import BaseModel

from interlock.agents.names import by_wire_name, is_reserved, wire_name
from interlock.definition.plan import Agent, Plan
from interlock.engine import sessions
from interlock.engine.principal import DEFAULT_TENANT
from interlock.errors import Retryable, Terminal
from interlock.journal import Journal, next_keys
from interlock.lifecycle import Tier
from interlock.store.pool import Database, Row
from interlock.tools import Context, Registry, Tool

Says = Callable[[str], None]

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class _Nothing(BaseModel):
    pass


async def _unbound(ctx: Context) -> None:
    raise NotImplementedError


# A model is called like a tool that only reads: under the same time-outs, retries and interruptions.
_MODEL = Tool(
    name="model", function=_unbound, description="", is_async=True, wants_context=True, arguments=_Nothing,
    writes=False, risk=Tier.LOW, idempotent=True, key=None, undo=None, timeout=600.0, target=None, show=frozenset(),
    reconcile=None, input_schema={},
)  # fmt: skip


def model_call(database: Database, tools: Registry, row: Row, journal: Journal, says: Says) -> Tool:
    """The next call of the run's model, for the executor to perform. `says` is told its text as it comes."""
    plan = journal.plan
    assert plan.agent is not None

    async def ask(ctx: Context) -> dict[str, Any]:
        return await _ask(ctx, database, tools, row, journal, plan, says)

    return replace(_MODEL, function=ask)


async def _ask(
    ctx: Context, database: Database, tools: Registry, row: Row, journal: Journal, plan: Plan, says: Says
) -> dict[str, Any]:
    # Here, because loading it takes a second that no process without agents should spend.
    from pydantic_ai.direct import model_request_stream
    from pydantic_ai.messages import ModelMessagesTypeAdapter
    from pydantic_ai.models import ModelRequestParameters

    from interlock.agents.conversation import conversation
    from interlock.agents.models import model_for

    agent = plan.agent
    assert agent is not None
    if agent.is_elsewhere:
        await _require_operators(database, row)
    before = await sessions.memory(database, row, plan)
    messages = conversation([*before, (sessions.message_of(row), journal)], agent.instructions)
    offered = [tool for tool in tools.all() if agent.may_use(tool.name) and not is_reserved(tool)]
    parameters = ModelRequestParameters(function_tools=[_offer(tool) for tool in offered])
    async with model_request_stream(
        model_for(agent), messages, model_settings=_settings(agent), model_request_parameters=parameters
    ) as stream:
        async for event in stream:
            if text := _text_in(event):
                says(storable(text))
        response = stream.get()
    if response.state == "incomplete":
        raise Retryable("the model's answer broke off")
    count(ctx, response, agent.model.partition(":")[0])
    [kept] = ModelMessagesTypeAdapter.dump_python([response], mode="json")
    answer: dict[str, Any] = storable({
        "text": response.text or "", "calls": _calls(response, offered, journal), "response": kept,
        "usage": {"input_tokens": response.usage.input_tokens, "output_tokens": response.usage.output_tokens},
        "model": response.model_name,
    })  # fmt: skip
    return answer


def storable(said: Any) -> Any:
    """What a model says may be no text in places: PostgreSQL can store neither NUL nor half a character."""
    match said:
        case str():
            return _UNSTORABLE.sub("\ufffd", said)
        case dict():
            return {storable(name): storable(member) for name, member in said.items()}
        case list():
            return [storable(item) for item in said]
        case _:
            return said


async def _require_operators(database: Database, row: Row) -> None:
    """An agent can be from before this was asked of whoever applies it."""
    operators = await database.row("tenant_named", DEFAULT_TENANT)
    if operators is None or operators["id"] != row["tenant_id"]:
        raise Terminal(f"base_url and api_key_env are for agents of tenant {DEFAULT_TENANT}, which has the workers")


def _settings(agent: Agent) -> Any:
    return dict(agent.settings) or None


def _offer(tool: Tool) -> Any:
    from pydantic_ai.tools import ToolDefinition

    return ToolDefinition(
        name=wire_name(tool.name), description=tool.description or tool.name, parameters_json_schema=tool.input_schema,
        strict=False,
    )  # fmt: skip


def _text_in(event: Any) -> str:
    from pydantic_ai.messages import PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta

    match event:
        case PartStartEvent(part=TextPart(content=text)) | PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
            return str(text)
        case _:
            return ""


def _calls(response: Any, offered: Sequence[Tool], journal: Journal) -> list[Mapping[str, Any]]:
    """What the model wants done, each call with the step that does it, or with what is wrong with it.

    Decided here and kept: a call must mean the same whoever takes the run up later, with whatever tools.
    """
    known = by_wire_name(offered)
    calls: list[dict[str, Any]] = []
    for part in response.tool_calls:
        tool = known.get(part.tool_name)
        call = {"id": part.tool_call_id, "tool": tool.name if tool else part.tool_name, "args": {}}
        if tool is None:
            call["problem"] = f"There is no tool {part.tool_name}."
        else:
            call |= _checked(tool, part)
        calls.append(call)
    fine = [call for call in calls if "problem" not in call]
    for call, key in zip(fine, next_keys(journal, (call["tool"] for call in fine)), strict=True):
        call["step"] = key
    return list(calls)


def _checked(tool: Tool, part: Any) -> dict[str, Any]:
    try:
        args = part.args_as_dict(raise_if_invalid=True)
        tool.validated(args)
        # What cannot be kept cannot be shown to whoever is to allow it either.
        if args != storable(args):
            raise ValueError("they contain a NUL character or half a character")
        return {"args": orjson.loads(orjson.dumps(args))}
    except Terminal as error:
        return {"problem": str(error)}
    except (ValueError, TypeError, AssertionError) as error:
        return {"problem": f"The arguments of {tool.name} are not a JSON object: {error}"}


def count(ctx: Context, response: Any, provider: str) -> None:
    """Tokens always; what they cost where the price is known."""
    try:
        usd = float(response.cost().total_price)
    except (LookupError, ValueError, AssertionError):
        usd = 0.0
    ctx.cost(
        usd, provider=response.provider_name or provider, model=response.model_name,
        input_tokens=response.usage.input_tokens, output_tokens=response.usage.output_tokens,
    )  # fmt: skip
