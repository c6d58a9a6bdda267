"""Tools: what a workflow can do to the world."""

from interlock.tools.context import Canceled, Context, default_key
from interlock.tools.registry import Registry, Tool, explain, load_tools, registry, tool

__all__ = ["Canceled", "Context", "Registry", "Tool", "default_key", "explain", "load_tools", "registry", "tool"]
