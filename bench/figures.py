"""Figures: how often we measured a value, its median and range, and whether it meets our promise."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bench.calm import Pulse


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one value."""

    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": min(self.values), "high": max(self.values), "values": self.values}


@dataclass(frozen=True, slots=True)
class Goal:
    sign: Literal["≥", "≤"]
    bound: float

    def is_met_by(self, value: float) -> bool:
        return value >= self.bound if self.sign == "≥" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. `base` is the ceiling, or the easy case where we compare with ourselves."""

    name: str
    unit: str
    base: Spread
    ours: Spread
    ratio: Spread
    goal: Goal | None = None
    pulses: list[Pulse] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        return self.goal.is_met_by(self.ratio.median) if self.goal else None

    def as_json(self) -> dict[str, Any]:
        spreads = {name: getattr(self, name).as_json() for name in ("base", "ours", "ratio")}
        goal = asdict(self.goal) if self.goal else None
        return {
            "name": self.name, "unit": self.unit, **spreads, "goal": goal, "met": self.is_met,
            "pulses": [asdict(pulse) for pulse in self.pulses], "notes": self.notes,
        }  # fmt: skip


def figure(
    name: str, unit: str, base: Sequence[float], ours: Sequence[float], goal: Goal | None = None,
    *, pulses: Sequence[Pulse] = (), notes: dict[str, Any] | None = None,
) -> Figure:  # fmt: skip
    """Compare each of our measurements with the baseline just before it, so that a slow minute slows both."""
    ratios = [o / b for b, o in zip(base, ours, strict=True)]
    return Figure(
        name, unit, Spread(list(base)), Spread(list(ours)), Spread(ratios), goal, list(pulses), dict(notes or {})
    )


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
