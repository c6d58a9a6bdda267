"""The environment: settings, and the tools they name."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from interlock.cli.parsing import one_line

if TYPE_CHECKING:
    from interlock.definition import Plan
    from interlock.definition.diagnostics import Faults
    from interlock.settings import Settings
    from interlock.tools import Registry


# Variables that the server does not read: those of the client and of this command line, and names that users choose.
_CLIENT = frozenset({"INTERLOCK_URL", "INTERLOCK_API_KEY", "INTERLOCK_TRACEBACK"})
_CHOSEN = ("INTERLOCK_SECRET_", "INTERLOCK_MODEL_KEY_")


def refuse_unknown_variables() -> None:
    """Fail if an INTERLOCK_ variable is set that no part of Interlock reads: it is most likely misspelt."""
    given = [name for name in os.environ if name.startswith("INTERLOCK_") and name not in _CLIENT]
    if not given:
        return
    from interlock.settings import Settings, variable_of
    from interlock.wire.validation_errors import suggestion

    known = _CLIENT | {variable_of(name) for name in Settings.model_fields}
    for name in sorted(given):
        if name not in known and not name.startswith(_CHOSEN):
            says = f"{one_line(name)} is not a variable of Interlock{suggestion(name, sorted(known))}"
            raise typer.TyperException(says if says.endswith("?") else f"{says}. Remove it from the environment.")


def read_settings(**flags: Any) -> "Settings":
    """Return the environment's settings with the given flags. Prints one line for an invalid value."""
    from pydantic import ValidationError

    from interlock.settings import Settings
    from interlock.wire.validation_errors import wrong

    try:
        settings = Settings()
    except ValidationError as error:
        fault = error.errors()[0]
        name = "_".join(str(part) for part in fault["loc"]).upper()
        variable = f"INTERLOCK_{name.removeprefix('INTERLOCK_')}"
        raise typer.TyperException(f"{variable}: {wrong(fault)}") from error
    return settings.model_copy(update={name: value for name, value in flags.items() if value is not None})


def tools_here() -> "Registry":
    """Return the tools of INTERLOCK_TOOLS and of MCP servers, as a worker here would load them."""
    settings = read_settings()
    from interlock.settings import mcp_file
    from interlock.tools import load_tools, registry
    from interlock.tools.mcp import load_mcp

    load_tools(settings.tools)
    load_mcp(mcp_file(settings), registry)
    return registry


def tools_to_check_against() -> "Callable[[Plan, Faults], None] | None":
    """Return a check of definitions against the tools here, or None without any tools."""
    from interlock.tools.fit import fits

    return fits(tools_here())
