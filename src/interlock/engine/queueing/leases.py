"""Leases: which worker may act on a run, and until when."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID, uuid5

from interlock.engine.proof.instrumentation import log_run_move
from interlock.engine.queueing import workers
from interlock.engine.queueing.workers import DEFAULT_LABEL, SWEEP, Terms
from interlock.errors import LeaseLost
from interlock.ids import JobId, QueueId, RunId, TenantId, WorkerId, uuid7
from interlock.lifecycle import RunState, WorkerEvent, WorkerState
from interlock.store import sql
from interlock.store.pool import Database, Executor, Row, Tx
from interlock.store.records import ClaimableQueue, ClaimedRun, DispatchSlot, QueueShare, from_json
from interlock.telemetry import detail, log, metrics


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """This process as the database knows it. A lost worker never returns under the same id."""

    id: WorkerId
    name: str

    @property
    def actor(self) -> str:
        return f"worker:{self.name}"


# The identity of a process before it has registered.
UNREGISTERED = WorkerIdentity(WorkerId(UUID(int=0)), "")


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What the database wants of a worker. A worker reserved for a job serves only that job."""

    status: WorkerState
    job_id: JobId | None = None


async def register(
    database: Database, *, capacity: int, lease_seconds: float, labels: tuple[str, ...] = (DEFAULT_LABEL,),
    tenants: tuple[TenantId, ...] | None = None,
) -> WorkerIdentity:  # fmt: skip
    host = socket.gethostname()
    worker_id = WorkerId(uuid7())
    me = WorkerIdentity(worker_id, f"{host}-{os.getpid()}-{worker_id.hex[-4:]}")
    terms = Terms(capacity, labels, tenants)
    await workers.create(
        database, me.actor, terms, worker_id=me.id, name=me.name, host=host, pid=os.getpid(),
        lease_seconds=lease_seconds,
    )  # fmt: skip
    log.info("worker_registered", worker=me.name, capacity=capacity)
    return me


async def adopt(database: Database, worker_id: WorkerId) -> tuple[WorkerIdentity, Row]:
    """Become the worker that a supervisor started this process for."""
    row = await database.row("adopt_worker", worker_id, os.getpid(), socket.gethostname())
    if row is None:
        raise LeaseLost(f"worker {worker_id} was stopped before its process was there")
    log.info("worker_registered", worker=row["name"], capacity=row["capacity"])
    return WorkerIdentity(row["id"], row["name"]), row


async def move_worker(database: Database, worker_id: WorkerId, event: WorkerEvent, reason: str | None = None) -> Row:
    """Apply an event that the worker reports about itself."""
    return await workers.report(database, worker_id, event, f"worker:{worker_id}", reason)


async def heartbeat(tx: Tx | Database, me: WorkerIdentity) -> DesiredState:
    """Renew the worker's lease. Raise LeaseLost if the heartbeat came too late or the worker must end."""
    row = await tx.row("beat", me.id)
    if row is None:
        raise LeaseLost(f"worker {me.name} was declared lost; its runs were given to others")
    return DesiredState(WorkerState(row["status"]), row["job_id"])


def share_out(queues: Sequence[ClaimableQueue], room: int) -> list[QueueShare]:
    """Return how many runs to take from each queue, by weight: the queue with the least virtual time comes first.

    A queue that got ahead because others were locked when it was served gets little until they are level, but not
    nothing: the queue behind may have a cap and never catch up. The remainder of rounding down goes to the queues that
    are next in turn, so that small batches add up to the weights too.
    """
    if not queues:
        return []
    ahead = queues[0].virtual_time + room / sum(queue.weight for queue in queues)
    pulls = [queue.weight * (0.1 if queue.virtual_time > ahead else 1) for queue in queues]
    whole = [int(room * pull / sum(pulls)) for pull in pulls]
    rest = room - sum(whole)
    taken: dict[TenantId, int] = {}
    shares = []
    for number, queue in enumerate(queues):
        runs = whole[number] + (number < rest)
        if queue.places is not None:
            runs = min(runs, queue.places)
        if queue.places_of_tenant is not None:
            runs = min(runs, queue.places_of_tenant - taken.get(queue.tenant_id, 0))
        if runs > 0:
            taken[queue.tenant_id] = taken.get(queue.tenant_id, 0) + runs
            shares.append(QueueShare(queue.id, runs))
    return shares


