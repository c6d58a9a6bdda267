"""Showing: tables and pages for people, JSON for programs."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from interlock.cli.listing import Listing
from interlock.cli.text import one_line, visible
from interlock.lifecycle import MACHINES, Machine, Term
from interlock.lifecycle.tone import Tone, tone_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from interlock.wire import Page, StateChange

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], RenderableType]]

_MACHINE_OF: dict[type[Term], Machine[Any, Any]] = {type(machine.initial): machine for machine in MACHINES}
_COLOURS: dict[Tone, str] = {
    "good": "green",
    "bad": "red",
    "ask": "yellow",
    "wait": "yellow",
    "warn": "yellow",
    "busy": "cyan",
}
_WIDE = 1_000_000
_PADDING = re.compile(r" +$(?=\n)", re.MULTILINE)


def console() -> Console:
    """Where commands print. Into a pipe nothing is cut or wrapped; foreign text is never read as markup."""
    to_terminal = sys.stdout.isatty()
    out = sys.stdout if to_terminal else cast(TextIO, _Unpadded(sys.stdout))
    return Console(file=out, width=None if to_terminal else _WIDE, markup=False, emoji=False, highlight=False)


class _Unpadded:
    """Lines without the spaces that fill a column up at their end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(_PADDING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def print_json(view: "BaseModel | Mapping[str, Any]", *, indent: int | None = 2) -> None:
    plain = view if isinstance(view, Mapping) else view.model_dump(mode="json")
    sys.stdout.write(json.dumps(plain, indent=indent, default=str) + "\n")
    sys.stdout.flush()


def print_view(view: "BaseModel", shown: Callable[[], RenderableType], *, as_json: bool) -> None:
    if as_json:
        print_json(view)
    else:
        console().print(shown())


def print_page(page: "Page[T]", columns: "Columns[T]", *, as_json: bool) -> None:
    if as_json:
        print_json(page)
        return
    out = console()
    out.print(table(page.items, columns) if page.items else "none")
    if page.next_cursor:
        out.print(f"more: --cursor {page.next_cursor}", style="dim", soft_wrap=True)


# ---------------------------------------------------------------- words


def style(state: Term) -> str:
    """A colour for any state of any machine, by its place in the table."""
    machine = _MACHINE_OF[type(state)]
    return _COLOURS.get(tone_of(machine, state), "dim" if state in machine.terminal else "")


def word(state: Term | None) -> Text:
    return Text(state, style=style(state)) if state is not None else Text("")


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def moment(at: datetime | None) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""


def clock(at: datetime) -> str:
    return at.astimezone().strftime("%H:%M:%S")


def span(seconds: float) -> str:
    """A duration as people say it: 240ms, 3.1s, 2m05s, 3h07m, 4d02h."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}{seconds % size // below:02.0f}{smaller}"
    raise AssertionError(seconds)


def took(start: datetime | None, end: datetime | None) -> str:
    return span(((end or datetime.now(UTC)) - start).total_seconds()) if start else ""


def who(actor: str) -> str:
    """Of `name:key-id` the name."""
    name, _, tail = actor.rpartition(":")
    return name if name and len(tail) == 36 else actor


def cell(value: Any) -> str:
    """Any JSON value on one line."""
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def exact(value: Any) -> str:
    """A value as it is, for somebody who answers for it: with its line breaks, and with quotes where one could err."""
    if isinstance(value, str) and value.strip() == value != "":
        return visible(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return visible(text if len(text) <= 80 else json.dumps(value, ensure_ascii=False, default=str, indent=2))


def brief(error: Any) -> str:
    """The sentence of an error, whether it is one or has one."""
    if isinstance(error, Mapping):
        error = next((error[name] for name in ("message", "detail", "code") if error.get(name)), error)
    return "" if error is None else cell(error)


def table(items: Iterable[T], columns: "Columns[T]") -> Listing:
    rows = [[column(item) for column in columns.values()] for item in items]
    return Listing([name.upper() for name in columns], rows)


def facts(**pairs: RenderableType | None) -> Table:
    """Names and values under each other; what is empty is left out."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for name, value in pairs.items():
        if value not in (None, ""):
            found.add_row(name.replace("_", " "), value if value is not None else "")
    return found


def with_source(head: Table, source: Mapping[str, Any] | None) -> RenderableType:
    """What is known of a definition, and below it the definition itself."""
    if source is None:
        return head
    import yaml

    return Group(head, "", visible(yaml.safe_dump(source, sort_keys=False, allow_unicode=True).rstrip()))


def block(values: Mapping[str, Any], indent: int = 2) -> Table:
    """Every value under its own name, nothing left out or shortened."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for name, value in values.items():
        found.add_row(" " * indent + visible(name), exact(value))
    return found


# What happened to a worker or a job.
HISTORY: "Columns[StateChange]" = {
    "at": lambda change: moment(change.at),
    "from": lambda change: change.from_state or "",
    "event": lambda change: change.event,
    "to": lambda change: change.to_state,
    "by": lambda change: visible(who(change.by)),
    "reason": lambda change: one_line(change.reason or ""),
}
