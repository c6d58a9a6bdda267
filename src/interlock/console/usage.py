"""Usage: a tenant's current usage of its caps, and the outcomes of the last hour."""

from datetime import datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, encode_cursor, uuid_cursor
from interlock.api.views import usage_view
from interlock.console import charts, live
from interlock.console.rendering import Visit, Visitor, render
from interlock.engine.access import tenants
from interlock.policy.roles import Permission
from interlock.store.pool import Row

router = APIRouter()

_PAGE = 50
_WORKFLOWS = 100


async def _pulse(found: AppContext, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_usage", visit.who.tenant_id)


live.LISTS["usage"] = _pulse


@router.get("/usage")
async def show(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database, who = visit.services.database, visit.who
    [own] = await tenants.usage(database, who.tenant_id)
    now: datetime = await database.value("time_is")
    since = now - timedelta(minutes=charts.MINUTES)
    ended = await database.fetch("ended_since", who.tenant_id, since, who.workspace_id)
    cursor = uuid_cursor(request.query_params.get("cursor"))
    everybody = await _everybody(visit, cursor)
    usage = usage_view(own)
    return await render(
        request, visit, "usage.html", usage=usage, capped=usage["workflows"][:_WORKFLOWS],
        charts=charts.draw(ended, now), width=charts.WIDTH, height=charts.HEIGHT,
        slot=round(charts.WIDTH / charts.MINUTES * 0.7, 1),
        everybody=[usage_view(row) for row in everybody[:_PAGE]], first=cursor is None,
        next=encode_cursor(everybody[_PAGE - 1]["id"]) if len(everybody) > _PAGE else None, live="/live/usage",
    )  # fmt: skip


async def _everybody(visit: Visitor, cursor: Any) -> list[Row]:
    """Return the usage of every tenant, if the visitor operates the installation."""
    runs_all = visit.who.is_operator and visit.may(Permission.ADMINISTER)
    return await tenants.usage(visit.services.database, None, cursor, _PAGE + 1) if runs_all else []
