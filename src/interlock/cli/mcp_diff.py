"""The differences between what an MCP server offers now and what was accepted, for the approver of the change."""

import json
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from typing import Any

from rich.text import Text

from interlock.cli.parsing import visible

_TEXTS = ("title", "description")
# The name of each part in the digest, by its name for users.
_SCHEMAS = {"input_schema": "input_schema", "output_schema": "output_schema", "annotations": "hints"}
_NOTHING: Mapping[str, Any] = {**dict.fromkeys(_TEXTS, ""), **{part: {} for part in _SCHEMAS.values()}}
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def changes_of(accepted: Mapping[str, Any] | None, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences by name, or an empty mapping. A new tool differs in every part.

    It compares the same parts that the digest covers, so it shows exactly what is checked before a call.
    """
    before = accepted or _NOTHING
    found: dict[str, Any] = {}
    for name in _TEXTS:
        if before[name] != offered[name]:
            found[name] = {"was": before[name], "now": offered[name]}
    for name, part in _SCHEMAS.items():
        if difference := _difference(before[part], offered[part]):
            found[name] = difference
    return found


def _difference(before: Any, now: Any) -> str:
    return "\n".join(unified_diff(_pretty(before), _pretty(now), "accepted", "offered", lineterm=""))


def _pretty(value: Any) -> list[str]:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).split("\n")


def changes_text(name: str, news: str, changes: Mapping[str, Any]) -> Text:
    """Return the changes as text.

    Every line of the server's text has our mark, so that it cannot imitate our output.
    """
    return Text("\n").join([Text(f"{visible(name)} is {news}", style="bold yellow"), *_lines(changes)])


def _lines(changes: Mapping[str, Any]) -> Iterator[Text]:
    for part, change in changes.items():
        yield Text(f"  {part}")
        if part in _TEXTS:
            yield from _said("was", change["was"], "red")
            yield from _said("now", change["now"], "green")
            continue
        for line in visible(change).split("\n"):
            yield Text(f"    {line}", style=_STYLES.get(line[:1], "dim"))


def _said(when: str, text: str, style: str) -> Iterator[Text]:
    for line in visible(text).split("\n") if text else ():
        yield Text(f"    {when}  {line}", style=style)
