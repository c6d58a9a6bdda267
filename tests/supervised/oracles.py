"""Oracles: impossible states in the history of workers."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson


@dataclass(frozen=True, slots=True)
class Reservation:
    worker_id: UUID
    job_id: str
    since: Any
    until: Any | None


def reservations(lines: list[Any]) -> list[Reservation]:
    """Fold history in the order of worker and number. The line that ends a worker also releases it."""
    found: list[Reservation] = []
    current: dict[UUID, tuple[str, Any]] = {}
    for line in lines:
        data = orjson.loads(line["data"]) if line["data"] else {}
        worker_id = line["subject_id"]
        if line["type"] == "worker_reserved":
            assert worker_id not in current, f"worker {worker_id} belongs to two jobs"
            current[worker_id] = (data["job_id"], line["at"])
        elif line["type"] == "worker_released" or "released_from" in data:
            job_id, since = current.pop(worker_id)
            assert job_id == data.get("job_id", data.get("released_from"))
            found.append(Reservation(worker_id, job_id, since, line["at"]))
    return found + [Reservation(worker, job, since, None) for worker, (job, since) in current.items()]


def nobody_served_two_jobs(lines: list[Any]) -> None:
    reservations(lines)


def most_reserved_at_once(found: list[Reservation]) -> int:
    """Return the maximum at the moments with a reservation."""
    return max(
        (sum(r.since <= at and (r.until is None or r.until > at) for r in found) for at in {r.since for r in found}),
        default=0,
    )
