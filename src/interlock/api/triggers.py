"""/api/triggers"""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.services import YAML, Json, Limit, Svc, Who, change, decode_cursor, page
from interlock.api.views import dump, trigger_definition_view
from interlock.definition.trigger import Event, TriggerKind, load, parse
from interlock.engine import triggers
from interlock.engine.idempotency import Answer
from interlock.governance.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.wire import Page, StoredTrigger, TestTrigger, Tried

router = APIRouter(prefix="/api/triggers", tags=["triggers"])


@router.post("", status_code=201, response_model=StoredTrigger, openapi_extra=YAML)
async def apply(request: Request, found: Svc, who: Who) -> Response:
    """Apply a trigger, as YAML or JSON. One of the same name is replaced. It acts with the key that applies it."""
    who.require(Permission.DEFINE)
    trigger = parse(await request.body(), file=request.headers.get("x-file-name", "trigger"))
    await triggers.check(found.database, found.plans, who, trigger)

    async def work(tx: Tx) -> Answer:
        row = await triggers.apply(tx, found.database, who, trigger)
        return Answer(201, dump(_view(row, who.tenant)))

    return await change(found, who, request, work)


@router.get("", response_model=Page[StoredTrigger])
async def list_triggers(found: Svc, who: Who, cursor: str | None = None, limit: Limit = 100) -> Response:
    who.require(Permission.READ)
    rows = await triggers.listed(found.database, who, decode_cursor(cursor), limit + 1)
    return Json(page(rows, limit, lambda row: _view(row, who.tenant), key="name"))


@router.get("/{name}", response_model=StoredTrigger)
async def show(name: str, found: Svc, who: Who) -> Response:
    who.require(Permission.READ)
    row = await triggers.named(found.database, who, name)
    return Json(_view(row, who.tenant) | {"source": orjson.loads(row["source"])})


@router.delete("/{name}", response_model=StoredTrigger)
async def delete(name: str, request: Request, found: Svc, who: Who) -> Response:
    """Deliveries are answered with 404 from then on. Runs that were started go on."""
    who.require(Permission.DEFINE)

    async def work(tx: Tx) -> Answer:
        return Answer(200, dump(_view(await triggers.delete(tx, who, name), who.tenant)))

    return await change(found, who, request, work)


@router.post("/{name}/test", response_model=Tried)
async def test(name: str, body: TestTrigger, found: Svc, who: Who) -> Response:
    """What an event would start, and with which input. Nothing is started."""
    who.require(Permission.READ)
    row = await triggers.named(found.database, who, name)
    trigger = load(orjson.loads(row["source"]))
    return Json(triggers.try_out(trigger, _event(trigger.kind, body)))


def _event(kind: TriggerKind, body: TestTrigger) -> Event:
    headers = {name.lower(): value for name, value in body.headers.items()}
    type_, _, action = (body.event or kind).partition(".")
    if not action and isinstance(body.payload, dict) and isinstance(body.payload.get("action"), str):
        action = body.payload["action"]
    return Event(kind, type_, body.payload, headers, action or None, "test")


def _view(row: Row, tenant: str) -> dict[str, Any]:
    return trigger_definition_view(row, tenant)
