"""Names of tools as providers allow them: letters, digits, `_` and `-`, at most 64."""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from interlock.tools import Tool

_ODD = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 64


def wire_name(tool: str) -> str:
    """`shop.refund` is `shop__refund`. The same in every process and for ever: histories have it in them."""
    name = _ODD.sub("_", tool.replace(".", "__"))
    if len(name) <= _LONGEST and name.replace("__", ".") == tool:
        return name
    return f"{name[: _LONGEST - 9]}_{sha256(tool.encode()).hexdigest()[:8]}"


def is_reserved(tool: Tool) -> bool:
    """For the steps of agents with their own loop, which name what they do in its input; see `own_loop`."""
    return tool.name in ("agent.operation", "agent.function")


def by_wire_name(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    return {wire_name(tool.name): tool for tool in tools}
