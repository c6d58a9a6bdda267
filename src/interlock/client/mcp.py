"""Interlock as an MCP server: tools for another agent. Each call passes the gate, and no tool can approve anything."""

import asyncio
from contextlib import suppress
from typing import Any
from uuid import uuid4

import orjson
from mcp import MCPError, types
from mcp.server.lowlevel import Server

from interlock.client.clients import AsyncClient
from interlock.client.errors import ApiError, ClientError
from interlock.wire import Tool, ToolCall


def _takes(*required: str, **properties: str) -> dict[str, Any]:
    """Return the flat schema of one of our own tools: the type of each argument by its name."""
    return {
        "type": "object", "properties": {name: {"type": type_} for name, type_ in properties.items()},
        "required": list(required), "additionalProperties": False,
    }  # fmt: skip


_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "get_result": (
        "Return the result of a call that was pending_approval or running, by its id. Waits for it for a while.",
        _takes("id", id="string"),
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
    """The tools of the server behind `client`, offered over MCP."""

    def __init__(self, client: AsyncClient, version: str, wait_seconds: float = 20.0) -> None:
        self._client = client
        self._wait = wait_seconds
        self._canceling: set[asyncio.Task[None]] = set()
        self.server: Server[Any] = Server(
            "interlock", version=version, on_list_tools=self._list, on_call_tool=self._call
        )

    async def _list(self, _: Any, __: Any) -> types.ListToolsResult:
        try:
            offered = (await self._client.tools()).items
        except ClientError as error:  # the library logs every other exception with its traceback
            raise MCPError(types.INTERNAL_ERROR, str(error)) from None
        tools = [self._offer(tool) for tool in offered]
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
                return _view(await self._client.get_tool_call(given["id"], wait=self._wait))
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
        return _view(await self._call_tool(known[name], given))

    async def _call_tool(self, tool: str, given: dict[str, Any]) -> ToolCall:
        key = str(uuid4())
        try:
            return await self._client.tool_call(tool, given, wait=self._wait, idempotency_key=key)
        except asyncio.CancelledError:
            # In a separate task, because this canceled task must not await anything.
            cancel = asyncio.create_task(self._cancel(tool, given, key))
            self._canceling.add(cancel)
            cancel.add_done_callback(self._canceling.discard)
            raise

    async def _cancel(self, tool: str, given: dict[str, Any], key: str) -> None:
        """Cancel the call that was made with `key`. The same request with the same key returns its id."""
        with suppress(ClientError):  # the call may have ended by itself
            made = await self._client.tool_call(tool, given, wait=0, idempotency_key=key)
            if made.status in ("pending_approval", "running"):
                await self._client.cancel_tool_call(made.id, reason="the MCP client canceled the call")

    async def close(self) -> None:
        """Wait until the server has canceled the calls that the MCP client canceled."""
        await asyncio.gather(*self._canceling)


def _unfit(name: str, given: dict[str, Any]) -> str | None:
    """Return what is wrong with the arguments of one of our own tools and what it takes, or None.

    MCP does not check this.
    """
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


def _view(call: ToolCall) -> dict[str, Any]:
    view = call.model_dump(mode="json", exclude_none=True)
    if call.status == "pending_approval":
        view["next"] = "An approver has to decide. Call get_result with this id later; do not call the tool again."
    return view


def _result(view: dict[str, Any]) -> types.CallToolResult:
    text = types.TextContent(type="text", text=orjson.dumps(view).decode())
    return types.CallToolResult(content=[text], structured_content=view, is_error=view.get("status") == "failed")


def _failed(why: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=why)], is_error=True)


async def serve(client: AsyncClient, version: str) -> None:
    """Serve over this process's stdin and stdout until the client closes them."""
    from mcp import stdio_server

    bridge = Bridge(client, version)
    async with client, stdio_server() as (reading, writing):
        try:
            await bridge.server.run(reading, writing, bridge.server.create_initialization_options())
        finally:
            await bridge.close()
