"""The report: a table for people, JSON for programs."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from bench.calm import Calm
from bench.figures import Figure, Spread

RESULTS = Path(__file__).with_name("results")


def table(figures: list[Figure]) -> Table:
    shown = Table(title="Interlock beside the ceiling (median, range)", title_justify="left")
    shown.add_column("measurement")
    for heading in ("ceiling | base", "ours", "ratio", "goal"):
        shown.add_column(heading, justify="right")
    shown.add_column("ok", justify="center")
    for one in figures:
        digits = 0 if one.unit.endswith("/s") else 2
        shown.add_row(
            one.name, _cell(one.base, digits, one.unit), _cell(one.ours, digits, one.unit), _cell(one.ratio, 2),
            str(one.goal or ""), _verdict(one),
        )  # fmt: skip
    return shown


def _verdict(one: Figure) -> str:
    if one.goal is None:
        return ""
    said = "[green]yes[/]" if one.is_met else "[bold red]MISSED[/]"
    # The median decides, but repetitions that disagree mean that the machine was not steady enough to measure.
    return (
        said if len({one.goal.is_met_by(ratio) for ratio in one.ratio.values}) == 1 else f"{said} [yellow]unsteady[/]"
    )


def _cell(spread: Spread, digits: int, unit: str = "") -> str:
    middle = f"{spread.median:,.{digits}f} {unit}".rstrip()
    if len(spread.values) == 1:
        return middle
    return f"{middle} [dim]({min(spread.values):,.{digits}f}–{max(spread.values):,.{digits}f})[/]"


def machine_line(figures: list[Figure], calm: Calm) -> str:
    pulses = [pulse for one in figures for pulse in one.pulses]
    disturbed = sum(not calm.is_calm(pulse) for pulse in pulses)
    return (
        f"{os.cpu_count()} cores, pulse {calm.best:.0f} µs at best; {disturbed} of {len(pulses)} measurements "
        "began on a machine that others used. Ratios are worth more than rates."
    )


def write(figures: list[Figure], *, effort: dict[str, Any], best: float, server: str) -> Path:
    now = datetime.now(UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y%m%dT%H%M%SZ}.json"
    content = {
        "at": now.isoformat(), "cores": os.cpu_count(), "python": platform.python_version(), "postgresql": server,
        "best_pulse_us": best, "effort": effort, "figures": [one.as_json() for one in figures],
    }  # fmt: skip
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    return path
