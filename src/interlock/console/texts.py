"""Texts: as much of a long one as a page can carry, and what differs between two."""

from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice

from markupsafe import escape

_MOST = 24_000
_MOST_LINES = 800


@dataclass(frozen=True, slots=True)
class Cut:
    text: str
    # Characters that were left out.
    left: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a comparison: added, removed, the same, or where it is."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    lines: list[Line]
    added: int
    removed: int
    is_cut: bool


def cut(text: str, most: int = _MOST) -> Cut:
    """Measured as it is sent: a quotation mark takes five places."""
    kept = text
    while (length := len(escape(kept))) > most:
        kept = kept[: int(len(kept) * most / length * 0.98)]
    return Cut(kept, len(text) - len(kept))


def compare(before: str, after: str) -> Comparison:
    found = unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=3)
    lines = [_line(text) for text in islice(found, 2, None)]  # behind the two lines that name the files
    shown: list[Line] = []
    room = _MOST
    for line in lines[:_MOST_LINES]:
        room -= len(escape(line.text)) + 30
        if room < 0:
            break
        shown.append(line)
    kinds = [line.kind for line in lines]
    return Comparison(shown, kinds.count("add"), kinds.count("del"), len(shown) < len(lines))


def _line(text: str) -> Line:
    return Line({"+": "add", "-": "del", "@": "at"}.get(text[:1], "same"), text)
