"""Workers: what they are told, by people, by their supervisor and by themselves, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from interlock.engine.principal import DEFAULT_TENANT, Principal
from interlock.errors import Conflict, Forbidden, Invalid, InvalidTransition, LeaseLost, NotFound
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.lifecycle import WORKER, WorkerEvent, WorkerState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log, metrics

# Runs that ask for nothing are in this pool; so are workers that were told nothing.
DEFAULT_LABEL = "default"
# Who ends workers that fell silent. They may have been slow and not dead, and then begin again as another.
SWEEP = "system:sweep"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a worker serves, and how much of it at a time. `tenants` None: everybody's."""

    capacity: int
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    tenants: tuple[UUID, ...] | None = None
    workspace_id: str | None = None


def seen_by(who: Principal, row: Row) -> Row:
    """A worker as others than its operators see it: that it is there, and not where, for whom or what it said."""
    if who.is_operator:
        return row
    own_job = row["job_id"] if row["job_tenant"] == who.tenant_id else None
    hidden = ("host", "pid", "reason", "tenants", "workspace_id", "supervisor_id", "log_dir")
    return {**row, **dict.fromkeys(hidden), "job_id": own_job}


def history_for(who: Principal, rows: list[Row]) -> list[Row]:
    return rows if who.is_operator else [{**row, "reason": None, "actor": "system"} for row in rows]


def require_supervisor(who: Principal) -> None:
    """One tenant's operator cannot stop them for the others."""
    who.require(Permission.SUPERVISE)
    if not who.is_operator:
        raise Forbidden(f"workers are supervised by operators and admins of tenant {DEFAULT_TENANT}")


async def create(
    tx: Tx | Database, database: Database, actor: str, terms: Terms, *,
    worker_id: UUID | None = None, name: str | None = None, host: str | None = None, pid: int | None = None,
    supervisor_id: UUID | None = None, lease_seconds: float,
) -> Row:  # fmt: skip
    worker_id = worker_id or uuid7()
    row = await tx.row(
        "register_worker", database.clock(), worker_id, name or f"worker-{worker_id.hex[-6:]}", host, pid,
        terms.capacity, lease_seconds, terms.labels, terms.tenants, terms.workspace_id, supervisor_id, actor,
    )  # fmt: skip
    return row or await get(tx, worker_id)  # an earlier try of the same call got through


async def get(tx: Tx | Database, worker_id: UUID) -> Row:
    return _found(await tx.row("get_worker", worker_id), worker_id)


async def start(
    tx: Tx, database: Database, actor: str, worker_id: UUID, *, host: str | None = None, reason: str | None = None
) -> Row:
    """Hand a worker that was asked for to a supervisor, who gives it a process."""
    row = _found(await tx.row("lock_worker", worker_id), worker_id)
    _check(row, WorkerEvent.START)
    chosen = await tx.row("choose_supervisor", database.clock(), host or row["host"])
    if chosen is None:
        where = f"on host {host or row['host']}" if host or row["host"] else "anywhere"
        raise Conflict(
            f"no supervisor is running {where}; start one with `interlock supervise`, or `interlock up`",
            code="NO_SUPERVISOR",
        )
    await tx.fetch("assign_worker", worker_id, chosen["id"], chosen["host"])
    return await _move(tx, database, row, WorkerEvent.START, actor, reason)


async def order(
    tx: Tx, database: Database, actor: str, worker_id: UUID, event: WorkerEvent, reason: str | None = None
) -> Row:
    """Any event of the table. Its process is told by notification, and asks by itself every second."""
    row = _found(await tx.row("lock_worker", worker_id), worker_id)
    _check(row, event)
    return await _move(tx, database, row, event, actor, reason)


async def report(database: Database, worker_id: UUID, event: WorkerEvent, actor: str, reason: str | None = None) -> Row:
    """A worker or its supervisor says what happened to it. Said twice it is said once."""

    async def work(tx: Tx) -> Row:
        row = _found(await tx.row("lock_worker", worker_id), worker_id)
        state = WorkerState(row["status"])
        if any(t.event == event and t.target == state for t in WORKER.transitions()):
            return row  # an earlier try of the same call got through
        if state == WorkerState.TERMINATED:
            raise LeaseLost(f"worker {row['name']} was terminated; its runs were given to others")
        return await _move(tx, database, row, event, actor, reason)

    return await database.command(work)


async def end(database: Database, worker_id: UUID, event: WorkerEvent, actor: str, reason: str) -> None:
    """It completed or failed; one that is paused or never began can do neither, and is terminated."""

    async def work(tx: Tx) -> None:
        row = _found(await tx.row("lock_worker", worker_id), worker_id)
        state = WorkerState(row["status"])
        if state not in WORKER.terminal:
            possible = event in WORKER.allowed(state)
            await _move(tx, database, row, event if possible else WorkerEvent.TERMINATE, actor, reason)

    await database.command(work)


async def bury(database: Database, worker_id: UUID, actor: str, reason: str) -> None:
    """Its process is gone. If that was before it could say that it is there, it was started all the same."""
    row = await get(database, worker_id)
    if row["status"] == WORKER.initial:
        await report(database, worker_id, WorkerEvent.START, actor)
    await end(database, worker_id, WorkerEvent.FAIL, actor, reason)


async def tenants_named(tx: Tx | Database, names: Sequence[str]) -> tuple[UUID, ...]:
    found = {row["name"]: row["id"] for row in await tx.fetch("tenants_named", list(names))}
    if unknown := [name for name in names if name not in found]:
        raise Invalid(f"no tenant {', '.join(unknown)}; a worker serves tenants that exist", code="TENANT_NOT_FOUND")
    return tuple(found[name] for name in names)


def _found(row: Row | None, worker_id: UUID) -> Row:
    if row is None:
        raise NotFound(f"no worker {worker_id}", code="WORKER_NOT_FOUND")
    return row


def _check(row: Row, event: WorkerEvent) -> None:
    try:
        WORKER.move(WorkerState(row["status"]), event)
    except InvalidTransition:
        metrics.refused.labels("worker", row["status"], event).inc()
        raise


async def _move(tx: Tx, database: Database, row: Row, event: WorkerEvent, actor: str, reason: str | None) -> Row:
    state = WorkerState(row["status"])
    target = WORKER.move(state, event)
    moved = await tx.row(
        "move_worker", database.clock(), row["id"], target, reason, target in WORKER.terminal, state, event, actor,
        row["job_id"] if target != WorkerState.RUNNING else None,
    )  # fmt: skip
    assert moved is not None
    about = {"worker": row["name"], "from_state": state, "to_state": target, "actor": actor, "reason": reason}

    def tell() -> None:
        metrics.transition("worker", state, target).inc()
        metrics.was_in("worker", state, moved["seconds_before"])
        log.info("worker_transition", **about)

    tx.afterwards(tell)
    return moved
