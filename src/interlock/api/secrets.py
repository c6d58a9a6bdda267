"""/api/secrets: secrets can be written, listed and deleted, but never read."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from interlock.api.dependencies import Caller, Ctx, Json, decode_cursor, idempotent_write, page
from interlock.api.views import dump, secret_view
from interlock.engine.access import secrets
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.policy.roles import Permission
from interlock.store.pool import Tx
from interlock.wire import Page, SetSecret, StoredSecret

router = APIRouter(prefix="/api/secrets", tags=["secrets"])

Name = Annotated[str, Path(pattern="^[a-z][a-z0-9_]{0,99}$")]


@router.put("/{name}", response_model=StoredSecret)
async def put(name: Name, body: SetSecret, request: Request, found: Ctx, who: Caller) -> Response:
    """Set a secret for `${secrets.name}`, and the tools that may use it. No response ever contains the value."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> StoredResponse:
        row = await secrets.put(
            tx, found.database, who, name, _value(body), tools=body.tools, workspaces=body.workspaces
        )
        return StoredResponse(200, dump(secret_view(row)))

    return await idempotent_write(found, who, request, work)


def _value(body: SetSecret) -> str:
    return body.value.get_secret_value()


@router.get("", response_model=Page[StoredSecret])
async def list_secrets(
    found: Ctx, who: Caller, cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> Response:
    """List the names, versions and times of secrets. Secrets in the environment of the workers are not included."""
    who.require(Permission.ADMINISTER)
    rows = await secrets.listed(found.database, who, decode_cursor(cursor), limit + 1)
    return Json(page(rows, limit, secret_view, key="name"))


@router.delete("/{name}", response_model=StoredSecret)
async def delete(name: Name, request: Request, found: Ctx, who: Caller) -> Response:
    """Delete a secret. Steps that refer to it fail from then on."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(secret_view(await secrets.delete(tx, who, name))))

    return await idempotent_write(found, who, request, work)
