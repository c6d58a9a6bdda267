"""Interlock as an MCP server: another agent's tools, each call through the gate, and nothing that approves."""

from typing import Any

import orjson
from mcp import types
from mcp.server.lowlevel import Server

from interlock.client.clients import AsyncClient
from interlock.client.errors import ApiError, ClientError
from interlock.wire import Act, Tool

_ID = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "get_result": ("What became of a call that was pending_approval or running, by its id.", _ID),
    "start_run": (
        "Start a run of a workflow, flow or agent.",
        {
            "type": "object",
            "properties": {"workflow": {"type": "string"}, "input": {"type": "object"}},
            "required": ["workflow"],
        },
    ),
    "get_run": ("A run with its steps, by its id.", _ID),
    "list_approvals": ("What waits for people. They decide elsewhere.", {"type": "object", "properties": {}}),
}


def wire_name(tool: str) -> str:
    return tool.replace(".", "__")


class Bridge:
    """The tools of the server at the other end of `client`, as MCP offers them."""

    def __init__(self, client: AsyncClient, wait_seconds: float = 20.0) -> None:
        self._client = client
        self._wait = wait_seconds
        self.server: Server[Any] = Server("interlock", on_list_tools=self._list, on_call_tool=self._call)

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
        try:
            return _result(await self._answer(params.name, params.arguments or {}))
        except ClientError as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)

    async def _answer(self, name: str, given: dict[str, Any]) -> Any:
        match name:
            case "get_result":
                return _act(await self._client.acted(str(given.get("id")), wait=self._wait))
            case "start_run":
                run = await self._client.start(str(given.get("workflow")), given.get("input") or {})
                return run.model_dump(mode="json")
            case "get_run":
                return (await self._client.run(str(given.get("id")))).model_dump(mode="json")
            case "list_approvals":
                return (await self._client.approvals(status="requested")).model_dump(mode="json")
        known = {wire_name(tool.name): tool.name for tool in (await self._client.tools()).items}
        if name not in known:
            raise ApiError(404, "TOOL_NOT_FOUND", "Not found", f"no tool {name}")
        return _act(await self._client.act(known[name], given, wait=self._wait))


def _act(act: Act) -> dict[str, Any]:
    view = act.model_dump(mode="json", exclude_none=True)
    if act.status == "pending_approval":
        view["next"] = "People were asked. Call get_result with this id later; do not call the tool again."
    return view


def _result(view: dict[str, Any]) -> types.CallToolResult:
    text = types.TextContent(type="text", text=orjson.dumps(view).decode())
    return types.CallToolResult(content=[text], structured_content=view, is_error=view.get("status") == "failed")


async def serve(client: AsyncClient) -> None:
    """Over this process's stdin and stdout, until the other side hangs up."""
    from mcp import stdio_server

    bridge = Bridge(client)
    async with client, stdio_server() as (reading, writing):
        await bridge.server.run(reading, writing, bridge.server.create_initialization_options())
