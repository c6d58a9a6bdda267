"""Tools that a request names: one that this server does not have is rejected, with a suggestion."""

from typing import Annotated

from fastapi import Query

from interlock.api.dependencies import AppContext
from interlock.engine.access.principal import Principal
from interlock.errors import NotFound

AllowUnknownTools = Annotated[
    bool, Query(description="Accept tools that this server does not have, because only some workers have them.")
]


def require_known_tool(found: AppContext, who: Principal, name: str, *, allow_unknown: bool) -> None:
    """Raise if the tool is unknown. A server without tools is a valid deployment, and accepts every name."""
    tools = found.policies.tools.of_tenant(who.tenant)
    if tools.find(name) is None and tools.all() and not allow_unknown:
        raise NotFound(tools.missing(name), code="TOOL_NOT_FOUND")
