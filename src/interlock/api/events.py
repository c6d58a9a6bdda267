"""/api/events: what happened outside, for the steps that wait for it."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.services import Json, Svc, Who, change, page, position_cursor
from interlock.api.views import dump, outside_event_view
from interlock.engine import events
from interlock.engine.idempotency import Answer
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.journal import encode
from interlock.store.pool import Tx
from interlock.wire import OutsideEvent, Page, SendEvent, SentEvent

router = APIRouter(prefix="/api/events", tags=["events"])


@router.post("", status_code=202, response_model=SentEvent)
async def send(body: SendEvent, request: Request, found: Svc, who: Who) -> Response:
    """Tell what happened. The step that has waited longest for it has it at once; else it is kept until one does."""
    who.require(Permission.TELL)
    new = events.NewEvent(body.id or str(uuid7()), body.type, body.correlation, encode(body.payload))

    async def work(tx: Tx) -> Answer:
        row = await events.send(tx, found.database, found.plans, who, new)
        view: dict[str, Any] = {"matched": row["run_id"] is not None} | outside_event_view(row)
        return Answer(202, dump(view), row["run_id"])

    # What an event is called is the sender's business, whichever key they use: it is the same event for the tenant.
    return await change(found, who, request, work, key=f"event:{body.id}" if body.id else None)


@router.get("", response_model=Page[OutsideEvent])
async def list_events(
    found: Svc, who: Who, type: str | None = None, correlation: str | None = None, matched: bool | None = None,
    cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> Response:  # fmt: skip
    """Newest first: those that wait for a step, and those that were matched, until their time is over."""
    who.require(Permission.READ)
    rows = await events.listed(
        found.database, who, type=type, correlation=correlation, matched=matched,
        before=position_cursor(cursor), limit=limit + 1,
    )  # fmt: skip
    return Json(page(rows, limit, outside_event_view, key="number"))
