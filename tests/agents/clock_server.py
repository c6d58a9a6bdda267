"""An MCP server to be started: its tool's description is what CLOCK_SAYS says, so that it can change.

Over its standard input and output, or with a port as its argument over HTTP.
"""

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("clock")


@server.tool(
    description=os.environ.get("CLOCK_SAYS", "Tell the time."), annotations=ToolAnnotations(read_only_hint=True)
)
def tell(zone: str) -> dict[str, str]:
    return {"zone": zone, "time": "12:00"}


@server.tool(annotations=ToolAnnotations(destructive_hint=True))
def stop(reason: str) -> str:
    """Stop the clock."""
    raise ToolError(f"cannot: {reason}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    server.run("stdio")
