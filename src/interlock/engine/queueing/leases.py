"""Leases: which worker may act on a run, and until when."""

import os
import socket
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

import orjson

from interlock.engine.proof.instrumentation import log_run_move
from interlock.engine.queueing import workers
from interlock.engine.queueing.workers import DEFAULT_LABEL, SWEEP, Terms
from interlock.errors import LeaseLost
from interlock.ids import uuid7
from interlock.lifecycle import RunState, WorkerEvent, WorkerState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import detail, log, metrics


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """This process as the database knows it. A lost worker never returns under the same id."""

    id: UUID
    name: str

    @property
    def actor(self) -> str:
        return f"worker:{self.name}"


# The identity of a process before it has registered.
UNREGISTERED = WorkerIdentity(UUID(int=0), "")


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What the database wants of a worker. A worker reserved for a job serves only that job."""

    status: WorkerState
    job_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """`dry`: lanes that gave less than their share."""

    runs: list[Row]
    dry: list[UUID]
    lanes: int


async def register(
    database: Database, *, capacity: int, lease_seconds: float, labels: tuple[str, ...] = (DEFAULT_LABEL,),
    tenants: tuple[UUID, ...] | None = None,
) -> WorkerIdentity:  # fmt: skip
    host = socket.gethostname()
    worker_id = uuid7()
    me = WorkerIdentity(worker_id, f"{host}-{os.getpid()}-{worker_id.hex[-4:]}")
    terms = Terms(capacity, labels, tenants)
    await workers.create(
        database, database, me.actor, terms, worker_id=me.id, name=me.name, host=host, pid=os.getpid(),
        lease_seconds=lease_seconds,
    )  # fmt: skip
    log.info("worker_registered", worker=me.name, capacity=capacity)
    return me


async def adopt(database: Database, worker_id: UUID) -> tuple[WorkerIdentity, Row]:
    """Become the worker that a supervisor started this process for."""
    row = await database.row("adopt_worker", database.clock(), worker_id, os.getpid(), socket.gethostname())
    if row is None:
        raise LeaseLost(f"worker {worker_id} was stopped before its process was there")
    log.info("worker_registered", worker=row["name"], capacity=row["capacity"])
    return WorkerIdentity(row["id"], row["name"]), row


async def move_worker(database: Database, worker_id: UUID, event: WorkerEvent, reason: str | None = None) -> Row:
    """Apply an event that the worker reports about itself."""
    return await workers.report(database, worker_id, event, f"worker:{worker_id}", reason)


async def heartbeat(tx: Tx | Database, now: datetime | None, me: WorkerIdentity) -> DesiredState:
    """Renew the worker's lease. Raise LeaseLost if the heartbeat came too late or the worker must end."""
    row = await tx.row("beat", now, me.id)
    if row is None:
        raise LeaseLost(f"worker {me.name} was declared lost; its runs were given to others")
    return DesiredState(WorkerState(row["status"]), row["job_id"])


async def claim(
    connection: Tx, now: datetime | None, me: WorkerIdentity, room: int, pool: str = DEFAULT_LABEL,
    tenants: tuple[UUID, ...] | None = None,
) -> Claim:  # fmt: skip
    rows = await connection.fetch("claim_runs", now, me.id, room, me.actor, pool, tenants)
    runs = [row for row in rows if row["id"] is not None]
    taken: dict[UUID, int] = {}
    shares: dict[UUID, int] = {}
    for row in rows:
        shares[row["lane"]] = row["share"]
        taken[row["lane"]] = taken.get(row["lane"], 0) + (row["id"] is not None)
    metrics.claimed.inc(len(runs))
    started = sum(row["fresh"] for row in runs)
    metrics.transition("run", RunState.PENDING, RunState.RUNNING).inc(started)
    if detail.wanted:
        for row in runs:
            if row["fresh"]:
                log_run_move(row["id"], RunState.PENDING, RunState.RUNNING, me.actor)
    # If the batch is full, a lane may have been cut short without being dry.
    full = len(runs) >= room
    dry = [lane for lane, share in shares.items() if taken[lane] == 0 or (taken[lane] < share and not full)]
    return Claim(runs, dry, len(shares))


