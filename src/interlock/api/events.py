"""/api/events: external events, for the steps that wait for them."""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.dependencies import Caller, Ctx, Json, idempotent_write, page, position_cursor
from interlock.api.views import dump, external_event_view
from interlock.engine.ingress import external_events
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.ids import uuid7
from interlock.journal import encode
from interlock.policy.roles import Permission
from interlock.store.pool import Tx
from interlock.wire import Page, ReceivedEvent, SendEvent, SentEvent

router = APIRouter(prefix="/api/events", tags=["events"])


@router.post("", status_code=202, response_model=SentEvent)
async def send(body: SendEvent, request: Request, found: Ctx, who: Caller) -> Response:
    """Publish an external event.

    It is delivered to the longest-waiting matching step, or stored until a step waits for it.
    """
    who.require(Permission.TELL)
    new = external_events.NewEvent(body.id or str(uuid7()), body.type, body.correlation, encode(body.payload))

    async def work(tx: Tx) -> StoredResponse:
        event = await external_events.send(tx, found.settings, found.plans, who, new)
        view: dict[str, Any] = {"matched": event.run_id is not None} | external_event_view(event)
        return StoredResponse(202, dump(view), event.run_id)

    # An id means the same event for every key of a workspace. It is quoted so that no name can contain the separator.
    key = f"event:{quote(who.workspace_id or '', safe='')}:{body.id}" if body.id else None
    return await idempotent_write(found, who, request, work, key=key)


@router.get("", response_model=Page[ReceivedEvent])
async def list_events(
    found: Ctx, who: Caller, type: str | None = None, correlation: str | None = None, matched: bool | None = None,
    cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> Response:  # fmt: skip
    """List external events, newest first, until they expire.

    Both events stored for a later step and matched events are listed.
    """
    who.require(Permission.READ)
    rows = await external_events.listed(
        found.database, who, type=type, correlation=correlation, matched=matched,
        before=position_cursor(cursor), limit=limit + 1,
    )  # fmt: skip
    return Json(page(rows, limit, external_event_view, key="number"))
