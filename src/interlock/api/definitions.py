"""/api/workflows, /api/agents: what users define. Each change is a new version; an agent is stored like a workflow."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.dependencies import YAML, AppContext, Caller, Ctx, Json, Limit, decode_cursor, idempotent_write, page
from interlock.api.known_tools import AllowUnknownTools
from interlock.api.views import agent_view, dump, workflow_view
from interlock.compute import pool
from interlock.definition import Fault, Plan, parse, parse_agent
from interlock.definition.diagnostics import Faults, Path, TooManyFaults
from interlock.definition.document import lines_of
from interlock.engine import workflows
from interlock.engine.access.principal import Principal
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.errors import DefinitionInvalid, NotFound
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.tools.fit import fits
from interlock.wire import Agent, Page, Workflow

router = APIRouter(prefix="/api")

Version = Annotated[int | None, Query(ge=1, le=2**31 - 1)]


@router.post("/workflows", status_code=201, response_model=Workflow, tags=["workflows"], openapi_extra=YAML)
async def apply_workflow(
    request: Request, found: Ctx, who: Caller, allow_unknown_tools: AllowUnknownTools = False
) -> Response:
    """Publish a workflow, as YAML or JSON. Publishing the same content again returns the same version."""
    who.require(Permission.DEFINE)
    plan = await _parsed(found, who, request, parse, "workflow", checked=not allow_unknown_tools)
    return await _apply(found, who, request, plan, workflow_view)


@router.get("/workflows", response_model=Page[Workflow], tags=["workflows"])
async def list_workflows(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    rows = await _newest(found, who, cursor, limit, agents=False)
    return Json(page(rows, limit, workflow_view, key="name"))


@router.get("/workflows/{name}", response_model=Workflow, tags=["workflows"])
async def show_workflow(name: str, found: Ctx, who: Caller, version: Version = None) -> Response:
    row = await _version(found, who, name, version)
    if row is None:
        raise NotFound(f"no workflow {name}" + _in_version(version), code="WORKFLOW_NOT_FOUND")
    return Json(workflow_view(row, with_source=True))


@router.post("/agents", status_code=201, response_model=Agent, tags=["sessions"], openapi_extra=YAML)
async def apply_agent(
    request: Request, found: Ctx, who: Caller, allow_unknown_tools: AllowUnknownTools = False
) -> Response:
    """Publish an agent, as YAML or JSON. Publishing the same content again returns the same version."""
    who.require(Permission.DEFINE)
    plan = await _parsed(found, who, request, parse_agent, "agent", checked=not allow_unknown_tools)
    return await _apply(found, who, request, plan, agent_view)


@router.get("/agents", response_model=Page[Agent], tags=["sessions"])
async def list_agents(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    rows = await _newest(found, who, cursor, limit, agents=True)
    return Json(page(rows, limit, agent_view, key="name"))


@router.get("/agents/{name}", response_model=Agent, tags=["sessions"])
async def show_agent(name: str, found: Ctx, who: Caller, version: Version = None) -> Response:
    row = await _version(found, who, name, version)
    view = agent_view(row, with_source=True) if row is not None else {"model": None}
    if view["model"] is None:
        raise NotFound(f"no agent {name}" + _in_version(version), code="AGENT_NOT_FOUND")
    return Json(view)


async def _parsed(
    found: AppContext,
    who: Principal,
    request: Request,
    parse: Callable[[bytes, str], Plan],
    kind: str,
    *,
    checked: bool,
) -> Plan:
    """Return the plan of the body. Another process compiles it; only this process has the tools to check it against."""
    body, file = await request.body(), request.headers.get("x-file-name", kind)
    plan = await pool.run(who.tenant_id, parse, body, file)
    check = fits(found.policies.tools.of_tenant(who.tenant)) if checked else None
    if check is not None and _faults(check, plan, file, {}):
        lines = await pool.run(who.tenant_id, lines_of, body)
        raise DefinitionInvalid(_faults(check, plan, file, lines))
    return plan


def _faults(check: Callable[[Plan, Faults], None], plan: Plan, file: str, lines: Mapping[Path, int]) -> list[Fault]:
    faults = Faults(file)
    faults.lines = lines
    with contextlib.suppress(TooManyFaults):
        check(plan, faults)
    return faults.sorted()


async def _apply(
    found: AppContext, who: Principal, request: Request, plan: Plan, view: Callable[[Row], dict[str, Any]]
) -> Response:
    async def work(tx: Tx) -> StoredResponse:
        row, _ = await workflows.apply(tx, found.database, who, plan)
        return StoredResponse(201, dump(view(row)))

    return await idempotent_write(found, who, request, work)


async def _newest(found: AppContext, who: Principal, cursor: str | None, limit: int, *, agents: bool) -> list[Row]:
    who.require(Permission.READ)
    return await found.database.fetch("list_workflows", who.tenant_id, decode_cursor(cursor), limit + 1, agents)


async def _version(found: AppContext, who: Principal, name: str, version: int | None) -> Row | None:
    who.require(Permission.READ)
    return await found.database.row("get_workflow", who.tenant_id, name, version)


def _in_version(version: int | None) -> str:
    return f" version {version}" if version else ""
