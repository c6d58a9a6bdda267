"""Workers and their supervisors: the current work of each, and the commands to it."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.views import state_history
from interlock.console.rendering import FormFields, Visit, Visitor, done, number_of, render, uuid_of
from interlock.engine.queueing import leases, workers
from interlock.engine.queueing.workers import DEFAULT_LABEL, Terms
from interlock.errors import NotFound
from interlock.ids import WorkerId, uuid7
from interlock.lifecycle import WORKER, WorkerEvent, WorkerState
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx

router = APIRouter()

_TOLD = {
    WorkerEvent.PAUSE: "Paused: it finishes the steps that it is at and takes no more.",
    WorkerEvent.RESUME: "It takes work again.",
    WorkerEvent.TERMINATE: "Terminated: its runs go to others.",
}


@router.get("/workers")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database = visit.services.database
    rows = [workers.seen_by(visit.who, row) for row in await database.fetch("list_workers", False)]
    hosts = await database.fetch("list_supervisors") if visit.who.is_operator else []
    return await render(
        request, visit, "workers.html", workers=[row for row in rows if row["stopped_at"] is None],
        gone=[row for row in rows if row["stopped_at"] is not None][:20], hosts=hosts, may=_may(visit), orders=_orders,
        live="/live/workers",
    )  # fmt: skip


@router.get("/workers/{worker_id}")
async def show(worker_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database, wanted = visit.services.database, uuid_of(worker_id, "worker")
    row = workers.seen_by(visit.who, await workers.get(database, WorkerId(wanted)))
    held = await database.fetch("held_by", wanted, visit.who.tenant_id, visit.who.workspace_id)
    history = workers.history_for(visit.who, await database.fetch("transitions_of", wanted))
    return await render(
        request, visit, "worker.html", worker=row, held=held, history=state_history(history), may=_may(visit),
        orders=_orders, live="/live/workers",
    )  # fmt: skip


def _may(visit: Visitor) -> bool:
    return visit.may(Permission.SUPERVISE) and visit.who.is_operator


def _orders(row: Row) -> list[WorkerEvent]:
    """Return the commands that a person can give the worker, limited to what its state machine allows."""
    return [event for event in WORKER.allowed(WorkerState(row["status"])) if event in _TOLD]


@router.post("/workers")
async def begin(visit: Visit, said: FormFields) -> Response:
    workers.require_supervisor(visit.who)
    found, worker_id = visit.services, uuid7()
    capacity = number_of(said.get("concurrency"), "concurrency") or found.settings.concurrency
    labels = tuple(said.get("labels", "").replace(",", " ").split()) or (DEFAULT_LABEL,)

    async def work(tx: Tx) -> Row:
        await workers.create(
            tx, visit.who.actor, Terms(capacity, labels), worker_id=WorkerId(worker_id),
            name=said.get("name"), host=said.get("host"), lease_seconds=found.settings.lease_seconds,
        )  # fmt: skip
        return await workers.start(tx, visit.who.actor, WorkerId(worker_id))

    row = await found.database.run_in_transaction(work)
    return done("/workers", f"{row['name']} is starting.")


@router.post("/workers/{worker_id}/{event}")
async def tell(worker_id: str, event: str, visit: Visit, said: FormFields) -> Response:
    workers.require_supervisor(visit.who)
    order = next((known for known in _TOLD if known == event), None)
    if order is None:
        raise NotFound(f"a worker can be told to {', '.join(_TOLD)}; not to {event}")
    await _tell(visit, WorkerId(uuid_of(worker_id, "worker")), order, said.get("reason"))
    return done("/workers", _TOLD[order])


async def _tell(visit: Visitor, worker_id: WorkerId, event: WorkerEvent, reason: str | None) -> None:
    found = visit.services

    async def work(tx: Tx) -> Any:
        return await workers.order(tx, visit.who.actor, worker_id, event, reason)

    await found.database.run_in_transaction(work)
    if event == WorkerEvent.TERMINATE:
        # After the commit, so that the worker's earlier writes are visible. If this process dies first, the sweep does
        # it.
        await leases.take_back(found.database)
