"""An MCP server for tests: one tool waits until a writer closes its gate, a named pipe; others answer badly.

With GATE_STARTS_AT the server waits for such a gate before its first answer.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import INVALID_PARAMS, AudioContent, CallToolResult, ImageContent, TextContent, ToolAnnotations
from pydantic import BaseModel, ConfigDict

server = MCPServer("gate")


class Report(BaseModel):
    """Its schema asks for a field that the server itself does without."""

    model_config = ConfigDict(json_schema_extra={"required": ["rows"]})
    rows: int = 0


@server.tool()
async def wait(gate: str) -> str:
    return await asyncio.to_thread(Path(gate).read_text)


@server.tool()
def refuse(code: int = INVALID_PARAMS) -> None:
    """By the protocol, and not by what it returns."""
    raise MCPError(code, "not like this")


@server.tool()
def fail(why: str) -> str:
    raise ToolError(why)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def misfit() -> Annotated[CallToolResult, Report]:
    """Its answer does not fit its schema."""
    return CallToolResult(content=[TextContent(type="text", text="done")], structured_content={})


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def draw(image: str, audio: str) -> Any:
    return CallToolResult(
        content=[
            TextContent(type="text", text="a chart"),
            ImageContent(type="image", data=image, mime_type="image/png"),
            AudioContent(type="audio", data=audio, mime_type="audio/wav"),
        ]
    )


if __name__ == "__main__":
    if "GATE_STARTS_AT" in os.environ:
        Path(os.environ["GATE_STARTS_AT"]).read_text()
    server.run("stdio")
