"""An MCP server to be started: one tool waits until its gate, a named pipe, is closed again; one call is refused."""

import asyncio
from pathlib import Path

from mcp import MCPError
from mcp.server import MCPServer
from mcp.types import INVALID_PARAMS

server = MCPServer("gate")


@server.tool()
async def wait(gate: str) -> str:
    return await asyncio.to_thread(Path(gate).read_text)


@server.tool()
def refuse(code: int = INVALID_PARAMS) -> None:
    """By the protocol, and not by what it returns."""
    raise MCPError(code, "not like this")


if __name__ == "__main__":
    server.run("stdio")
