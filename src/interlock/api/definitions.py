"""/api/workflows, /api/agents: what users define. Each change is a new version; an agent is stored as a workflow is."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.services import YAML, Json, Limit, Services, Svc, Who, change, decode_cursor, page
from interlock.api.views import agent_view, dump, workflow_view
from interlock.definition import Plan, parse, parse_agent
from interlock.engine import workflows
from interlock.engine.idempotency import Answer
from interlock.engine.principal import Principal
from interlock.errors import NotFound
from interlock.governance.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.wire import Agent, Page, Workflow

router = APIRouter(prefix="/api")

Version = Annotated[int | None, Query(ge=1, le=2**31 - 1)]


@router.post("/workflows", status_code=201, response_model=Workflow, tags=["workflows"], openapi_extra=YAML)
async def apply_workflow(request: Request, found: Svc, who: Who) -> Response:
    """Apply a workflow, as YAML or JSON. The same content again is the same version."""
    who.require(Permission.DEFINE)
    plan = parse(await request.body(), file=request.headers.get("x-file-name", "workflow"))
    return await _apply(found, who, request, plan, workflow_view)


@router.get("/workflows", response_model=Page[Workflow], tags=["workflows"])
async def list_workflows(found: Svc, who: Who, cursor: str | None = None, limit: Limit = 100) -> Response:
    rows = await _newest(found, who, cursor, limit, agents=False)
    return Json(page(rows, limit, workflow_view, key="name"))


@router.get("/workflows/{name}", response_model=Workflow, tags=["workflows"])
async def show_workflow(name: str, found: Svc, who: Who, version: Version = None) -> Response:
    row = await _version(found, who, name, version)
    if row is None:
        raise NotFound(f"no workflow {name}" + _in_version(version), code="WORKFLOW_NOT_FOUND")
    return Json(workflow_view(row, with_source=True))


@router.post("/agents", status_code=201, response_model=Agent, tags=["sessions"], openapi_extra=YAML)
async def apply_agent(request: Request, found: Svc, who: Who) -> Response:
    """Apply an agent, as YAML or JSON. The same content again is the same version."""
    who.require(Permission.DEFINE)
    plan = parse_agent(await request.body(), file=request.headers.get("x-file-name", "agent"))
    return await _apply(found, who, request, plan, agent_view)


@router.get("/agents", response_model=Page[Agent], tags=["sessions"])
async def list_agents(found: Svc, who: Who, cursor: str | None = None, limit: Limit = 100) -> Response:
    rows = await _newest(found, who, cursor, limit, agents=True)
    return Json(page(rows, limit, agent_view, key="name"))


@router.get("/agents/{name}", response_model=Agent, tags=["sessions"])
async def show_agent(name: str, found: Svc, who: Who, version: Version = None) -> Response:
    row = await _version(found, who, name, version)
    view = agent_view(row, with_source=True) if row is not None else {"model": None}
    if view["model"] is None:
        raise NotFound(f"no agent {name}" + _in_version(version), code="AGENT_NOT_FOUND")
    return Json(view)


async def _apply(
    found: Services, who: Principal, request: Request, plan: Plan, view: Callable[[Row], dict[str, Any]]
) -> Response:
    async def work(tx: Tx) -> Answer:
        row, _ = await workflows.apply(tx, found.database, who, plan)
        return Answer(201, dump(view(row)))

    return await change(found, who, request, work)


async def _newest(found: Services, who: Principal, cursor: str | None, limit: int, *, agents: bool) -> list[Row]:
    who.require(Permission.READ)
    return await found.database.fetch("list_workflows", who.tenant_id, decode_cursor(cursor), limit + 1, agents)


async def _version(found: Services, who: Principal, name: str, version: int | None) -> Row | None:
    who.require(Permission.READ)
    return await found.database.row("get_workflow", who.tenant_id, name, version)


def _in_version(version: int | None) -> str:
    return f" version {version}" if version else ""
