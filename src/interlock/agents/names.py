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


def by_wire_name(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    return {wire_name(tool.name): tool for tool in tools}
