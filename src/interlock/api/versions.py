"""Versions of a policy and of workflows: list them, show one, compare two, and put an earlier one in force again."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, Limit, decode_cursor, idempotent_write, page
from interlock.api.views import dump, workflow_view
from interlock.compute import pool
from interlock.definition.yaml_source import as_yaml, difference
from interlock.engine import policies, workflows
from interlock.engine.access.principal import Principal, name_of
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.errors import Invalid, NotFound
from interlock.policy.policy import check_policy, digest_of_text
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.wire import Page, Policy, Rollback, VersionDifference, Workflow

router = APIRouter(prefix="/api")

_LARGEST = 2**31 - 1
PolicyVersion = Annotated[int, Path(ge=0, le=_LARGEST)]
Against = Annotated[
    int | None, Query(ge=0, le=_LARGEST, description="The version to compare with; else the one before it.")
]


@router.get("/policy/versions", response_model=Page[Policy], tags=["policy"])
async def list_policy_versions(
    found: Ctx,
    who: Caller,
    digest: Annotated[str | None, Query(description="Only versions with this digest, as evidence names it.")] = None,
    cursor: str | None = None,
    limit: Limit = 100,
) -> Response:
    """List the versions of the policy, newest first, without their texts."""
    who.require(Permission.READ)
    before = _version_cursor(cursor)
    rows = await found.database.fetch("policy_versions", who.tenant_id, limit + 1, before, digest)
    current = await found.database.row("policy_in_force", who.tenant_id)
    in_force = current["version"] if current is not None else None
    return Json(page(rows, limit, lambda row: _policy_view(row, in_force), key="version"))


@router.get("/policy/versions/{version}", response_model=Policy, tags=["policy"])
async def show_policy_version(version: PolicyVersion, found: Ctx, who: Caller) -> Response:
    """Show one version of the policy with its text. Version 0 is the built-in policy."""
    who.require(Permission.READ)
    text = await policies.text_of(found.database, who.tenant_id, version)
    row = await found.database.row("policy_version", who.tenant_id, version)
    current = await found.database.row("policy_in_force", who.tenant_id)
    in_force = current["version"] if current is not None else None
    if row is None:
        return Json({"version": 0, "digest": digest_of_text(text), "text": text, "in_force": in_force == 0})
    return Json(_policy_view(row, in_force) | {"text": text})


@router.get("/policy/versions/{version}/diff", response_model=VersionDifference, tags=["policy"])
async def compare_policy_versions(version: PolicyVersion, found: Ctx, who: Caller, against: Against = None) -> Response:
    """Compare a version of the policy with another one, as a unified diff."""
    who.require(Permission.READ)
    before = max(version - 1, 0) if against is None else against
    new, old = [await policies.text_of(found.database, who.tenant_id, number) for number in (version, before)]
    return Json(await _difference(who, "policy", before, version, old, new))


@router.post("/policy/rollback", response_model=Policy, tags=["policy"])
async def roll_back_policy(body: Rollback, request: Request, found: Ctx, who: Caller) -> Response:
    """Publish the text of an earlier version as a new one. It is checked against the tools as any policy is."""
    who.require(Permission.ADMINISTER)
    text = await policies.text_of(found.database, who.tenant_id, body.version)
    digest = await pool.run(who.tenant_id, check_policy, text, found.policies.facts(who.tenant))

    async def work(tx: Tx) -> StoredResponse:
        row = await policies.publish(tx, who, text, digest)
        return StoredResponse(200, dump(_policy_view(row, row["version"])))

    return await idempotent_write(found, who, request, work)


@router.get("/workflows/{name}/versions", response_model=Page[Workflow], tags=["workflows"])
async def list_workflow_versions(
    name: str, found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100
) -> Response:
    """List the versions of a workflow or agent, newest first. New runs start with the newest."""
    who.require(Permission.READ)
    before = _version_cursor(cursor)
    rows = await found.database.fetch("workflow_versions", who.tenant_id, name, limit + 1, before)
    if not rows and before is None:
        raise NotFound(f"There is no workflow {name}.", code="WORKFLOW_NOT_FOUND")
    return Json(page(rows, limit, workflow_view, key="version"))


@router.get("/workflows/{name}/versions/{version}", response_model=Workflow, tags=["workflows"])
async def show_workflow_version(
    name: str, version: Annotated[int, Path(ge=1, le=_LARGEST)], found: Ctx, who: Caller
) -> Response:
    """Show one version of a workflow or agent with its source."""
    who.require(Permission.READ)
    return Json(workflow_view(await _workflow(found, who, name, version), with_source=True))


@router.get("/workflows/{name}/versions/{version}/diff", response_model=VersionDifference, tags=["workflows"])
async def compare_workflow_versions(
    name: str, version: Annotated[int, Path(ge=1, le=_LARGEST)], found: Ctx, who: Caller, against: Against = None
) -> Response:
    """Compare a version of a workflow with another one, as a unified diff of their YAML."""
    who.require(Permission.READ)
    before = version - 1 if against is None else against
    new = (await _workflow(found, who, name, version))["source"]
    old = (await _workflow(found, who, name, before))["source"] if before else None
    texts = [await pool.run(who.tenant_id, as_yaml, source, True) if source else "" for source in (old, new)]
    return Json(await _difference(who, name, before, version, *texts))


@router.post("/workflows/{name}/rollback", status_code=201, response_model=Workflow, tags=["workflows"])
async def roll_back_workflow(name: str, body: Rollback, request: Request, found: Ctx, who: Caller) -> Response:
    """Publish the content of an earlier version as a new one. Runs that already started keep their version."""
    who.require(Permission.DEFINE)

    async def work(tx: Tx) -> StoredResponse:
        row = await workflows.roll_back(tx, who, name, body.version)
        return StoredResponse(201, dump(workflow_view(row)))

    return await idempotent_write(found, who, request, work)


def _policy_view(row: Row, in_force: int | None) -> dict[str, Any]:
    view = {name: row[name] for name in ("version", "digest", "created_at")}
    return view | {"created_by": name_of(row["created_by"]), "in_force": row["version"] == in_force}


async def _workflow(found: AppContext, who: Principal, name: str, version: int) -> Row:
    return await workflows.version_of(found.database, who.tenant_id, name, version)


async def _difference(who: Principal, name: str, before: int, after: int, old: str, new: str) -> dict[str, Any]:
    labels = (f"{name} version {before}", f"{name} version {after}")
    lines = await pool.run(who.tenant_id, difference, old, new, *labels)
    return {"before": before, "after": after, "diff": "".join(f"{line}\n" for line in lines)}


def _version_cursor(cursor: str | None) -> int | None:
    text = decode_cursor(cursor)
    if text is not None and not (text.isdecimal() and len(text) < 10):
        raise Invalid("This cursor is not valid. Leave it out to begin at the start.")
    return int(text) if text is not None else None
