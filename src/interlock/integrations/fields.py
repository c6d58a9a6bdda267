"""The fields of an action as lines of a Slack card, and whether all of them fit."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from interlock.slack_markup import cut, entities
from interlock.visible import visible_json

# Slack takes 3,000 characters in a section, and about 13,000 in all blocks of a message.
_BLOCK, _MOST_BLOCKS = 2700, 2
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FieldBlocks:
    """Escaped lines, in blocks that each fit a section. `whole`: no line was cut or left out."""

    blocks: list[list[str]]
    whole: bool


def field_blocks(fields: dict[str, Any], proposed: dict[str, Any] | None) -> FieldBlocks:
    lines = list(_lines(fields, proposed)) or ["no fields"]
    whole = all(len(line) <= _BLOCK for line in lines)
    blocks: list[list[str]] = [[]]
    room = _BLOCK
    for number, line in enumerate(lines):
        line = cut(line, _BLOCK)
        if len(line) + 1 > room:
            if len(blocks) == _MOST_BLOCKS:
                blocks.append([f"… and {len(lines) - number} more lines"])
                return FieldBlocks(blocks, whole=False)
            blocks.append([])
            room = _BLOCK
        blocks[-1].append(line)
        room -= len(line) + 1
    return FieldBlocks([block for block in blocks if block], whole)


def _lines(after: dict[str, Any], proposed: dict[str, Any] | None) -> Iterator[str]:
    """Yield the fields as lines.

    `+` marks a requested value, `-` the value before a person changed it, a blank an unchanged value.
    """
    before = proposed or {}
    for name in [*after, *(name for name in before if name not in after)]:
        if name in after and name in before and after[name] == before[name]:
            yield _line(" ", name, after[name])
            continue
        if name in before:
            yield _line("-", name, before[name])
        if name in after:
            yield _line("+", name, after[name])


def _line(mark: str, name: str, value: Any) -> str:
    """Return one line for any name and value.

    A name that is not plain ASCII is quoted and escaped, so that it cannot imitate another one.
    """
    named = name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)
    # Three backticks would end Slack's code block, so write them as JSON escapes.
    return entities(f"{mark} {named}: {visible_json(value)}".replace("```", "\\u0060" * 3))
