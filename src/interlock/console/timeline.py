"""The timeline of a run: the activity of each step over time, as bars on one axis. Pure: entries in, positions out.

Busy time and waiting time have different scales if the waiting would hide the rest: a person's hour next to a tool's
second.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from interlock.lifecycle import STEP, StepEvent, StepState

WIDTH = 1000
# The share of the width for busy time, if it would get less on a common scale.
_BUSY_SHARE = 0.6


@dataclass(slots=True)
class TimelineBar:
    """A period in which a step was in one state."""

    kind: str
    start: datetime
    end: datetime
    says: str = ""
    x: float = 0.0
    width: float = 0.0


@dataclass(slots=True)
class TimelineLine:
    key: str
    bars: list[TimelineBar] = field(default_factory=list)
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    lines: list[TimelineLine]
    # Five times at equal distances, since the start of the run.
    ticks: list[float]
    bent: bool


def draw(keys: Iterable[str], entries: Iterable[Any], began: datetime, now: datetime) -> Timeline:
    lines = {key: TimelineLine(key) for key in keys}
    since: dict[str, tuple[StepState, datetime]] = {}
    for entry in entries:
        if entry.step is not None and entry.to_state is not None and entry.at is not None:
            line = lines.setdefault(entry.step, TimelineLine(entry.step))
            _follow(line, entry, since)
    for key, (state, at) in since.items():
        if state in STEP.open and not (state == StepState.PENDING and not lines[key].bars):
            lines[key].bars.append(_bar(state, at, max(now, at)))
    shown = [line for line in lines.values() if line.bars]
    return _place(shown, began, max([now, *(bar.end for line in shown for bar in line.bars)]))


def _follow(line: TimelineLine, entry: Any, since: dict[str, tuple[StepState, datetime]]) -> None:
    data, was, at = entry.data or {}, since.get(line.key), entry.at
    ran = timedelta(milliseconds=data.get("duration_ms") or 0)
    state = StepState(entry.to_state)
    line.attempts = max(line.attempts, entry.attempt or 0)
    if entry.from_state == StepState.RUNNING:
        # The journal has only the end of a short attempt.
        seen = was is not None and was[0] == StepState.RUNNING
        start = was[1] if was is not None and seen else at - ran
        if was is not None and not seen and was[0] in STEP.open and line.bars:
            line.bars.append(_bar(was[0], was[1], max(was[1], start)))
        bar = _bar(StepState.RUNNING, start, at, entry.attempt)
        if state == StepState.FAILED or entry.event == StepEvent.RETRY:
            bar.kind = "failed"
        line.bars.append(bar)
    elif was is not None and was[0] in STEP.open and (was[0] != StepState.PENDING or line.bars):
        line.bars.append(_bar(was[0], was[1], at))
    started = data.get("started_at")
    begun = datetime.fromisoformat(started) if state == StepState.RUNNING and isinstance(started, str) else at
    since[line.key] = (state, begun)


def _bar(state: StepState, start: datetime, end: datetime, attempt: int | None = None) -> TimelineBar:
    match state:
        case StepState.RUNNING:
            kind, says = "running", "ran"
        case StepState.WAITING_APPROVAL:
            kind, says = "approval", "waited for people"
        case StepState.WAITING_EXTERNAL:
            kind, says = "waiting", "waited"
        case _:
            kind, says = "retry", "waited for its next attempt"
    return TimelineBar(kind, start, end, f"{says}, attempt {attempt}" if attempt and attempt > 1 else says)


def _place(lines: list[TimelineLine], began: datetime, ended: datetime) -> Timeline:
    """Give every bar its position on the axis."""
    moments = sorted({began, ended, *(m for line in lines for bar in line.bars for m in (bar.start, bar.end))})
    busy = [(bar.start, bar.end) for line in lines for bar in line.bars if bar.kind in ("running", "failed")]
    pieces = [
        (left, right, any(start <= left and right <= end for start, end in busy)) for left, right in pairwise(moments)
    ]
    total = max((ended - began).total_seconds(), 0.001)
    at_work = sum((right - left).total_seconds() for left, right, works in pieces if works)
    bent = 0 < at_work < total * _BUSY_SHARE
    share = {True: _BUSY_SHARE / at_work, False: (1 - _BUSY_SHARE) / (total - at_work)} if bent else {}
    places, times = [0.0], [0.0]
    for left, right, works in pieces:
        length = (right - left).total_seconds()
        places.append(places[-1] + length * (share[works] if bent else 1 / total) * WIDTH)
        times.append(times[-1] + length)
    at = dict(zip(moments, places, strict=True))
    for line in lines:
        for bar in line.bars:
            bar.x = round(min(at[bar.start], WIDTH - 4), 1)
            # Keep bars without duration visible.
            bar.width = round(max(at[bar.end] - at[bar.start], 4.0), 1)
    return Timeline(lines, [_time_at(WIDTH * quarter / 4, places, times) for quarter in range(5)], bent)


def _time_at(x: float, places: list[float], times: list[float]) -> float:
    for index in range(1, len(places)):
        if places[index] >= x - 1e-9:
            width = places[index] - places[index - 1]
            part = (x - places[index - 1]) / width if width else 1.0
            return times[index - 1] + part * (times[index] - times[index - 1])
    return times[-1]
