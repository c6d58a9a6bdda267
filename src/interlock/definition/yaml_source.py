"""The YAML text of a workflow's source, and the difference between two texts.

A source is stored as JSON, whose keys have lost their order. Both functions take long for a long text: see `compute`.
"""

from collections.abc import Mapping
from difflib import unified_diff
from typing import Any

import orjson
import yaml

_TOP = ("name", "description", "flow", "on_reject", "timeout", "caps", "steps")
_STEP = (
    "id", "tool", "approval", "wait", "flow", "needs", "when", "input", "retry", "timeout", "on_timeout", "compensate",
)  # fmt: skip
_PARTS = {
    "approval": ("tier", "two_person", "expires_in", "summary"),
    "wait": ("event", "correlation", "duration", "timeout"),
    "retry": ("max_attempts", "base_delay", "max_delay", "backoff"),
    "compensate": ("tool", "input", "retry", "timeout"),
}


def as_yaml(stored: str, in_blocks: bool = False) -> str:
    """Return a stored source as YAML, with the keys in the usual order.

    With `in_blocks` each value has its own line, so that a comparison shows only what changed.
    """
    source: Mapping[str, Any] = orjson.loads(stored)
    ordered = _ordered(source, _TOP)
    if isinstance(ordered.get("steps"), list):
        ordered["steps"] = [_step(step) for step in ordered["steps"]]
    text: str = yaml.safe_dump(
        ordered, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False if in_blocks else None
    )
    return text


def _step(step: Any) -> Any:
    if not isinstance(step, Mapping):
        return step
    ordered = _ordered(step, _STEP)
    for part, keys in _PARTS.items():
        if isinstance(ordered.get(part), Mapping):
            ordered[part] = _ordered(ordered[part], keys)
    return ordered


def _ordered(value: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    known = {key: value[key] for key in keys if key in value}
    return known | {key: value[key] for key in value if key not in known}


def difference(before: str, after: str, before_label: str = "", after_label: str = "") -> list[str]:
    """Return the lines of a unified diff."""
    lines = before.splitlines(), after.splitlines()
    return list(unified_diff(*lines, before_label, after_label, lineterm="", n=3))
