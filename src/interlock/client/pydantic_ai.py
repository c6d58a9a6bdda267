"""Interlock's tools for pydantic-ai agents that keep their own loop. Each call passes the gate and has a receipt."""

from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import Any

from pydantic_ai import RunContext
from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.tools import Tool
from pydantic_ai.toolsets import FunctionToolset

from interlock.client.clients import AsyncClient
from interlock.wire import Tool as Offered
from interlock.wire import ToolCall

# How long one request waits on the server before the client asks again.
_WAIT_SECONDS = 60.0


async def interlock_tools(
    client: AsyncClient, *patterns: str, on_pending: Callable[[ToolCall], Awaitable[None]] | None = None
) -> FunctionToolset[Any]:
    """Return the server's tools whose names match, or all without names, as a toolset.

    A call that the policy holds waits until an approver has decided; `on_pending` is called once before that. The same
    call of the same agent run is one tool call, so an agent run that is repeated after a crash repeats no effect.
    """
    wanted = patterns or ("*",)
    offered = [
        tool for tool in (await client.tools()).items if any(fnmatchcase(tool.name, pattern) for pattern in wanted)
    ]
    return FunctionToolset([_tool(client, tool, on_pending) for tool in offered])


def _tool(client: AsyncClient, tool: Offered, on_pending: Callable[[ToolCall], Awaitable[None]] | None) -> Tool[Any]:
    async def call(ctx: RunContext[Any], **args: Any) -> Any:
        key = f"pydantic-ai:{ctx.run_id}:{ctx.tool_call_id}"
        made, told = await client.tool_call(tool.name, args, wait=_WAIT_SECONDS, idempotency_key=key), False
        while made.status in ("pending_approval", "running"):
            if made.status == "pending_approval" and on_pending is not None and not told:
                told = True
                await on_pending(made)
            made = await client.get_tool_call(made.id, wait=_WAIT_SECONDS)
        if made.status == "failed":
            raise ToolFailed(str((made.error or {}).get("message") or made.reason))
        return made.result

    return Tool.from_schema(
        call, name=tool.name.replace(".", "__"), description=tool.description or tool.name,
        json_schema=tool.input_schema, takes_ctx=True,
    )  # fmt: skip
