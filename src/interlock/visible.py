"""Text from strangers, with every invisible character replaced by its escape sequence.

An approver decides on what they read. Control characters repaint a terminal, bidi characters reverse a line, and
zero-width characters hide in a name. Slack cards, the console, the CLI and evidence all show foreign text through
this module.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

# Characters that Python calls printable but that a screen does not show: Unicode's Default_Ignorable_Code_Point
# outside the categories that `str.isprintable` refuses, and two blanks.
_BLANK = frozenset(
    map(
        chr,
        (
            0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164, 0xFFA0,
            *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0),
        ),
    )
)  # fmt: skip
# More marks than this on one letter are decoration that can cover the lines around it.
_MOST_MARKS = 2


def visible_text(text: str, *, keep_newlines: bool = False) -> str:
    r"""Return the text with invisible characters as `\x1b`, `\u202e` and the like; a newline as `\n` unless kept."""
    shown = _escaped(text, lambda c: c.encode("unicode_escape").decode())
    return "".join(c if c == "\n" and keep_newlines else piece for c, piece in shown)


def visible_json(value: Any) -> str:
    """Return the value as one line of JSON without invisible characters. `json.loads` gives the same value back."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "".join(piece for _, piece in _escaped(text, lambda c: json.dumps(c)[1:-1]))


def is_visible(text: str) -> bool:
    """Return whether the text has no character that would have to be escaped."""
    return visible_text(text) == text


def _escaped(text: str, escape: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    marks = _MOST_MARKS  # a mark at the very start would change the character before the text
    for c in text:
        is_mark = unicodedata.category(c) in ("Mn", "Me")
        marks = marks + 1 if is_mark else 0
        yield c, c if c.isprintable() and c not in _BLANK and marks <= _MOST_MARKS else escape(c)
