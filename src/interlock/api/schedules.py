"""/api/schedules"""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.services import Json, Limit, Services, Svc, Who, change, decode_cursor, page
from interlock.api.views import dump, run_view, schedule_view
from interlock.engine import runs, schedules
from interlock.engine.idempotency import Answer
from interlock.engine.outside import read_journal
from interlock.engine.principal import Principal
from interlock.governance.roles import Permission
from interlock.store.pool import Database, Row, Tx
from interlock.wire import Bare, NewSchedule, Page, Run, Schedule

router = APIRouter(prefix="/api/schedules", tags=["schedules"])


@router.post("", status_code=201, response_model=Schedule)
async def add(body: NewSchedule, request: Request, found: Svc, who: Who) -> Response:
    """A run for each slot of a cron expression. It acts with the key that adds it."""
    who.require(Permission.DEFINE)
    cron = schedules.read_cron(body.cron, body.timezone)
    await found.plans.current(who.tenant_id, body.workflow, None)

    async def work(tx: Tx) -> Answer:
        return Answer(201, dump(schedule_view(await schedules.add(tx, found.database, who, body, cron))))

    return await change(found, who, request, work)


@router.get("", response_model=Page[Schedule])
async def list_schedules(found: Svc, who: Who, cursor: str | None = None, limit: Limit = 100) -> Response:
    who.require(Permission.READ)
    rows = await schedules.listed(found.database, who, decode_cursor(cursor), limit + 1)
    return Json(page(rows, limit, schedule_view, key="name"))


@router.get("/{name}", response_model=Schedule)
async def show(name: str, found: Svc, who: Who) -> Response:
    who.require(Permission.READ)
    return Json(schedule_view(await schedules.named(found.database, found.database, who, name)))


@router.post("/{name}/pause", response_model=Schedule)
async def pause(name: str, request: Request, found: Svc, who: Who, body: Bare | None = None) -> Response:
    """No slot starts anything until it is resumed."""
    return await _change(found, who, request, name, schedules.pause)


@router.post("/{name}/resume", response_model=Schedule)
async def resume(name: str, request: Request, found: Svc, who: Who, body: Bare | None = None) -> Response:
    """From now on; the slots of the pause are not made up for. If its key was revoked, yours takes its place."""
    return await _change(found, who, request, name, schedules.resume)


@router.delete("/{name}", response_model=Schedule)
async def delete(name: str, request: Request, found: Svc, who: Who) -> Response:
    """Runs that were started go on."""
    return await _change(found, who, request, name, schedules.delete)


@router.post("/{name}/run", status_code=201, response_model=Run)
async def run_now(name: str, request: Request, found: Svc, who: Who, body: Bare | None = None) -> Response:
    """A run at once, besides the slots, paused or not."""
    who.require(Permission.START)
    asker, new = await schedules.prepare_now(found.database, found.plans, who, name)

    async def work(tx: Tx) -> Answer:
        await runs.start(tx, found.database, asker, new)
        row = await runs.get(tx, who, new.id)
        return Answer(201, dump(run_view(row, await read_journal(tx, found.plans, row))), new.id)

    return await change(found, who, request, work)


_Verb = Callable[[Tx, Database, Principal, str], Awaitable[Row]]


async def _change(found: Services, who: Principal, request: Request, name: str, verb: _Verb) -> Response:
    who.require(Permission.DEFINE)

    async def work(tx: Tx) -> Answer:
        return Answer(200, dump(schedule_view(await verb(tx, found.database, who, name))))

    return await change(found, who, request, work)
