"""/api/schedules"""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, Limit, decode_cursor, idempotent_write, page
from interlock.api.views import dump, run_view, schedule_view
from interlock.engine.access.principal import Principal
from interlock.engine.ingress import schedules
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.runs import runs
from interlock.engine.writing.load import load_journal
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.wire import EmptyBody, NewSchedule, Page, Run, Schedule

router = APIRouter(prefix="/api/schedules", tags=["schedules"])


@router.post("", status_code=201, response_model=Schedule)
async def add(body: NewSchedule, request: Request, found: Ctx, who: Caller) -> Response:
    """Create a schedule: a run for each slot of a cron expression. It acts with the key that creates it."""
    who.require(Permission.DEFINE)
    cron = schedules.read_cron(body.cron, body.timezone)
    await found.plans.current(who.tenant_id, body.workflow, None)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(201, dump(schedule_view(await schedules.add(tx, found.database, who, body, cron))))

    return await idempotent_write(found, who, request, work)


@router.get("", response_model=Page[Schedule])
async def list_schedules(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    who.require(Permission.READ)
    rows = await schedules.listed(found.database, who, decode_cursor(cursor), limit + 1)
    return Json(page(rows, limit, schedule_view, key="name"))


@router.get("/{name}", response_model=Schedule)
async def show(name: str, found: Ctx, who: Caller) -> Response:
    who.require(Permission.READ)
    return Json(schedule_view(await schedules.named(found.database, who, name)))


@router.post("/{name}/pause", response_model=Schedule)
async def pause(name: str, request: Request, found: Ctx, who: Caller, body: EmptyBody | None = None) -> Response:
    """Pause a schedule. No slot starts a run until it is resumed."""
    return await _change(found, who, request, name, schedules.pause)


@router.post("/{name}/resume", response_model=Schedule)
async def resume(name: str, request: Request, found: Ctx, who: Caller, body: EmptyBody | None = None) -> Response:
    """Resume a schedule from now on; slots missed during the pause are skipped.

    If its key was revoked, the caller's key replaces it.
    """
    return await _change(found, who, request, name, schedules.resume)


@router.delete("/{name}", response_model=Schedule)
async def delete(name: str, request: Request, found: Ctx, who: Caller) -> Response:
    """Delete a schedule. Runs that were started continue."""
    return await _change(found, who, request, name, schedules.delete)


@router.post("/{name}/run", status_code=201, response_model=Run)
async def run_now(name: str, request: Request, found: Ctx, who: Caller, body: EmptyBody | None = None) -> Response:
    """Start a run now, in addition to the slots, even if the schedule is paused."""
    who.require(Permission.START)
    asker, new = await schedules.prepare_now(found.database, found.plans, who, name)

    async def work(tx: Tx) -> StoredResponse:
        await runs.start(tx, asker, new)
        row = await runs.get(tx, who, new.id)
        journal = await load_journal(tx, found.plans, row)
        return StoredResponse(201, dump(run_view(row, journal, found.policies.hidden)), new.id)

    return await idempotent_write(found, who, request, work)


_Verb = Callable[[Tx, Principal, str], Awaitable[Row]]


async def _change(found: AppContext, who: Principal, request: Request, name: str, verb: _Verb) -> Response:
    who.require(Permission.DEFINE)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(schedule_view(await verb(tx, who, name))))

    return await idempotent_write(found, who, request, work)
