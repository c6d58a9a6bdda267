"""Measure how long runs and steps were in the states that they left. Of a step only waiting states count.

Measured when entries are sealed. Each entry is sealed once, and its journal then contains both moments.
"""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from interlock.lifecycle import StepState
from interlock.store.pool import Row, Tx
from interlock.telemetry import metrics

Place = tuple[UUID, str | None]


async def measure(tx: Tx, sealed: Sequence[Row]) -> None:
    """Measure the durations. `sealed` are entries in the order of their numbers within each run."""
    stays, unknown = _within(sealed)
    if unknown:
        columns = ([row[name] for row in unknown] for name in ("run_id", "seq", "step"))
        came = {(row["run_id"], row["seq"]): row for row in await tx.fetch("came_before", *columns)}
        for row in unknown:
            if (before := came.get((row["run_id"], row["seq"]))) is not None:
                stays += _stay(row, before["at"], before["to_state"])
    tx.on_commit(lambda: _tell(stays))


def _within(sealed: Sequence[Row]) -> tuple[list[tuple[str, str, float]], list[Row]]:
    """Return the durations within these entries, and the entries that leave a state which an earlier entry entered."""
    last: dict[Place, tuple[datetime, str]] = {}
    stays: list[tuple[str, str, float]] = []
    unknown: list[Row] = []
    for row in sealed:
        if row["to_state"] is None:
            continue
        place = (row["run_id"], row["step"])
        if row["from_state"] is not None and _is_measured(row):
            if place in last:
                stays += _stay(row, *last[place])
            else:
                unknown.append(row)
        last[place] = (row["at"], row["to_state"])
    return stays, unknown


def _is_measured(row: Row) -> bool:
    return row["step"] is None or row["from_state"] in (StepState.WAITING_APPROVAL, StepState.WAITING_EXTERNAL)


def _stay(row: Row, since: datetime, state: str) -> list[tuple[str, str, float]]:
    if state != row["from_state"]:
        return []
    return [("run" if row["step"] is None else "step", state, (row["at"] - since).total_seconds())]


def _tell(stays: list[tuple[str, str, float]]) -> None:
    for machine, state, seconds in stays:
        metrics.was_in(machine, state, seconds)
