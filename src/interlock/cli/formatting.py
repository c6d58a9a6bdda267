"""Output: tables and pages for people, JSON for programs."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from interlock.cli.listing import Listing
from interlock.cli.parsing import one_line, visible
from interlock.clock import now
from interlock.lifecycle import MACHINES, Machine, Term
from interlock.lifecycle.severity import Tone, tone_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from interlock.wire import Page, StateChange, VersionDifference

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
    """Return the console that commands print to.

    A pipe gets full lines; foreign text is never interpreted as markup.
    """
    to_terminal = sys.stdout.isatty()
    out = sys.stdout if to_terminal else cast(TextIO, _Unpadded(sys.stdout))
    return Console(file=out, width=None if to_terminal else _WIDE, markup=False, emoji=False, highlight=False)


class _Unpadded:
    """Removes the spaces that pad a column at the end of each line."""

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


# ---------------------------------------------------------------- values as text


def style(state: Term) -> str:
    """Return a colour for a state, by its position in the state machine's table."""
    machine = _MACHINE_OF[type(state)]
    return _COLOURS.get(tone_of(machine, state), "dim" if state in machine.terminal else "")


def word(state: Term | None) -> Text:
    return Text(state, style=style(state)) if state is not None else Text("")


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def moment(at: datetime | None) -> str:
    """Return a time in the time zone of this machine, with the zone's name."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z").rstrip() if at else ""


def span(seconds: float) -> str:
    """Return a duration in short form: 240ms, 3.1s, 2m05s, 3h07m, 4d02h."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}{seconds % size // below:02.0f}{smaller}"
    raise AssertionError(seconds)


def took(start: datetime | None, end: datetime | None) -> str:
    return span(((end or now()) - start).total_seconds()) if start else ""


def who(actor: str) -> str:
    """Return the name in `name:key-id`."""
    name, _, tail = actor.rpartition(":")
    return name if name and len(tail) == 36 else actor


def cell(value: Any) -> str:
    """Return any JSON value on one line."""
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def exact(value: Any) -> str:
    """Return a value exactly, for an accountable decision: with its line breaks, and quoted if ambiguous."""
    if isinstance(value, str) and value.strip() == value != "":
        return visible(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return visible(text if len(text) <= 80 else json.dumps(value, ensure_ascii=False, default=str, indent=2))


def brief(error: Any) -> str:
    """Return the message of an error that is text or an object."""
    if isinstance(error, Mapping):
        error = next((error[name] for name in ("message", "detail", "code") if error.get(name)), error)
    return "" if error is None else cell(error)


def error(error: Any) -> str:
    """Return the message of an error, after its type if it has one."""
    kind = error.get("type") if isinstance(error, Mapping) else None
    return f"{cell(kind)}: {brief(error)}" if kind else brief(error)


def table(items: Iterable[T], columns: "Columns[T]") -> Listing:
    rows = [[column(item) for column in columns.values()] for item in items]
    return Listing([name.upper() for name in columns], rows)


def facts(**pairs: RenderableType | None) -> Table:
    """Return names and values, one per line, without the empty ones."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for name, value in pairs.items():
        if value not in (None, ""):
            found.add_row(name.replace("_", " "), value if value is not None else "")
    return found


def with_source(head: Table, source: Mapping[str, Any] | None) -> RenderableType:
    """Return the facts about a definition, and below them the definition itself."""
    if source is None:
        return head
    import yaml

    return Group(head, "", visible(yaml.safe_dump(source, sort_keys=False, allow_unicode=True).rstrip()))


_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def difference(found: "VersionDifference") -> RenderableType:
    """Return a unified diff in colour, one line each; a sentence if both versions have the same content."""
    if not found.diff:
        return f"Versions {found.before} and {found.after} have the same content."
    lines = visible(found.diff.expandtabs(4)).rstrip("\n").split("\n")
    return Group(*(Text(line, style=_DIFF_STYLES.get(line[:1], "")) for line in lines))


def block(values: Mapping[str, Any], indent: int = 2) -> Table:
    """Return every value under its own name, in full."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for name, value in values.items():
        found.add_row(" " * indent + visible(name), exact(value))
    return found


# A line of a worker's or job's history.
HISTORY: "Columns[StateChange]" = {
    "at": lambda change: moment(change.at),
    "from": lambda change: change.from_state or "",
    "event": lambda change: change.event,
    "to": lambda change: change.to_state,
    "by": lambda change: visible(who(change.by)),
    "reason": lambda change: one_line(change.reason or ""),
}