async def claim(
    tx: Executor, me: WorkerIdentity, room: int, pool: str = DEFAULT_LABEL, tenants: Sequence[TenantId] | None = None
) -> list[ClaimedRun] | None:
    """Lease ready runs to this worker, at most `room`. Return None if no queue of the pool has work.

    The result is empty if other transactions have locked the queues that have work.
    """
    queues = await sql.claimable_queues(tx, pool=pool, tenants=tenants, most=room)
    if not queues:
        return None
    shares = share_out(queues, room)
    runs = await sql.claim_runs(tx, worker_id=me.id, actor=me.actor, pool=pool, shares=shares)
    metrics.claimed.inc(len(runs))
    metrics.transition("run", RunState.PENDING, RunState.RUNNING).inc(sum(run.is_new for run in runs))
    if detail.wanted:
        for run in runs:
            if run.is_new:
                log_run_move(run.id, RunState.PENDING, RunState.RUNNING, me.actor)
    return runs


async def offer_slot(tx: Executor, slot: DispatchSlot) -> None:
    await sql.open_dispatch_slot(
        tx, worker_id=slot.worker_id, actor=slot.actor, channel=slot.channel, tenants=slot.tenants
    )


async def close_slot(tx: Executor, me: WorkerIdentity) -> bool:
    """Return False if the slot is gone because a run was put into it."""
    return await sql.close_dispatch_slot(tx, worker_id=me.id) is not None


def dispatched(payload: str, me: WorkerIdentity) -> ClaimedRun | None:
    """Return the run put into our slot, as a claim would. Return None if it was for our earlier identity."""
    run = from_json(ClaimedRun, payload)
    if run.lease_worker != me.id:
        return None
    metrics.claimed.inc()
    metrics.transition("run", RunState.PENDING, RunState.RUNNING).inc()
    if detail.wanted:
        log_run_move(run.id, RunState.PENDING, RunState.RUNNING, me.actor)
    return run


async def leases_of(tx: Executor, me: WorkerIdentity) -> list[ClaimedRun]:
    return await sql.leases_of(tx, worker_id=me.id)


async def hand_back(tx: Executor, me: WorkerIdentity, run_id: RunId, token: int) -> None:
    """Requeue the run, which another worker may be able to continue. Do nothing if this worker lost it."""
    await sql.hand_back(tx, worker_id=me.id, run_id=run_id, token=token)


def label_queue(tenant_id: TenantId, label: str) -> QueueId:
    """Return the id of a tenant's queue for a label."""
    return QueueId(uuid5(tenant_id, label))


async def reclaim_lost(database: Database, batch: int = 500) -> int:
    """Declare silent workers lost and requeue their runs. Return the number of those runs."""
    lost = await database.fetch("lose_workers", SWEEP)
    for worker in lost:
        metrics.transition("worker", worker["before"], WorkerState.TERMINATED).inc()
        metrics.was_in("worker", worker["before"], worker["seconds_before"])
        log.warning("worker_lost", worker=worker["name"], last_heartbeat=worker["heartbeat_at"].isoformat())
    await sql.clear_dispatch_slots(database)
    await database.fetch("lose_supervisors")
    return await take_back(database, batch)


async def take_back(database: Database, batch: int = 500) -> int:
    """Requeue the runs of workers that ended, once their processes can no longer act.

    Their end was committed, so they write no more. But a tool of a process that is cut off from the database may
    still be running until the process's lease ends, see `worker.may_act_until`.
    """
    total = 0
    while stopped := [r["id"] for r in await database.fetch("stopped_with_leases")]:
        freed = await sql.reclaim_runs(database, worker_ids=stopped, most=batch)
        if not freed:
            break
        for run in freed:
            log.warning(
                "orphan_detected", run_id=str(run.run_id), worker=run.worker, resume_count=run.resume_count,
                last_heartbeat=run.heartbeat_at.isoformat(),
            )  # fmt: skip
        total += len(freed)
    metrics.orphans.inc(total)
    return total
