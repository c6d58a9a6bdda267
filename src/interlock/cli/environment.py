"""The environment: settings, and the tools they name."""

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from interlock.settings import Settings
    from interlock.tools import Registry


def read_settings(**flags: Any) -> "Settings":
    """The environment's settings with the flags that were given; one line for a value that cannot be."""
    from pydantic import ValidationError

    from interlock.settings import Settings

    try:
        settings = Settings()
    except ValidationError as error:
        fault = error.errors()[0]
        name = "_".join(str(part) for part in fault["loc"]).upper()
        raise typer.TyperException(f"INTERLOCK_{name}: {fault['msg']}") from error
    return settings.model_copy(update={name: value for name, value in flags.items() if value is not None})


def tools_here() -> "Registry":
    """The tools that INTERLOCK_TOOLS names, and those of MCP servers, as a worker here would load them."""
    settings = read_settings()
    from interlock.settings import mcp_file
    from interlock.tools import load_tools, registry
    from interlock.tools.mcp import load_mcp

    load_tools(settings.tools)
    load_mcp(mcp_file(settings), registry)
    return registry
