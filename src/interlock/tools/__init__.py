"""Tools: what a workflow can do to the world."""

from interlock.tools.context import Canceled, Context, default_key
from interlock.tools.registry import DidNotHappen, Happened, Registry, Tool, explain, flow, load_tools, registry, tool
from interlock.tools.secret import Secret, Veil, as_shown

__all__ = [
    "Canceled",
    "Context",
    "DidNotHappen",
    "Happened",
    "Registry",
    "Secret",
    "Tool",
    "Veil",
    "as_shown",
    "default_key",
    "explain",
    "flow",
    "load_tools",
    "registry",
    "tool",
]
