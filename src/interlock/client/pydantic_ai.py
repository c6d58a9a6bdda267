"""For pydantic-ai agents that keep their own loop: Interlock's tools, each call through the gate and with a receipt."""

from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import Any

from pydantic_ai import RunContext
from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.tools import Tool
from pydantic_ai.toolsets import FunctionToolset

from interlock.client.clients import AsyncClient
from interlock.wire import Act
from interlock.wire import Tool as Offered

# How long one request waits on the server; the call goes on asking.
_ASK_SECONDS = 30.0


async def interlock_tools(
    client: AsyncClient, *patterns: str, on_pending: Callable[[Act], Awaitable[None]] | None = None
) -> FunctionToolset[Any]:
    """The tools of the server whose names match (all of them if none is given), as a toolset.

    A call that policy holds waits for people, however long that takes; `on_pending` is told of it once. The same call
    of the same run is the same act, so that a run that is repeated after a crash repeats no effect.
    """
    wanted = patterns or ("*",)
    offered = [
        tool for tool in (await client.tools()).items if any(fnmatchcase(tool.name, pattern) for pattern in wanted)
    ]
    return FunctionToolset([_tool(client, tool, on_pending) for tool in offered])


def _tool(client: AsyncClient, tool: Offered, on_pending: Callable[[Act], Awaitable[None]] | None) -> Tool[Any]:
    async def call(ctx: RunContext[Any], **args: Any) -> Any:
        key = f"pydantic-ai:{ctx.run_id}:{ctx.tool_call_id}"
        act, told = await client.act(tool.name, args, wait=_ASK_SECONDS, idempotency_key=key), False
        while act.status in ("pending_approval", "running"):
            if act.status == "pending_approval" and on_pending is not None and not told:
                told = True
                await on_pending(act)
            act = await client.acted(act.id, wait=_ASK_SECONDS)
        if act.status == "failed":
            raise ToolFailed(str((act.error or {}).get("message") or act.reason))
        return act.result

    return Tool.from_schema(
        call, name=tool.name.replace(".", "__"), description=tool.description or tool.name,
        json_schema=tool.input_schema, takes_ctx=True,
    )  # fmt: skip
