"""Workers: the commands from people, supervisors and the workers themselves, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from interlock.engine.access.principal import DEFAULT_TENANT, Principal
from interlock.errors import Conflict, Forbidden, Invalid, InvalidTransition, LeaseLost, NotFound
from interlock.ids import SupervisorId, TenantId, WorkerId, uuid7
from interlock.journal import encode
from interlock.lifecycle import WORKER, WorkerEvent, WorkerState
from interlock.policy.roles import Permission
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log, metrics

# The pool of runs without a label, and of workers without one.
DEFAULT_LABEL = "default"
# The actor that ends silent workers. A worker that was only slow registers again under another id.
SWEEP = "system:sweep"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a worker serves, and its capacity. `tenants` is None if it serves all."""

    capacity: int
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    tenants: tuple[TenantId, ...] | None = None
    workspace_id: str | None = None


def seen_by(who: Principal, row: Row) -> Row:
    """Return a worker's row without its host, tenants and messages, unless the caller operates the installation."""
    if who.is_operator:
        return row
    own_job = row["job_id"] if row["job_tenant"] == who.tenant_id else None
    hidden = ("host", "pid", "reason", "tenants", "workspace_id", "supervisor_id", "log_dir")
    return {**row, **dict.fromkeys(hidden), "metadata": "{}", "job_id": own_job}


def history_for(who: Principal, rows: list[Row]) -> list[Row]:
    return rows if who.is_operator else [{**row, "reason": None, "actor": "system"} for row in rows]


def require_supervisor(who: Principal) -> None:
    """Raise unless the caller may supervise workers. An operator of one tenant must not stop the workers of others."""
    who.require(Permission.SUPERVISE)
    if not who.is_operator:
        raise Forbidden(f"workers are supervised by operators and admins of tenant {DEFAULT_TENANT}")


async def create(
    tx: Tx | Database, actor: str, terms: Terms, *,
    worker_id: WorkerId | None = None, name: str | None = None, host: str | None = None, pid: int | None = None,
    supervisor_id: SupervisorId | None = None, metadata: dict[str, Any] | None = None, lease_seconds: float,
) -> Row:  # fmt: skip
    worker_id = worker_id or WorkerId(uuid7())
    row = await tx.row(
        "register_worker", worker_id, name or f"worker-{worker_id.hex[-6:]}", host, pid,
        terms.capacity, lease_seconds, terms.labels, terms.tenants, terms.workspace_id, supervisor_id, actor,
        encode(metadata or {}),
    )  # fmt: skip
    return row or await get(tx, worker_id)  # an earlier try of the same call succeeded


async def get(tx: Tx | Database, worker_id: WorkerId) -> Row:
    return _found(await tx.row("get_worker", worker_id), worker_id)


async def start(tx: Tx, actor: str, worker_id: WorkerId, *, host: str | None = None, reason: str | None = None) -> Row:
    """Assign a requested worker to a supervisor, which starts its process."""
    row = _found(await tx.row("lock_worker", worker_id), worker_id)
    _check(row, WorkerEvent.START)
    chosen = await tx.row("choose_supervisor", host or row["host"])
    if chosen is None:
        where = f"on host {host or row['host']}" if host or row["host"] else "anywhere"
        raise Conflict(
            f"no supervisor is running {where}; start one with `interlock supervise`, or `interlock up`",
            code="NO_SUPERVISOR",
        )
    await tx.fetch("assign_worker", worker_id, chosen["id"], chosen["host"])
    return await _move(tx, row, WorkerEvent.START, actor, reason)


async def order(tx: Tx, actor: str, worker_id: WorkerId, event: WorkerEvent, reason: str | None = None) -> Row:
    """Apply any event of the table. The worker's process is notified, and also asks every second."""
    row = _found(await tx.row("lock_worker", worker_id), worker_id)
    _check(row, event)
    return await _move(tx, row, event, actor, reason)


async def report(
    database: Database, worker_id: WorkerId, event: WorkerEvent, actor: str, reason: str | None = None
) -> Row:
    """Record an event that a worker or its supervisor reports. A repeated report changes nothing."""

    async def work(tx: Tx) -> Row:
        row = _found(await tx.row("lock_worker", worker_id), worker_id)
        state = WorkerState(row["status"])
        if any(t.event == event and t.target == state for t in WORKER.transitions()):
            return row  # an earlier try of the same call succeeded
        if state == WorkerState.TERMINATED:
            raise LeaseLost(f"worker {row['name']} was terminated; its runs were given to others")
        return await _move(tx, row, event, actor, reason)

    return await database.run_in_transaction(work)


async def end(database: Database, worker_id: WorkerId, event: WorkerEvent, actor: str, reason: str) -> None:
    """End the worker as completed or failed. A worker that is paused or never began is terminated instead.

    The caller knows that no tool of its process acts any more.
    """

    async def work(tx: Tx) -> None:
        row = _found(await tx.row("lock_worker", worker_id), worker_id)
        state = WorkerState(row["status"])
        if state not in WORKER.terminal:
            possible = event in WORKER.allowed(state)
            await _move(tx, row, event if possible else WorkerEvent.TERMINATE, actor, reason)
        await tx.fetch("note_cannot_act", worker_id)

    await database.run_in_transaction(work)


async def note_cannot_act(database: Database, worker_id: WorkerId) -> bool:
    """Record that the worker has ended and that none of its tools acts any more.

    Its runs then need not wait for its lease to end.

    Returns False if they do not wait for that.
    """
    return bool(await database.fetch("note_cannot_act", worker_id, patience=2))


async def bury(database: Database, worker_id: WorkerId, actor: str, reason: str) -> None:
    """End a worker whose process is gone. If the process died before it registered, record its start first."""
    row = await get(database, worker_id)
    if row["status"] == WORKER.initial:
        await report(database, worker_id, WorkerEvent.START, actor)
    await end(database, worker_id, WorkerEvent.FAIL, actor, reason)


async def tenants_named(tx: Tx | Database, names: Sequence[str]) -> tuple[TenantId, ...]:
    found = {row["name"]: row["id"] for row in await tx.fetch("tenants_named", list(names))}
    if unknown := [name for name in names if name not in found]:
        raise Invalid(f"no tenant {', '.join(unknown)}; a worker serves tenants that exist", code="TENANT_NOT_FOUND")
    return tuple(found[name] for name in names)


def _found(row: Row | None, worker_id: WorkerId) -> Row:
    if row is None:
        raise NotFound(f"no worker {worker_id}", code="WORKER_NOT_FOUND")
    return row


def _check(row: Row, event: WorkerEvent) -> None:
    try:
        WORKER.move(WorkerState(row["status"]), event)
    except InvalidTransition:
        metrics.refused.labels("worker", row["status"], event).inc()
        raise


async def _move(tx: Tx, row: Row, event: WorkerEvent, actor: str, reason: str | None) -> Row:
    state = WorkerState(row["status"])
    target = WORKER.move(state, event)
    moved = await tx.row(
        "move_worker", row["id"], target, reason, target in WORKER.terminal, state, event, actor,
        row["job_id"] if target != WorkerState.RUNNING else None,
    )  # fmt: skip
    assert moved is not None
    about = {"worker": row["name"], "from_state": state, "to_state": target, "actor": actor, "reason": reason}

    def tell() -> None:
        metrics.transition("worker", state, target).inc()
        metrics.was_in("worker", state, moved["seconds_before"])
        log.info("worker_transition", **about)

    tx.on_commit(tell)
    return moved
