"""/api/secrets: written, listed and deleted, but never read."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from interlock.api.services import Json, Svc, Who, change, decode_cursor, page
from interlock.api.views import dump, secret_view
from interlock.engine import secrets
from interlock.engine.idempotency import Answer
from interlock.governance.roles import Permission
from interlock.store.pool import Tx
from interlock.wire import Page, SetSecret, StoredSecret

router = APIRouter(prefix="/api/secrets", tags=["secrets"])

Name = Annotated[str, Path(pattern="^[a-z][a-z0-9_]{0,99}$")]


@router.put("/{name}", response_model=StoredSecret)
async def put(name: Name, body: SetSecret, request: Request, found: Svc, who: Who) -> Response:
    """Set a secret for `${secrets.name}`. Tools get the new value within seconds; nobody is shown it."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> Answer:
        return Answer(200, dump(secret_view(await secrets.put(tx, found.database, who, name, _value(body)))))

    return await change(found, who, request, work)


def _value(body: SetSecret) -> str:
    return body.value.get_secret_value()


@router.get("", response_model=Page[StoredSecret])
async def list_secrets(
    found: Svc, who: Who, cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> Response:
    """Names, versions and times. Those in the environment of the workers are not among them."""
    who.require(Permission.ADMINISTER)
    rows = await secrets.listed(found.database, who, decode_cursor(cursor), limit + 1)
    return Json(page(rows, limit, secret_view, key="name"))


@router.delete("/{name}", response_model=StoredSecret)
async def delete(name: Name, request: Request, found: Svc, who: Who) -> Response:
    """Forget a secret. Steps that ask for it fail from then on."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> Answer:
        return Answer(200, dump(secret_view(await secrets.delete(tx, who, name))))

    return await change(found, who, request, work)
