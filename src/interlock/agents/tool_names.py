"""Names of tools as providers allow them: letters, digits, `_` and `-`, at most 64."""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from interlock.tools import RegisteredTool

_ODD = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 64


def wire_name(tool: str) -> str:
    """Return the provider's name of a tool: `shop.refund` is `shop__refund`.

    It must never change, because stored histories contain it.
    """
    name = _ODD.sub("_", tool.replace(".", "__"))
    if len(name) <= _LONGEST and name.replace("__", ".") == tool:
        return name
    return f"{name[: _LONGEST - 9]}_{sha256(tool.encode()).hexdigest()[:8]}"


def is_reserved(tool: RegisteredTool) -> bool:
    """Return True for the tools of agents with their own loop, see `pydantic_ai_durability`."""
    return tool.name in ("agent.operation", "agent.function")


def by_wire_name(tools: Iterable[RegisteredTool]) -> Mapping[str, RegisteredTool]:
    return {wire_name(tool.name): tool for tool in tools}
