"""Leases: who may act on a run, and until when."""

import os
import socket
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from interlock.errors import LeaseLost
from interlock.ids import uuid7
from interlock.lifecycle import WORKER, RunState, WorkerEvent, WorkerState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log, metrics


@dataclass(frozen=True, slots=True)
class Me:
    """This process as the database knows it. A lost worker never comes back under the same id."""

    id: UUID
    name: str

    @property
    def actor(self) -> str:
        return f"worker:{self.name}"


@dataclass(frozen=True, slots=True)
class Claim:
    """`dry`: lanes that gave less than their share."""

    runs: list[Row]
    dry: list[UUID]
    lanes: int


async def register(database: Database, *, capacity: int, lease_seconds: float) -> Me:
    host = socket.gethostname()
    worker_id = uuid7()
    me = Me(worker_id, f"{host}-{os.getpid()}-{worker_id.hex[-4:]}")
    await database.fetch(
        "register_worker", database.clock(), me.id, me.name, host, os.getpid(), capacity, lease_seconds
    )
    log.info("worker_registered", worker=me.name, capacity=capacity)
    return me


async def move_worker(database: Database, worker_id: UUID, event: WorkerEvent, reason: str | None = None) -> Row:
    async def work(tx: Tx) -> Row:
        row = await tx.row("lock_worker", worker_id)
        assert row is not None
        state = WorkerState(row["status"])
        if any(t.event == event and t.target == state for t in WORKER.transitions()):
            return row  # an earlier try of the same call got through
        if state == WorkerState.TERMINATED:
            raise LeaseLost(f"worker {row['name']} was declared lost; its runs were given to others")
        target = WORKER.move(state, event)
        moved = await tx.row("move_worker", database.clock(), worker_id, target, reason, target in WORKER.terminal)
        assert moved is not None
        metrics.transitions["worker"].labels(state, target).inc()
        return moved

    return await database.command(work)


async def beat(database: Database, me: Me) -> WorkerState:
    """LeaseLost if the heartbeat came too late: this worker is no more, and its runs are another's."""
    status = await database.value("beat", database.clock(), me.id)
    if status is None:
        raise LeaseLost(f"worker {me.name} was declared lost; its runs were given to others")
    return WorkerState(status)


async def claim(connection: Tx, now: datetime | None, me: Me, room: int) -> Claim:
    rows = await connection.fetch("claim_runs", now, me.id, room, me.actor)
    runs = [row for row in rows if row["id"] is not None]
    taken: dict[UUID, int] = {}
    shares: dict[UUID, int] = {}
    for row in rows:
        shares[row["lane"]] = row["share"]
        taken[row["lane"]] = taken.get(row["lane"], 0) + (row["id"] is not None)
    metrics.claimed.inc(len(runs))
    started = sum(row["fresh"] for row in runs)
    metrics.transition("run", RunState.PENDING, RunState.RUNNING).inc(started)
    # With the batch full a lane may have been cut short without being dry.
    full = len(runs) >= room
    dry = [lane for lane, share in shares.items() if taken[lane] == 0 or (taken[lane] < share and not full)]
    return Claim(runs, dry, len(shares))


async def rest(connection: Tx, lanes: list[UUID]) -> bool:
    """Put dry lanes to rest. False if one is being filled at this moment and has to be looked at again."""
    return all(row["rest_lane"] for row in await connection.fetch("rest_lanes", lanes))


async def leases_of(connection: Tx, now: datetime | None, me: Me) -> list[Row]:
    return await connection.fetch("leases_of", now, me.id)


async def reclaim_lost(database: Database, batch: int = 500) -> int:
    """Declare silent workers lost and put their runs back into the queue. Returns how many runs that were."""
    lost = await database.fetch("lose_workers", database.clock())
    for worker in lost:
        metrics.transitions["worker"].labels(WorkerState.RUNNING, WorkerState.TERMINATED).inc()
        log.warning("worker_lost", worker=worker["name"], last_heartbeat=worker["heartbeat_at"].isoformat())
    total = 0
    while stopped := [r["id"] for r in await database.fetch("stopped_with_leases")]:
        freed: list[Any] = await database.fetch("reclaim_runs", database.clock(), stopped, batch)
        if not freed:
            break
        for run in freed:
            log.warning(
                "orphan_detected", run_id=str(run["id"]), worker=run["worker"], resume_count=run["resume_count"],
                last_heartbeat=run["heartbeat_at"].isoformat(),
            )  # fmt: skip
        total += len(freed)
    metrics.orphans.inc(total)
    return total
