"""Tools: the functions that workflows, flows and agents can call."""

from interlock.tools.context import Canceled, Context, default_key
from interlock.tools.registry import (
    DidNotHappen,
    Happened,
    RegisteredTool,
    Registry,
    flow,
    load_tools,
    registry,
    tool,
)
from interlock.tools.secret import Secret, Veil, as_shown

__all__ = [
    "Canceled",
    "Context",
    "DidNotHappen",
    "Happened",
    "RegisteredTool",
    "Registry",
    "Secret",
    "Veil",
    "as_shown",
    "default_key",
    "flow",
    "load_tools",
    "registry",
    "tool",
]
