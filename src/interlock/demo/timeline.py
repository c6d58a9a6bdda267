"""The timeline: a run's journal as bars on a time axis, one row a step, with who did it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rich.console import Console
from rich.text import Text

from interlock.demo.screen import who
from interlock.wire import Event, Run

_STEP, _WHO, _TOOK = 9, 13, 8
# People take their time. However long that was, it gets this share of the axis.
_MOST_FOR_PEOPLE = 0.3


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a step's time. `look` is one of work, failed, rest and people."""

    start: datetime
    end: datetime
    look: str


@dataclass(slots=True)
class Row:
    step: str
    who: str = ""
    status: str = ""
    stretches: list[Stretch] = field(default_factory=list)
    opened: datetime | None = None


_STYLES = {"work": "green", "failed": "red", "rest": "dim", "people": "yellow"}
_BLOCKS = {"work": "█", "failed": "×", "rest": "·", "people": "░"}
_PLAIN = {"work": "#", "failed": "x", "rest": ".", "people": "?"}


def show_timeline(console: Console, run: Run, events: list[Event]) -> None:
    rows = read(run, events)
    glyphs = _PLAIN if console.options.ascii_only else _BLOCKS
    width = console.width - (2 + _STEP + _WHO + _TOOK + 2)
    start, end = run.created_at, run.completed_at or events[-1].at
    place = axis(start, end, _of_people(rows), width)
    for row in rows:
        console.print(_line(row, place, width, glyphs))
    console.print(_ruler(start, end, _of_people(rows), place, width))
    legend = [("work", "at work"), ("failed", "failed"), ("rest", "until its time"), ("people", "people")]
    console.print(
        Text(" " * (2 + _STEP + _WHO)).append(
            Text("  ").join(Text(f"{glyphs[look]} {name}", style=_STYLES[look]) for look, name in legend)
        )
    )


def read(run: Run, events: list[Event]) -> list[Row]:
    """What each step did when, from the events alone."""
    rows = {step.key: Row(step.key, status=step.status) for step in run.steps}
    for event in events:
        if (row := rows.get(event.data.get("step_key", ""))) is not None:
            _read_into(row, event)
    return list(rows.values())


def _read_into(row: Row, event: Event) -> None:
    data = event.data
    row.who = row.who if data["actor"] == "system:engine" else who(data["actor"])
    match data.get("event"):
        case "open" | "park":
            row.opened = event.at
        case "grant" | "refuse" | "arrive" if row.opened is not None:
            look = "rest" if data["event"] == "arrive" else "people"
            row.stretches.append(Stretch(row.opened, event.at, look))
        case "succeed" | "fail" | "retry" | "cancel":
            began = event.at - timedelta(milliseconds=data.get("duration_ms", 0))
            if row.opened is not None:
                row.stretches.append(Stretch(row.opened, began, "rest"))
            row.stretches.append(Stretch(began, event.at, "work" if data["event"] == "succeed" else "failed"))
            row.opened = event.at


def _of_people(rows: Iterable[Row]) -> Stretch | None:
    return next((s for row in rows for s in row.stretches if s.look == "people"), None)


def axis(start: datetime, end: datetime, people: Stretch | None, width: int) -> Callable[[datetime], int]:
    """Where on the line a moment stands. The time that people took is compressed, the rest is to scale."""
    total = max((end - start).total_seconds(), 0.001)
    waited = (people.end - people.start).total_seconds() if people else 0.0
    kept = min(waited, (total - waited) * _MOST_FOR_PEOPLE / (1 - _MOST_FOR_PEOPLE))
    scale = (width - 1) / max(total - waited + kept, 0.001)

    def place(at: datetime) -> int:
        seconds = (at - start).total_seconds()
        if people is not None and at > people.start:
            within = min((at - people.start).total_seconds(), waited)
            seconds -= within * (1 - kept / waited) if waited else 0
        return min(max(round(seconds * scale), 0), width - 1)

    return place


def _line(row: Row, place: Callable[[datetime], int], width: int, glyphs: dict[str, str]) -> Text:
    line = Text.assemble("  ", (f"{row.step:<{_STEP}}", "bold"), (f"{row.who:<{_WHO}}", "cyan"))
    cells: list[str | None] = [None] * width
    for stretch in row.stretches:
        first, last = place(stretch.start), place(stretch.end)
        for at in range(first, max(last, first + 1)):
            cells[at] = stretch.look
    for look in cells:
        line.append(glyphs[look] if look else " ", style=_STYLES[look] if look else "")
    if not row.stretches:
        return line.append(f"{row.status:>{_TOOK}}", style="dim")
    took = (row.stretches[-1].end - row.stretches[0].start).total_seconds()
    return line.append(f"{_span(took):>{_TOOK}}", style="dim")


def _ruler(
    start: datetime, end: datetime, people: Stretch | None, place: Callable[[datetime], int], width: int
) -> Text:
    marks = [start, *((people.start, people.end) if people else ()), end]
    ruler = ""
    for mark in marks:
        label = _span((mark - start).total_seconds())
        at = min(place(mark), width - len(label))
        if at > len(ruler) or not ruler:
            ruler = ruler.ljust(at) + label
    return Text(" " * (2 + _STEP + _WHO) + ruler, style="dim")


def _span(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 1 else f"{seconds:.1f} s" if seconds else "0"
