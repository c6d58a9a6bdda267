"""/api/tenants, /api/usage, /api/keys, /api/tools, /api/flows"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import Caller, Ctx, Json, Limit, idempotent_write, page, uuid_cursor
from interlock.api.views import dump, flow_view, key_view, tenant_view, tool_view, usage_view
from interlock.engine.access import tenants
from interlock.engine.access.principal import DEFAULT_TENANT
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.errors import Forbidden
from interlock.ids import KeyId
from interlock.policy.roles import MAY, Permission
from interlock.store.pool import Tx
from interlock.wire import ChangeTenant, Flow, Key, NewKey, NewTenant, Page, Role, Tenant, Tool, Usage

router = APIRouter(prefix="/api")


@router.post("/tenants", status_code=201, response_model=Tenant, tags=["tenants"])
async def create_tenant(body: NewTenant, request: Request, found: Ctx, who: Caller) -> Response:
    """Create a tenant with its first admin key. The key's secret is shown only in this response.

    Only for admins of the default tenant.
    """
    _require_operator_of_all(who)

    async def work(tx: Tx) -> StoredResponse:
        row = await tenants.create_tenant(
            tx, body.name, max_concurrency=body.max_concurrency, weight=body.weight,
            max_runs_per_min=body.max_runs_per_min, max_writes_per_run=body.max_writes_per_run,
        )  # fmt: skip
        _, key = await tenants.add_key(tx, row["id"], "admin", Role.ADMIN)
        return StoredResponse(201, dump({**tenant_view(row), "key": key}), kept=dump({**tenant_view(row), "key": None}))

    return await idempotent_write(found, who, request, work)


@router.get("/tenants", response_model=Page[Tenant], tags=["tenants"])
async def list_tenants(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    _require_operator_of_all(who)
    return Json(page(await tenants.tenants(found.database, uuid_cursor(cursor), limit + 1), limit, tenant_view))


@router.patch("/tenants/{name}", response_model=Tenant, tags=["tenants"])
async def update_tenant(name: str, body: ChangeTenant, request: Request, found: Ctx, who: Caller) -> Response:
    """Change a tenant's caps and weight. Omitted fields keep their value; a cap of null removes the cap."""
    _require_operator_of_all(who)
    changes = body.model_dump(exclude_unset=True)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(tenant_view(await tenants.update_tenant(tx, name, changes))))

    return await idempotent_write(found, who, request, work)


@router.get("/usage", response_model=Page[Usage], tags=["tenants"])
async def show_usage(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    """Return the caller's tenant's current usage of its caps.

    Admins of the default tenant get the usage of every tenant.
    """
    who.require(Permission.READ)
    of_all = who.is_operator and Permission.ADMINISTER in MAY[who.role]
    rows = await tenants.usage(found.database, None if of_all else who.tenant_id, uuid_cursor(cursor), limit + 1)
    return Json(page(rows, limit, usage_view))


@router.post("/keys", status_code=201, response_model=Key, tags=["keys"])
async def create_key(body: NewKey, request: Request, found: Ctx, who: Caller) -> Response:
    """Create a key of this tenant. Its secret is shown only in this response.

    An admin of a workspace can grant only groups it is in.
    """
    who.require(Permission.ADMINISTER)
    workspace_id = body.workspace_id or who.workspace_id
    if not who.reaches(workspace_id):
        raise Forbidden(f"a key of workspace {who.workspace_id} makes keys of that workspace only")
    who.require_may_grant(body.groups)

    async def work(tx: Tx) -> StoredResponse:
        row, key = await tenants.add_key(
            tx, who.tenant_id, body.name, body.role, workspace_id=workspace_id, groups=body.groups
        )
        return StoredResponse(201, dump({**key_view(row), "key": key}), kept=dump({**key_view(row), "key": None}))

    return await idempotent_write(found, who, request, work)


@router.get("/keys", response_model=Page[Key], tags=["keys"])
async def list_keys(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    who.require(Permission.ADMINISTER)
    return Json(page(await tenants.keys(found.database, who, uuid_cursor(cursor), limit + 1), limit, key_view))


@router.delete("/keys/{key_id}", response_model=Key, tags=["keys"])
async def revoke_key(key_id: KeyId, request: Request, found: Ctx, who: Caller) -> Response:
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(key_view(await tenants.revoke_key(tx, who, key_id))))

    response = await idempotent_write(found, who, request, work)
    found.follower.on_keys()  # effective here at once; other servers are notified
    return response


@router.get("/tools", response_model=Page[Tool], tags=["tools"])
async def list_tools(found: Ctx, who: Caller) -> Response:
    """The tools that this server loaded; workers load the same INTERLOCK_TOOLS."""
    who.require(Permission.READ)
    return Json(
        {"items": [tool_view(tool) for tool in found.policies.tools.of_tenant(who.tenant).all()], "next_cursor": None}
    )


@router.get("/flows", response_model=Page[Flow], tags=["tools"])
async def list_flows(found: Ctx, who: Caller) -> Response:
    """The Python flows that this server loaded; workers load the same INTERLOCK_TOOLS."""
    who.require(Permission.READ)
    return Json({"items": [flow_view(flow) for flow in found.policies.tools.flows.all()], "next_cursor": None})


def _require_operator_of_all(who: Caller) -> None:
    who.require(Permission.ADMINISTER)
    if not who.is_operator:
        raise Forbidden(f"tenants are managed by admins of tenant {DEFAULT_TENANT}")
