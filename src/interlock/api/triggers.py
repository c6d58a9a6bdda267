"""/api/triggers"""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import YAML, Caller, Ctx, Json, Limit, decode_cursor, idempotent_write, page
from interlock.api.views import dump, trigger_definition_view
from interlock.compute import pool
from interlock.definition.trigger import parse
from interlock.engine.ingress import triggers
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.wire import Page, StoredTrigger, TestTrigger, TriggerPreview

router = APIRouter(prefix="/api/triggers", tags=["triggers"])


@router.post("", status_code=201, response_model=StoredTrigger, openapi_extra=YAML)
async def apply(request: Request, found: Ctx, who: Caller) -> Response:
    """Create or replace a trigger by name, as YAML or JSON. It acts with the key that applies it."""
    who.require(Permission.DEFINE)
    file = request.headers.get("x-file-name", "trigger")
    trigger = await pool.run(who.tenant_id, parse, await request.body(), file)
    await triggers.check(found.database, found.plans, who, trigger)

    async def work(tx: Tx) -> StoredResponse:
        row = await triggers.apply(tx, who, trigger)
        return StoredResponse(201, dump(_view(row, who.tenant)))

    return await idempotent_write(found, who, request, work)


@router.get("", response_model=Page[StoredTrigger])
async def list_triggers(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    who.require(Permission.READ)
    rows = await triggers.listed(found.database, who, decode_cursor(cursor), limit + 1)
    return Json(page(rows, limit, lambda row: _view(row, who.tenant), key="name"))


@router.get("/{name}", response_model=StoredTrigger)
async def show(name: str, found: Ctx, who: Caller) -> Response:
    who.require(Permission.READ)
    row = await triggers.named(found.database, who, name)
    return Json(_view(row, who.tenant) | {"source": orjson.loads(row["source"])})


@router.delete("/{name}", response_model=StoredTrigger)
async def delete(name: str, request: Request, found: Ctx, who: Caller) -> Response:
    """Delete a trigger. Its deliveries are then rejected with 401. Runs that were started continue."""
    who.require(Permission.DEFINE)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(_view(await triggers.delete(tx, who, name), who.tenant)))

    return await idempotent_write(found, who, request, work)


@router.post("/{name}/test", response_model=TriggerPreview)
async def test(name: str, body: TestTrigger, found: Ctx, who: Caller) -> Response:
    """Return what a delivery of this payload would start, and with which input. Starts nothing."""
    who.require(Permission.READ)
    sample = triggers.Sample(body.payload, body.headers, body.event)
    return Json(await triggers.try_out(found.database, found.plans, who, name, sample))


def _view(row: Row, tenant: str) -> dict[str, Any]:
    return trigger_definition_view(row, tenant)
