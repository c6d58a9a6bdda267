"""A listing: rows under their headings, in a layout that fits the width of the terminal."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2
# Text may be broken into lines of this width; a name, which has no spaces, only if it is longer than any id.
_BROKEN, _LONG_NAME = 20, 40
_INDENT = 2

Row = Sequence[RenderableType]


class Listing:
    """A table if it fits; otherwise the first cell of each row on one line, and the rest below it.

    If even that does not fit, each value has a line with its name. Ids are never broken, so that they can be copied.
    """

    def __init__(self, headings: Sequence[str], rows: Sequence[Row]) -> None:
        self._headings, self._rows = list(headings), [list(row) for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least, width = self._least(console, options), options.max_width
        if _fits(least, width):
            yield _table(self._headings, self._rows, least)
        elif (kept := self._filled()) != self._headings:
            yield self._only(kept)
        elif least[0] <= width and _fits(least[1:], width - _INDENT):
            yield from self._stacked(least, width - _INDENT)
        else:
            yield from self._one_below_the_other()

    def _least(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Return the minimum width of each column."""
        wide = options.update(max_width=10_000)
        return [
            max(_narrowest(cell, Measurement.get(console, wide, cell).maximum) for cell in column)
            for column in zip(self._headings, *self._rows, strict=True)
        ]

    def _filled(self) -> list[str]:
        columns = zip(self._headings, *self._rows, strict=True)
        return [heading for n, (heading, *cells) in enumerate(columns) if n == 0 or any(map(_is_filled, cells))]

    def _only(self, headings: Sequence[str]) -> "Listing":
        kept = [self._headings.index(heading) for heading in headings]
        return Listing(headings, [[row[n] for n in kept] for row in self._rows])

    def _stacked(self, least: list[int], width: int) -> RenderResult:
        yield Text(self._headings[0], style="bold")
        # All rows have the same widths, so that columns align; the remaining width is for text.
        room = width - sum(least[1:]) - _GAP * (len(least) - 2)
        share = room // max(1, least[1:].count(_BROKEN))
        widths = [narrowest + share if narrowest == _BROKEN else narrowest for narrowest in least[1:]]
        yield _below([Text(heading, style="bold") for heading in self._headings[1:]], widths)
        for first, *rest in self._rows:
            yield first if isinstance(first, Text) else Text(str(first))
            yield _below(rest, widths)

    def _one_below_the_other(self) -> RenderResult:
        for number, row in enumerate(self._rows):
            found = Table.grid(padding=(0, _GAP, 0, 0))
            found.add_column(style="bold", no_wrap=True)
            found.add_column(overflow="fold")
            for heading, cell in zip(self._headings, row, strict=True):
                if _is_filled(cell):
                    found.add_row(heading, cell)
            if number:
                yield ""
            yield found


def _narrowest(cell: RenderableType, natural: int) -> int:
    return natural if natural <= (_BROKEN if " " in str(cell).strip() else _LONG_NAME) else _BROKEN


def _fits(least: Sequence[int], width: int) -> bool:
    return sum(least) + _GAP * (len(least) - 1) <= width


def _is_filled(cell: RenderableType) -> bool:
    return bool(str(cell).strip())


def _table(headings: Sequence[str], rows: Sequence[Row], least: Sequence[int]) -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for heading, narrowest in zip(headings, least, strict=True):
        found.add_column(heading, no_wrap=narrowest != _BROKEN, overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found


def _below(cells: Row, widths: Sequence[int]) -> Padding:
    found = Table.grid(padding=(0, _GAP, 0, 0))
    for width in widths:
        found.add_column(width=width, overflow="fold")
    found.add_row(*cells)
    return Padding(found, (0, 0, 0, _INDENT))
