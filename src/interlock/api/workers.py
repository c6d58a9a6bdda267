"""/api/workers, /api/supervisor"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, Limit, idempotent_write, number_cursor, page
from interlock.api.views import dump, history_view, supervisor_view, worker_view
from interlock.engine.access.principal import DEFAULT_TENANT, Principal
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.queueing import leases, workers
from interlock.engine.queueing.workers import Terms
from interlock.errors import Forbidden
from interlock.ids import WorkerId, uuid7
from interlock.lifecycle import WorkerEvent
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.wire import JobHistoryEvent, NewWorker, Order, Page, SupervisorView, WorkerView

router = APIRouter(prefix="/api", tags=["workers"])


@router.get("/workers", response_model=Page[WorkerView])
async def list_workers(found: Ctx, who: Caller, all: bool = False) -> Response:
    """List the current workers, and those that left within the last hour; with `all`, all workers ever.

    Only the tenant `default`, which operates the workers, sees their hosts and messages.
    """
    who.require(Permission.READ)
    rows = await found.database.fetch("list_workers", all)
    return Json(page([workers.seen_by(who, row) for row in rows], len(rows), worker_view))


@router.get("/workers/{worker_id}", response_model=WorkerView)
async def show(worker_id: WorkerId, found: Ctx, who: Caller) -> Response:
    """Return a worker with its `state_history` and the location of its log on its host."""
    who.require(Permission.READ)
    row = workers.seen_by(who, await workers.get(found.database, worker_id))
    log = f"{row['log_dir']}/worker-{worker_id}.log" if row["log_dir"] else None
    history = workers.history_for(who, await found.database.fetch("transitions_of", worker_id))
    return Json(worker_view(row, history) | {"log": log})


@router.get("/workers/{worker_id}/events", response_model=Page[JobHistoryEvent])
async def events(
    worker_id: WorkerId, found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 500
) -> Response:
    """Return the history of a worker: its transitions, and the jobs that it was reserved for and released from."""
    who.require(Permission.READ)
    if not who.is_operator:
        raise Forbidden(f"what happened to workers is told to tenant {DEFAULT_TENANT}, which operates them")
    await workers.get(found.database, worker_id)
    rows = await found.database.fetch("history_of", worker_id, number_cursor(cursor), limit + 1)
    return Json(page(rows, limit, history_view, key="seq"))


@router.post("/workers", status_code=201, response_model=WorkerView)
async def create(request: Request, found: Ctx, who: Caller, body: NewWorker | None = None) -> Response:
    """Create a worker, which is `idle` until it is started. Its process runs on a supervised host."""
    workers.require_supervisor(who)
    body, worker_id = body or NewWorker(), uuid7()

    async def work(tx: Tx) -> StoredResponse:
        tenants = await workers.tenants_named(tx, body.tenants) if body.tenants else None
        capacity = body.concurrency or found.settings.concurrency
        terms = Terms(capacity, tuple(body.labels), tenants, body.workspace_id)
        row = await workers.create(
            tx, who.actor, terms, worker_id=WorkerId(worker_id), name=body.name, host=body.host,
            metadata=body.metadata, lease_seconds=found.settings.lease_seconds,
        )  # fmt: skip
        return await _answer(tx, row, 201)

    return await idempotent_write(found, who, request, work)


@router.post("/workers/{worker_id}/start", response_model=WorkerView)
async def start(worker_id: WorkerId, request: Request, found: Ctx, who: Caller, body: Order | None = None) -> Response:
    """Start the worker's process on a host with a supervisor, such as `interlock up` or `interlock supervise`."""
    workers.require_supervisor(who)
    reason = body.reason if body else None

    async def work(tx: Tx) -> StoredResponse:
        return await _answer(tx, await workers.start(tx, who.actor, worker_id, reason=reason))

    return await idempotent_write(found, who, request, work)


@router.get("/supervisor", response_model=Page[SupervisorView])
async def list_supervisors(found: Ctx, who: Caller) -> Response:
    """List the hosts on which workers can be started, and those that left within the last hour."""
    who.require(Permission.READ)
    if not who.is_operator:
        raise Forbidden(f"where workers run is told to tenant {DEFAULT_TENANT}, which operates them")
    rows = await found.database.fetch("list_supervisors")
    return Json(page(rows, len(rows), supervisor_view))


@router.post("/supervisor/workers/{worker_id}/pause", response_model=WorkerView)
async def pause(worker_id: WorkerId, request: Request, found: Ctx, who: Caller, body: Order | None = None) -> Response:
    """Pause a worker. It takes no new work and finishes its current steps; other workers continue its runs."""
    return await _order(found, who, request, worker_id, WorkerEvent.PAUSE, body)


@router.post("/supervisor/workers/{worker_id}/resume", response_model=WorkerView)
async def resume(worker_id: WorkerId, request: Request, found: Ctx, who: Caller, body: Order | None = None) -> Response:
    return await _order(found, who, request, worker_id, WorkerEvent.RESUME, body)


@router.post("/supervisor/workers/{worker_id}/terminate", response_model=WorkerView)
async def terminate(
    worker_id: WorkerId, request: Request, found: Ctx, who: Caller, body: Order | None = None
) -> Response:
    """Terminate a worker at once. It can write nothing more, its process ends, and other workers take its runs."""
    response = await _order(found, who, request, worker_id, WorkerEvent.TERMINATE, body)
    # After the commit, so that the worker's earlier writes are visible. If this process dies first, the sweep does it.
    await leases.take_back(found.database)
    return response


async def _order(
    found: AppContext, who: Principal, request: Request, worker_id: WorkerId, event: WorkerEvent, body: Order | None
) -> Response:
    workers.require_supervisor(who)
    reason = body.reason if body else None

    async def work(tx: Tx) -> StoredResponse:
        return await _answer(tx, await workers.order(tx, who.actor, worker_id, event, reason))

    return await idempotent_write(found, who, request, work)


async def _answer(tx: Tx, row: Row, status: int = 200) -> StoredResponse:
    return StoredResponse(status, dump(worker_view(row, await tx.fetch("transitions_of", row["id"]))))
