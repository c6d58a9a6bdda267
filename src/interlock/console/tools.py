"""Tools: the available tools, the risk of each, and the policy's decision about it."""

from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import decode_cursor, encode_cursor
from interlock.console.diff import cut
from interlock.console.filters import pretty
from interlock.console.rendering import Visit, render
from interlock.errors import NotFound
from interlock.policy.policy import CompiledPolicy, Decision
from interlock.policy.roles import Permission
from interlock.tools import RegisteredTool

router = APIRouter()

_PAGE = 60
_PARAMETERS = 60
# What a rule depends on, in words for users.
_DEPENDS = {
    "input": "its input", "target": "its target", "role": "who asks", "tenant": "who asks", "principal": "who asks",
    "hour": "the time", "weekday": "the time", "workflow": "the workflow", "step": "the step",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the policy in force would generally decide, and what that depends on."""

    answer: str
    decision: Decision | None = None
    depends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str
    required: bool
    # As JSON.
    default: str
    description: str
    secret: bool


@router.get("/tools")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    found, text = visit.services.policies, (request.query_params.get("q") or "").strip()
    after = decode_cursor(request.query_params.get("cursor"))
    policy = await found.current(visit.who.tenant_id)
    tools = found.tools.of_tenant(visit.who.tenant).all()
    fitting = [tool for tool in tools if _fits(tool, text) and (after is None or tool.name > after)]
    shown = fitting[:_PAGE]
    return await render(
        request, visit, "tools.html", tools=[(tool, outlook(policy, tool)) for tool in shown],
        flows=found.tools.flows.all()[:_PAGE] if after is None and not text else [], text=text, first=after is None,
        next=encode_cursor(shown[-1].name) if len(fitting) > _PAGE else None,
    )  # fmt: skip


@router.get("/tools/{name}")
async def show(name: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    found = visit.services.policies
    tools = found.tools.of_tenant(visit.who.tenant)
    if (tool := tools.find(name)) is None:
        raise NotFound(tools.missing(name), code="TOOL_NOT_FOUND")
    policy = await found.current(visit.who.tenant_id)
    parameters = _parameters(tool)
    return await render(
        request, visit, "tool.html", tool=tool, outlook=outlook(policy, tool), parameters=parameters[:_PARAMETERS],
        more=max(0, len(parameters) - _PARAMETERS), schema=cut(pretty(tool.input_schema)),
    )  # fmt: skip


def _fits(tool: RegisteredTool, text: str) -> bool:
    return text.lower() in f"{tool.name} {tool.description}".lower()


def outlook(policy: CompiledPolicy, tool: RegisteredTool) -> Outlook:
    if policy.always_allows(tool.name):
        return Outlook("allow")
    found = policy.outlook(tool.name)
    if found is None:
        return Outlook("deny")
    decision, looked_at = found
    depends = tuple(dict.fromkeys(_DEPENDS[name] for name in _DEPENDS if name in looked_at))
    return Outlook(decision.answer, decision, depends)


def _parameters(tool: RegisteredTool) -> list[Parameter]:
    schema = tool.input_schema
    required, definitions = schema.get("required", []), schema.get("$defs", {})
    return [
        Parameter(
            name, _kind(about, definitions), name in required, _json(about.get("default")),
            about.get("description", ""), name in tool.secret,
        )
        for name, about in schema.get("properties", {}).items()
    ]  # fmt: skip


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _kind(about: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return a schema in a word or two; the page shows the full schema below."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return _kind(definitions[name], {}) if "enum" in definitions.get(name, {}) else name
    if "enum" in about:
        return " or ".join(str(value) for value in about["enum"][:8])
    if "anyOf" in about:
        return " or ".join(_kind(one, definitions) for one in about["anyOf"][:6])
    if about.get("type") == "array":
        return f"list of {_kind(about.get('items', {}), definitions)}"
    return str(about.get("format") or about.get("type") or "anything")
