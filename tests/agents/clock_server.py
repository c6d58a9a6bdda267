"""An MCP server for tests: CLOCK_SAYS is its tool's description, so that tests can change it.

It serves its standard input and output, or HTTP if it gets a port as its argument.
"""

import os
import sys
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from starlette.responses import PlainTextResponse

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


def guarded(app: Any) -> Any:
    """Require the token CLOCK_TOKEN, if it is set."""
    wanted = f"Bearer {os.environ['CLOCK_TOKEN']}".encode() if "CLOCK_TOKEN" in os.environ else None

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and wanted and dict(scope["headers"]).get(b"authorization") != wanted:
            await PlainTextResponse("who are you?", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guard


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvicorn.run(guarded(server.streamable_http_app()), port=int(sys.argv[1]), log_level="critical")
    else:
        server.run("stdio")