# The columns of a run that was started into a dispatch slot, as a claim would return them.
_SEATED: Row = {
    "status": RunState.RUNNING, "seq": 2, "lease_token": 1, "inbox": 0, "fresh": True, "lost": False,
    "parent_run_id": None, "session_id": None, "session_run": None, "auto_approve": False, "side_id": None,
    "job_id": None, "root_id": None, "cost_usd": 0, "seated": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DispatchSlot:
    """The channel on which a worker receives a dispatched run, and the tenants it accepts.

    See `start_run` in 0005_queue.sql.
    """

    actor: str
    channel: str
    tenants: tuple[UUID, ...] | None


async def offer_slot(connection: Tx, me: WorkerIdentity, seat: DispatchSlot) -> None:
    await connection.fetch("open_seat", me.id, seat.actor, seat.channel, seat.tenants)


async def close_seat(connection: Tx, me: WorkerIdentity) -> bool:
    """Return False if the slot is gone because a run was put into it."""
    return await connection.value("close_seat", me.id) is not None


def dispatched(payload: str, me: WorkerIdentity) -> Row | None:
    """Return the run put into our slot, as a claim would. Return None if it was for our earlier identity."""
    given = orjson.loads(payload)
    if given["lease_worker"] != str(me.id):
        return None
    at, deadline = datetime.fromisoformat(given["at"]), given["deadline_at"]
    run_id = UUID(given["id"])
    metrics.claimed.inc()
    metrics.transition("run", RunState.PENDING, RunState.RUNNING).inc()
    if detail.wanted:
        log_run_move(run_id, RunState.PENDING, RunState.RUNNING, me.actor)
    return {
        **_SEATED, **given, "id": run_id, "tenant_id": UUID(given["tenant_id"]), "now": at, "created_at": at,
        "started_at": at, "deadline_at": datetime.fromisoformat(deadline) if deadline else None,
    }  # fmt: skip


async def rest(connection: Tx, lanes: list[UUID]) -> bool:
    """Deactivate dry lanes. Return False if a lane is being filled at this moment and must be looked at again."""
    return all(row["rest_lane"] for row in await connection.fetch("rest_lanes", lanes))


async def leases_of(connection: Tx, now: datetime | None, me: WorkerIdentity) -> list[Row]:
    return await connection.fetch("leases_of", now, me.id)


async def hand_back(tx: Tx | Database, me: WorkerIdentity, run_id: UUID, token: int) -> None:
    """Requeue the run, which another worker may be able to continue. Do nothing if this worker lost it."""
    await tx.fetch("hand_back", me.id, run_id, token)


async def claims_in_vain(database: Database, run_id: UUID, token: int) -> int:
    vain: int = await database.value("claims_in_vain", run_id, token)
    return vain


def label_lane(tenant_id: UUID, label: str) -> UUID:
    """Return the id of a tenant's lane for a label."""
    return uuid5(tenant_id, label)


async def reclaim_lost(database: Database, batch: int = 500) -> int:
    """Declare silent workers lost and requeue their runs. Return the number of those runs."""
    lost = await database.fetch("lose_workers", database.clock(), SWEEP)
    for worker in lost:
        metrics.transition("worker", worker["before"], WorkerState.TERMINATED).inc()
        metrics.was_in("worker", worker["before"], worker["seconds_before"])
        log.warning("worker_lost", worker=worker["name"], last_heartbeat=worker["heartbeat_at"].isoformat())
    await database.fetch("clear_seats")
    await database.fetch("lose_supervisors", database.clock())
    return await take_back(database, batch)


async def take_back(database: Database, batch: int = 500) -> int:
    """Requeue the runs of workers that ended, once their processes can no longer act.

    Their end was committed, so they write no more. But a tool of a process that is cut off from the database may
    still be running until the process's lease ends, see `worker.may_act_until`.
    """
    total = 0
    while stopped := [r["id"] for r in await database.fetch("stopped_with_leases", database.clock())]:
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
