"""Charts of the last hour: how many runs ended in each minute and how, and how long they took. Pure.

Durations are stored in buckets of powers of two, so the median is interpolated within its bucket.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from interlock.console.filters import tone

MINUTES = 60
# The size of both drawings. They are stretched to the available width, so only proportions count.
WIDTH, HEIGHT = 600, 100
# From the bottom up.
TONES = ("good", "bad", "quiet")


@dataclass(frozen=True, slots=True)
class ChartBar:
    tone: str
    x: float
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Minute:
    at: datetime
    # The number of runs by outcome.
    ended: dict[str, int]
    half_ms: float | None
    most_ms: float | None

    @property
    def runs(self) -> int:
        return sum(self.ended.values())


@dataclass(frozen=True, slots=True)
class Charts:
    minutes: list[Minute]
    bars: list[ChartBar]
    # The axis labels of runs and of durations, each from the top down.
    runs_axis: list[int]
    time_axis: list[str]
    half: list[str]
    most: list[str]
    times: list[str]
    runs: int
    failed: int
    half_ms: float | None
    most_ms: float | None


def draw(rows: Iterable[Any], now: datetime) -> Charts:
    """Return the charts of rows with minute, status, bucket and runs."""
    end = now.astimezone(UTC).replace(second=0, microsecond=0)
    begin = end - timedelta(minutes=MINUTES - 1)
    ended: dict[datetime, Counter[str]] = defaultdict(Counter)
    buckets: dict[datetime, Counter[int]] = defaultdict(Counter)
    for row in rows:
        at = row["minute"].astimezone(UTC)
        if begin <= at <= end:
            ended[at][_group(row["status"])] += row["runs"]
            buckets[at][row["bucket"]] += row["runs"]
    times = [begin + timedelta(minutes=number) for number in range(MINUTES)]
    minutes = [Minute(at, dict(ended[at]), quantile(buckets[at], 0.5), quantile(buckets[at], 0.95)) for at in times]
    return _placed(minutes, sum(buckets.values(), Counter()))


def _group(status: str) -> str:
    found = tone(status)
    return found if found in TONES else "quiet"


def quantile(buckets: Counter[int], part: float) -> float | None:
    """Return a quantile in milliseconds.

    Runs are assumed to be spread evenly over a bucket on its logarithmic scale.
    """
    wanted = buckets.total() * part
    if not wanted:
        return None
    for bucket in sorted(buckets):
        if wanted <= buckets[bucket]:
            low = bucket - 1 if bucket else 0
            return float(2 ** (low + (bucket - low) * wanted / buckets[bucket]))
        wanted -= buckets[bucket]
    return float(2 ** max(buckets))


def _placed(minutes: list[Minute], all_buckets: Counter[int]) -> Charts:
    top = _ceiling(max(minute.runs for minute in minutes))
    times = [ms for minute in minutes for ms in (minute.half_ms, minute.most_ms) if ms is not None]
    low = math.floor(math.log10(max(min(times, default=1), 1)))
    high = max(math.ceil(math.log10(max(times, default=1000))), low + 1)
    counted = Counter[str]()
    for minute in minutes:
        counted.update(minute.ended)
    return Charts(
        minutes=minutes,
        bars=[bar for number, minute in enumerate(minutes) for bar in _stack(number, minute, top)],
        runs_axis=[top, top // 2, 0] if top % 2 == 0 else [top, 0],
        time_axis=[_mark(power) for power in range(high, low - 1, -1)],
        half=_lines([minute.half_ms for minute in minutes], low, high),
        most=_lines([minute.most_ms for minute in minutes], low, high),
        times=[f"{minutes[number].at:%H:%M}" for number in (0, 15, 30, 45, MINUTES - 1)],
        runs=counted.total(),
        failed=counted["bad"],
        half_ms=quantile(all_buckets, 0.5),
        most_ms=quantile(all_buckets, 0.95),
    )


def _mark(power: int) -> str:
    return f"{10**power} ms" if power < 3 else f"{10 ** (power - 3):,} s"


def _ceiling(most: int) -> int:
    """Return the next round number at or above the value."""
    size = int("1" + "0" * (len(str(most)) - 1))
    return next(step * size for step in (1, 2, 4, 6, 8, 10) if step * size >= most)


def _stack(number: int, minute: Minute, top: int) -> Iterable[ChartBar]:
    slot, y = WIDTH / MINUTES, float(HEIGHT)
    for name in TONES:
        if runs := minute.ended.get(name, 0):
            # Keep one run in a thousand visible.
            height = max(runs / top * HEIGHT, 1.0)
            y -= height
            yield ChartBar(name, round(number * slot + slot * 0.15, 1), round(max(y, 0.0), 2), round(height, 2))


def _lines(values: list[float | None], low: int, high: int) -> list[str]:
    """Return lines through consecutive minutes. A line breaks at a minute in which no run ended."""
    lines: list[list[str]] = [[]]
    slot = WIDTH / MINUTES
    for number, value in enumerate(values):
        if value is None:
            lines.append([])
            continue
        share = (math.log10(max(value, 10**low)) - low) / (high - low)
        lines[-1].append(f"{number * slot + slot / 2:.1f},{HEIGHT - share * HEIGHT:.1f}")
    # An isolated minute is drawn as a short dash.
    return [" ".join(points if len(points) > 1 else _dash(points[0], slot)) for points in lines if points]


def _dash(point: str, slot: float) -> list[str]:
    x, y = point.split(",")
    return [f"{float(x) - slot / 2:.1f},{y}", f"{float(x) + slot / 2:.1f},{y}"]
