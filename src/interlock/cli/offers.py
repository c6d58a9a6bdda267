"""What an MCP server offers now beside what was accepted, for the person who has to say yes to it."""

import json
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from typing import Any

from rich.text import Text

from interlock.cli.text import visible

_NOTHING: Mapping[str, Any] = {"description": "", "input_schema": {}, "hints": {}}
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def changes_of(accepted: Mapping[str, Any] | None, offered: Mapping[str, Any]) -> dict[str, Any]:
    """What differs, by name; nothing if nothing does. A tool that is new differs in all it says.

    Of the same parts that the digest is made of: what is compared before a call is what is shown here.
    """
    before = accepted or _NOTHING
    found: dict[str, Any] = {}
    if before["description"] != offered["description"]:
        found["description"] = {"was": before["description"], "now": offered["description"]}
    for name, part in (("input_schema", "input_schema"), ("annotations", "hints")):
        if difference := _difference(before[part], offered[part]):
            found[name] = difference
    return found


def _difference(before: Any, now: Any) -> str:
    return "\n".join(unified_diff(_pretty(before), _pretty(now), "accepted", "offered", lineterm=""))


def _pretty(value: Any) -> list[str]:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).split("\n")


def changes_text(name: str, news: str, changes: Mapping[str, Any]) -> Text:
    """Every line of theirs stands behind a mark of ours: what a server says cannot look like what we say."""
    return Text("\n").join([Text(f"{visible(name)} is {news}", style="bold yellow"), *_lines(changes)])


def _lines(changes: Mapping[str, Any]) -> Iterator[Text]:
    for part, change in changes.items():
        yield Text(f"  {part}")
        if part == "description":
            yield from _said("was", change["was"], "red")
            yield from _said("now", change["now"], "green")
            continue
        for line in visible(change).split("\n"):
            yield Text(f"    {line}", style=_STYLES.get(line[:1], "dim"))


def _said(when: str, text: str, style: str) -> Iterator[Text]:
    for line in visible(text).split("\n") if text else ():
        yield Text(f"    {when}  {line}", style=style)
