"""/api/grants"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import Caller, Ctx, Json, idempotent_write
from interlock.api.known_tools import AllowUnknownTools, require_known_tool
from interlock.api.views import dump, grant_view
from interlock.engine.approvals import grants
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.errors import Invalid
from interlock.ids import GrantId, uuid7
from interlock.policy.roles import Permission
from interlock.store.pool import Tx
from interlock.tools import RegisteredTool
from interlock.wire import Grant, NewGrant, Page

router = APIRouter(prefix="/api/grants", tags=["grants"])


@router.post("", status_code=201, response_model=Grant)
async def give(
    body: NewGrant, request: Request, found: Ctx, who: Caller, allow_unknown_tools: AllowUnknownTools = False
) -> Response:
    """Approve in advance calls of one tool with fixed arguments, for a limited time."""
    who.require(Permission.APPROVE)
    _check_names(found.policies.tools.of_tenant(who.tenant).find(body.tool), body)
    grant_id = uuid7()

    async def work(tx: Tx) -> StoredResponse:
        require_known_tool(found, who, body.tool, allow_unknown=allow_unknown_tools)
        row = await grants.give(
            tx, who, GrantId(grant_id), tool=body.tool, arguments=body.arguments, tier=body.tier,
            expires_in=body.expires_in, reason=body.reason,
        )  # fmt: skip
        return StoredResponse(201, dump(grant_view(row)))

    return await idempotent_write(found, who, request, work)


def _check_names(tool: RegisteredTool | None, body: NewGrant) -> None:
    """Reject unknown argument names: a grant with a misspelt argument would never match."""
    if tool is None or tool.input_schema.get("additionalProperties") is not False:
        return
    known = tool.input_schema.get("properties", {})
    if unknown := [name for name in body.arguments if name not in known]:
        takes = ", ".join(known) or "none"
        raise Invalid(f"{tool.name} has no argument {unknown[0]!r}; it takes {takes}", code="ACTION_INVALID")


@router.get("", response_model=Page[Grant])
async def list_grants(found: Ctx, who: Caller, all: bool = False) -> Response:
    """List the grants in force; with `all`, expired and revoked ones too."""
    who.require(Permission.READ)
    rows = await found.database.fetch("list_grants", who.tenant_id, all, 500, who.workspace_id)
    return Json({"items": [grant_view(row) for row in rows], "next_cursor": None})


@router.delete("/{grant_id}", response_model=Grant)
async def revoke(grant_id: GrantId, request: Request, found: Ctx, who: Caller) -> Response:
    who.require(Permission.APPROVE)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(grant_view(await grants.revoke(tx, who, grant_id))))

    return await idempotent_write(found, who, request, work)
