"""Interlock: durable automations and agents that ask before they act."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from interlock.errors import Retryable, Terminal

if TYPE_CHECKING:
    from interlock.client import ApiError, AsyncClient, Client
    from interlock.flows import EventTimeout, FlowContext, Rejected, StepFailed
    from interlock.tools import Context, DidNotHappen, Happened, Secret, flow, tool

try:
    __version__ = version("interlock")
except PackageNotFoundError:
    __version__ = "0+unknown"

__all__ = [
    "ApiError",
    "AsyncClient",
    "Client",
    "Context",
    "DidNotHappen",
    "EventTimeout",
    "FlowContext",
    "Happened",
    "Rejected",
    "Retryable",
    "Secret",
    "StepFailed",
    "Terminal",
    "__version__",
    "flow",
    "tool",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that a command line that only uses HTTP does not load the engine, and a tool file not the HTTP client.
    if name in ("Context", "DidNotHappen", "Happened", "Secret", "flow", "tool"):
        from interlock import tools

        return getattr(tools, name)
    if name in ("EventTimeout", "FlowContext", "Rejected", "StepFailed"):
        from interlock import flows

        return getattr(flows, name)
    if name in ("ApiError", "AsyncClient", "Client"):
        from interlock import client

        return getattr(client, name)
    raise AttributeError(f"module 'interlock' has no attribute {name!r}")
