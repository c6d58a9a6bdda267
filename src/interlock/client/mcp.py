"""Interlock as an MCP server: another agent's tools, each call through the gate, and nothing that approves."""

from typing import Any

import orjson
from mcp import types
from mcp.server.lowlevel import Server

from interlock.client.clients import AsyncClient
from interlock.client.errors import ApiError, ClientError
from interlock.wire import Act, Tool


def _takes(*required: str, **properties: str) -> dict[str, Any]:
    """A schema of ours, flat: each argument's type by its name."""
    return {
        "type": "object", "properties": {name: {"type": type_} for name, type_ in properties.items()},
        "required": list(required), "additionalProperties": False,
    }  # fmt: skip


_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "get_result": (
        "What became of a call that was pending_approval or running, by its id.", _takes("id", id="string"),
    ),
    "start_run": (
        "Start a run of a workflow, flow or agent.", _takes("workflow", workflow="string", input="object"),
    ),
    "get_run": ("A run with its steps, by its id.", _takes("id", id="string")),
    "list_approvals": ("What waits for people. They decide elsewhere.", _takes()),
}  # fmt: skip
_TYPES: dict[str, type] = {"string": str, "object": dict}


def wire_name(tool: str) -> str:
    return tool.replace(".", "__")


class Bridge:
    """The tools of the server at the other end of `client`, as MCP offers them."""

    def __init__(self, client: AsyncClient, version: str, wait_seconds: float = 20.0) -> None:
        self._client = client
        self._wait = wait_seconds
        self.server: Server[Any] = Server(
            "interlock", version=version, on_list_tools=self._list, on_call_tool=self._call
        )

    async def _list(self, _: Any, __: Any) -> types.ListToolsResult:
        tools = [self._offer(tool) for tool in (await self._client.tools()).items]
        tools += [types.Tool(name=name, description=says, input_schema=takes) for name, (says, takes) in _OWN.items()]
        return types.ListToolsResult(tools=tools)

    def _offer(self, tool: Tool) -> types.Tool:
        held = " Policy may hold it for people: then it answers pending_approval." if tool.writes else ""
        hints = types.ToolAnnotations(read_only_hint=not tool.writes, idempotent_hint=tool.idempotent)
        return types.Tool(
            name=wire_name(tool.name), description=tool.description + held, input_schema=tool.input_schema,
            annotations=hints,
        )  # fmt: skip

    async def _call(self, ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        given = params.arguments or {}
        if params.name in _OWN and (unfit := _unfit(params.name, given)):
            return _failed(unfit)
        try:
            return _result(await self._answer(params.name, given))
        except ClientError as error:
            return _failed(str(error))

    async def _answer(self, name: str, given: dict[str, Any]) -> Any:
        match name:
            case "get_result":
                return _act(await self._client.acted(given["id"], wait=self._wait))
            case "start_run":
                run = await self._client.start(given["workflow"], given.get("input") or {})
                return run.model_dump(mode="json")
            case "get_run":
                return (await self._client.run(given["id"])).model_dump(mode="json")
            case "list_approvals":
                return (await self._client.approvals(status="requested")).model_dump(mode="json")
        known = {wire_name(tool.name): tool.name for tool in (await self._client.tools()).items}
        if name not in known:
            raise ApiError(404, "TOOL_NOT_FOUND", "Not found", f"no tool {name}")
        return _act(await self._client.act(known[name], given, wait=self._wait))


def _unfit(name: str, given: dict[str, Any]) -> str | None:
    """What is wrong with the arguments of a tool of ours, and what would be right; the protocol leaves that to us."""
    schema = _OWN[name][1]
    properties, required = schema["properties"], schema["required"]
    faults = [f"there is no argument {key!r}" for key in given if key not in properties]
    faults += [f"{key!r} is missing" for key in required if key not in given]
    for key, about in properties.items():
        if key in given and not isinstance(given[key], _TYPES[about["type"]]):
            faults.append(f"{key!r} is not of type {about['type']}")
        elif key in required and given.get(key) == "":
            faults.append(f"{key!r} is empty")
    if not faults:
        return None
    takes = [f"{key} ({about['type']}{'' if key in required else ', optional'})" for key, about in properties.items()]
    return f"{name} was not called: {'; '.join(faults)}. It takes {', '.join(takes) or 'no arguments'}."


def _act(act: Act) -> dict[str, Any]:
    view = act.model_dump(mode="json", exclude_none=True)
    if act.status == "pending_approval":
        view["next"] = "People were asked. Call get_result with this id later; do not call the tool again."
    return view


def _result(view: dict[str, Any]) -> types.CallToolResult:
    text = types.TextContent(type="text", text=orjson.dumps(view).decode())
    return types.CallToolResult(content=[text], structured_content=view, is_error=view.get("status") == "failed")


def _failed(why: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=why)], is_error=True)


async def serve(client: AsyncClient, version: str) -> None:
    """Over this process's stdin and stdout, until the other side hangs up."""
    from mcp import stdio_server

    bridge = Bridge(client, version)
    async with client, stdio_server() as (reading, writing):
        await bridge.server.run(reading, writing, bridge.server.create_initialization_options())
