"""MCP servers that tests start, and their tools."""

import sys
from copy import deepcopy
from typing import Any

from interlock.tools.mcp import Server, offered
from tests.agents import clock_server, gate_server

CLOCK = Server("clock", (sys.executable, clock_server.__file__), env=("CLOCK_SAYS", "PATH"))
GATE = Server("gate", (sys.executable, gate_server.__file__), env=("PATH", "GATE_STARTS_AT"))

_known: dict[str, Any] = {}


async def tools_of(server: Server) -> Any:
    """Ask the server once for its tools: starting a server takes a second."""
    if server.name not in _known:
        _known[server.name] = await offered(server)
    return deepcopy(_known[server.name])
