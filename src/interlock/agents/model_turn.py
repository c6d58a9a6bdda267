"""One turn: send the conversation to the model; its text and tool calls are the step's output."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from pydantic import BaseModel

from interlock.agents.tool_names import by_wire_name, is_reserved, wire_name
from interlock.definition.plan import AgentPlan, Plan, Price
from interlock.engine import sessions
from interlock.engine.access.principal import DEFAULT_TENANT
from interlock.engine.policies import tenant_of
from interlock.errors import Retryable, Terminal
from interlock.journal import Journal, next_keys
from interlock.lifecycle import Tier
from interlock.store.pool import Database
from interlock.store.records import ClaimedRun
from interlock.tools import Context, RegisteredTool, Registry

Says = Callable[[str], None]

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class _Nothing(BaseModel):
    pass


async def _unbound(ctx: Context) -> None:
    raise NotImplementedError


# A model call is executed like a read: with the same time-outs, retries and interruptions.
_MODEL = RegisteredTool(
    name="model", function=_unbound, description="", is_async=True, wants_context=True, arguments=_Nothing,
    writes=False, risk=Tier.LOW, idempotent=True, key=None, undo=None, timeout=600.0, target=None, show=frozenset(),
    reconcile=None, input_schema={},
)  # fmt: skip


def model_call(database: Database, tools: Registry, run: ClaimedRun, journal: Journal, says: Says) -> RegisteredTool:
    """Return the run's next model call, for the executor. `says` receives its text while it arrives."""
    plan = journal.plan
    assert plan.agent is not None

    async def ask(ctx: Context) -> dict[str, Any]:
        return await _ask(ctx, database, tools, run, journal, plan, says)

    return replace(_MODEL, function=ask)


async def _ask(
    ctx: Context, database: Database, tools: Registry, run: ClaimedRun, journal: Journal, plan: Plan, says: Says
) -> dict[str, Any]:
    # Imported here, because it takes a second that processes without agents should not spend.
    from pydantic_ai.direct import model_request_stream
    from pydantic_ai.messages import ModelMessagesTypeAdapter
    from pydantic_ai.models import ModelRequestParameters

    from interlock.agents.conversation import conversation
    from interlock.agents.models import model_for

    agent = plan.agent
    assert agent is not None
    if agent.is_elsewhere:
        await _require_operators(database, run)
    before = await sessions.memory(database, run, plan)
    messages = conversation([*before, (sessions.message_of(run), journal)], agent.instructions)
    of_tenant = tools.of_tenant(tenant_of(run)).all()
    offered = [tool for tool in of_tenant if agent.may_use(tool.name) and not is_reserved(tool)]
    parameters = ModelRequestParameters(function_tools=[_offer(tool) for tool in offered])
    model = model_for(agent)
    if agent.limits.cost_usd is not None:
        _require_price(agent, model)
    async with model_request_stream(
        model, messages, model_settings=_settings(agent), model_request_parameters=parameters
    ) as stream:
        async for event in stream:
            if text := _text_in(event):
                says(storable(text))
        response = stream.get()
    if response.state == "incomplete":
        raise Retryable("the model's answer broke off")
    known = count(ctx, response, agent.model.partition(":")[0], agent.price)
    if agent.limits.cost_usd is not None and not known:
        raise Terminal(_without_price(agent, response.model_name or agent.model))
    [kept] = ModelMessagesTypeAdapter.dump_python([response], mode="json")
    refusal = (response.provider_details or {}).get("refusal")
    answer: dict[str, Any] = storable({
        "text": response.text or refusal or "", **_ending(response, refusal),
        "calls": _calls(response, offered, journal), "response": kept,
        "usage": {"input_tokens": response.usage.input_tokens, "output_tokens": response.usage.output_tokens},
        "model": response.model_name,
    })  # fmt: skip
    return answer


def storable(said: Any) -> Any:
    """Replace the characters of a model's answer that PostgreSQL cannot store: NUL and unpaired surrogates."""
    match said:
        case str():
            return _UNSTORABLE.sub("\ufffd", said)
        case dict():
            return {storable(name): storable(member) for name, member in said.items()}
        case list():
            return [storable(item) for item in said]
        case _:
            return said


async def _require_operators(database: Database, run: ClaimedRun) -> None:
    """Raise Terminal if the tenant may not use `base_url` or `api_key_env`.

    The agent may be older than this check on apply.
    """
    operators = await database.row("tenant_named", DEFAULT_TENANT)
    if operators is None or operators["id"] != run.tenant_id:
        raise Terminal(f"base_url and api_key_env are for agents of tenant {DEFAULT_TENANT}, which has the workers")


def _settings(agent: AgentPlan) -> Any:
    return dict(agent.settings) or None


def _offer(tool: RegisteredTool) -> Any:
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


def _calls(response: Any, offered: Sequence[RegisteredTool], journal: Journal) -> list[Mapping[str, Any]]:
    """Return the model's tool calls, each with the step that executes it, or with its problem.

    This is decided once and stored, so that a call means the same to a later worker with other tools.
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


def _checked(tool: RegisteredTool, part: Any) -> dict[str, Any]:
    try:
        args = part.args_as_dict(raise_if_invalid=True)
        tool.validated(args)
        # Arguments that cannot be stored cannot be shown to an approver either.
        if args != storable(args):
            raise ValueError("arguments contain a NUL character or an unpaired surrogate")
        return {"args": orjson.loads(orjson.dumps(args))}
    except Terminal as error:
        return {"problem": str(error)}
    except (ValueError, TypeError, AssertionError) as error:
        return {"problem": f"The arguments of {tool.name} are not a JSON object: {error}"}


def _ending(response: Any, refusal: str | None) -> dict[str, str]:
    """Return how an incomplete answer ended: cut at its length, filtered, or refused."""
    reason = response.finish_reason
    ending = {} if reason in (None, "stop", "tool_call") else {"finish_reason": reason}
    return ending | ({"refusal": refusal} if refusal else {})


def _require_price(agent: AgentPlan, model: Any) -> None:
    """Reject a limit that cannot be enforced before calling the model."""
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.usage import RequestUsage

    usage = RequestUsage(input_tokens=1, output_tokens=1)
    response = ModelResponse(
        parts=[], usage=usage, model_name=model.model_name, provider_name=model.system, provider_url=model.base_url
    )
    if _usd(response, agent.price) is None:
        raise Terminal(_without_price(agent, agent.model))


def _without_price(agent: AgentPlan, model: str) -> str:
    return (
        f"The price of {model} is not known, so limits.cost_usd of {agent.limits.cost_usd:g} cannot be enforced. Give "
        "the agent its price, such as `price: {input: 3.00, output: 15.00}` in USD for a million tokens."
    )


def _usd(response: Any, price: Price | None) -> float | None:
    usage = response.usage
    if price is not None:
        return price.usd(usage.input_tokens, usage.output_tokens)
    try:
        return float(response.cost().total_price)
    except (LookupError, ValueError, AssertionError):
        return None


def count(ctx: Context, response: Any, provider: str, price: Price | None = None) -> bool:
    """Report the tokens and their cost. Return whether the cost is known."""
    usd = _usd(response, price)
    ctx.cost(
        usd or 0.0, provider=response.provider_name or provider, model=response.model_name,
        input_tokens=response.usage.input_tokens, output_tokens=response.usage.output_tokens,
    )  # fmt: skip
    return usd is not None
