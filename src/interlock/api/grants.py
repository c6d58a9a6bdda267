"""/api/grants"""

from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.services import Json, Svc, Who, change
from interlock.api.views import dump, grant_view
from interlock.engine import grants
from interlock.engine.idempotency import Answer
from interlock.errors import Invalid
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.store.pool import Tx
from interlock.tools import Tool
from interlock.wire import Grant, NewGrant, Page

router = APIRouter(prefix="/api/grants", tags=["grants"])


@router.post("", status_code=201, response_model=Grant)
async def give(body: NewGrant, request: Request, found: Svc, who: Who) -> Response:
    """Answer in advance: this tool, these arguments, for so long."""
    who.require(Permission.APPROVE)
    _check_names(found.policies.tools.find(body.tool), body)
    grant_id = uuid7()

    async def work(tx: Tx) -> Answer:
        row = await grants.give(
            tx, found.database, who, grant_id, tool=body.tool, arguments=body.arguments, tier=body.tier,
            expires_in=body.expires_in, reason=body.reason,
        )  # fmt: skip
        return Answer(201, dump(grant_view(row)))

    return await change(found, who, request, work)


def _check_names(tool: Tool | None, body: NewGrant) -> None:
    """A grant for a misspelt argument would never answer. A tool that is not here may be in a worker elsewhere."""
    if tool is None or tool.input_schema.get("additionalProperties") is not False:
        return
    known = tool.input_schema.get("properties", {})
    if unknown := [name for name in body.arguments if name not in known]:
        takes = ", ".join(known) or "none"
        raise Invalid(f"{tool.name} has no argument {unknown[0]!r}; it takes {takes}", code="ACTION_INVALID")


@router.get("", response_model=Page[Grant])
async def list_grants(found: Svc, who: Who, all: bool = False) -> Response:
    """Those in force; with `all`, those that are over too."""
    who.require(Permission.READ)
    rows = await found.database.fetch("list_grants", found.database.clock(), who.tenant_id, all, 500, who.workspace_id)
    return Json({"items": [grant_view(row) for row in rows], "next_cursor": None})


@router.delete("/{grant_id}", response_model=Grant)
async def revoke(grant_id: UUID, request: Request, found: Svc, who: Who) -> Response:
    who.require(Permission.APPROVE)

    async def work(tx: Tx) -> Answer:
        return Answer(200, dump(grant_view(await grants.revoke(tx, found.database, who, grant_id))))

    return await change(found, who, request, work)
