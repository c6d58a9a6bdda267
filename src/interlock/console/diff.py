"""Texts: long ones cut to what a page can carry, and the difference between two."""

from dataclasses import dataclass

from markupsafe import escape

from interlock.compute import pool
from interlock.definition.yaml_source import difference
from interlock.ids import TenantId

_MOST = 24_000
_MOST_LINES = 800


@dataclass(frozen=True, slots=True)
class Cut:
    text: str
    # The number of characters left out.
    left: int = 0


@dataclass(frozen=True, slots=True)
class DiffLine:
    """One line of a comparison: added, removed, unchanged, or a position marker."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    lines: list[DiffLine]
    added: int
    removed: int
    is_cut: bool


def cut(text: str, most: int = _MOST) -> Cut:
    """Return the beginning of a text, measured as it is sent: a quotation mark takes five characters."""
    kept = text
    while (length := len(escape(kept))) > most:
        kept = kept[: int(len(kept) * most / length * 0.98)]
    return Cut(kept, len(text) - len(kept))


async def compare(tenant_id: TenantId, before: str, after: str) -> Comparison:
    """Return the differences. Comparing long texts with little in common is slow, so another process does it."""
    found = await pool.run(tenant_id, difference, before, after)
    lines = [_line(text) for text in found[2:]]  # skip the two lines that name the files
    shown: list[DiffLine] = []
    room = _MOST
    for line in lines[:_MOST_LINES]:
        room -= len(escape(line.text)) + 30
        if room < 0:
            break
        shown.append(line)
    kinds = [line.kind for line in lines]
    return Comparison(shown, kinds.count("add"), kinds.count("del"), len(shown) < len(lines))


def _line(text: str) -> DiffLine:
    return DiffLine({"+": "add", "-": "del", "@": "at"}.get(text[:1], "same"), text)
