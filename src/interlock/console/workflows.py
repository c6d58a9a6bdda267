"""Workflows: list them, show and compare their versions, and start them."""

import re
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from interlock.api.dependencies import decode_cursor, encode_cursor
from interlock.api.views import dump
from interlock.compute import pool
from interlock.console import graph
from interlock.console.diff import Comparison, compare, cut
from interlock.console.rendering import FormFields, Visit, Visitor, done, number_of, render
from interlock.definition.plan import Plan, StepKind
from interlock.definition.yaml_source import as_yaml
from interlock.engine.ingress import idempotency
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.runs import runs
from interlock.errors import InterlockError, Invalid, NotFound
from interlock.ids import uuid7
from interlock.policy.roles import Permission
from interlock.store.pool import UNSTORABLE, Row, Tx
from interlock.wire import StartRun
from interlock.wire.validation_errors import explain

router = APIRouter()

_PAGE = 50
_VERSIONS = 100
# Only the first steps of a long workflow; its source has them all.
_STEPS = 80
_MOST_VERSION = 2**31 - 1


@router.get("/workflows")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    cursor = decode_cursor(request.query_params.get("cursor"))
    rows = await visit.services.database.fetch(
        "workflows_to_show", visit.who.tenant_id, cursor, _PAGE + 1, visit.who.workspace_id
    )
    following = encode_cursor(rows[_PAGE - 1]["name"]) if len(rows) > _PAGE else None
    return await render(request, visit, "workflows.html", workflows=rows[:_PAGE], next=following, first=cursor is None)


@router.get("/workflows/{name}")
async def show(name: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    version = number_of(request.query_params.get("version"), "version", most=_MOST_VERSION)
    against = number_of(request.query_params.get("against"), "against", most=_MOST_VERSION)
    return await _page(request, visit, name, version, against=against)


@dataclass(frozen=True, slots=True)
class Started:
    """The start form as the user typed it, and what was wrong with it."""

    input: str = "{}"
    error: str | None = None


async def _page(
    request: Request, visit: Visitor, name: str, version: int | None, *, against: int | None = None,
    typed: Started | None = None, status: int = 200,
) -> Response:  # fmt: skip
    row = await _version(visit, name, version)
    _, plan = await visit.services.plans.find(visit.who.tenant_id, name, row["version"])
    versions = await visit.services.database.fetch("workflow_versions", visit.who.tenant_id, name, _VERSIONS, None)
    source = await _written(visit, row)
    return await render(
        request, visit, "workflow.html", status=status, workflow=row, plan=plan, versions=versions, asked=version,
        source=cut(source), against=against, changes=await _changes(visit, name, against, source),
        steps=plan.steps[:_STEPS], more=max(0, len(plan.steps) - _STEPS), drawing=_drawing(plan),
        typed=typed or Started(), reads=_reads(source), once=uuid7(),
    )  # fmt: skip


async def _version(visit: Visitor, name: str, version: int | None) -> Row:
    row = await visit.services.database.row("get_workflow", visit.who.tenant_id, name, version)
    if row is None:
        raise NotFound(f"no workflow {name}" + (f" version {version}" if version else ""), code="WORKFLOW_NOT_FOUND")
    return row


async def _changes(visit: Visitor, name: str, against: int | None, source: str) -> Comparison | None:
    if against is None:
        return None
    other = await _version(visit, name, against)
    return await compare(visit.who.tenant_id, await _written(visit, other), source)


async def _written(visit: Visitor, row: Row) -> str:
    """Return the source as YAML. Another process converts a long one."""
    if len(row["source"]) < _LONG_SOURCE:
        return as_yaml(row["source"])
    return await pool.run(visit.who.tenant_id, as_yaml, row["source"])


# Converting a source of this length takes about ten milliseconds.
_LONG_SOURCE = 4_000


def _drawing(plan: Plan) -> graph.Drawing | None:
    if len(plan.steps) > _STEPS:
        return None
    return graph.draw((step.key, step.key, _says(step), step.after) for step in plan.steps)


def _says(step: Any) -> str:
    """Return what a step does, in a word or two."""
    match step.kind:
        case StepKind.TOOL:
            return str(step.tool)
        case StepKind.FLOW:
            return f"runs {step.workflow}"
        case StepKind.APPROVAL:
            return f"asks people ({step.gate.tier})"
        case _:
            return f"waits for {step.event.type}" if step.event else "waits"


def _reads(source: str) -> list[str]:
    """Return the input fields that the workflow reads, for the start form."""
    return sorted(set(re.findall(r"\binput\.([A-Za-z_]\w*)", source)))[:20]


# ---------------------------------------------------------------- starting


@router.post("/workflows/{name}/start")
async def start(name: str, request: Request, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.START)
    version = number_of(said.get("version"), "version", most=_MOST_VERSION)
    text = said.get("input", "{}")
    try:
        body = _asked(name, version, text)
        run_id = await _start(visit, body, said.get("once", ""))
    except NotFound:
        raise
    except UNSTORABLE as error:
        typed = Started(text, f"the input cannot be stored: {error}")
        return await _page(request, visit, name, version, typed=typed, status=422)
    except InterlockError as problem:
        typed = Started(text, problem.detail)
        return await _page(request, visit, name, version, typed=typed, status=problem.status)
    return done(f"/runs/{run_id}", "Started.")


def _asked(name: str, version: int | None, text: str) -> StartRun:
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the input is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Invalid('the input is a JSON object, for example {"charge": "ch_1"}')
    try:
        return StartRun(workflow=name, version=version, input=given)
    except ValidationError as error:
        raise Invalid(explain(error)) from None


async def _start(visit: Visitor, body: StartRun, once: str) -> UUID:
    """Start a run once per page, even if the browser sends the form again after it lost the answer."""
    found, who = visit.services, visit.who
    new = await runs.prepare(
        found.plans, who, body.workflow, version=body.version, input=body.input,
        trigger={"source": "console", "ref": None},
    )  # fmt: skip

    async def work(tx: Tx) -> StoredResponse:
        await runs.start(tx, who, new)
        return StoredResponse(201, dump({"id": new.id}), new.id)

    digest = idempotency.Request.hash_of(body.workflow, str(body.version), dump(body.input))
    key = f"console:{who.key_id}:{once[:64]}:{digest.hex()}"
    answer = await idempotency.once(found.database, idempotency.Request(who.tenant_id, key, "console", digest), work)
    assert answer.run_id is not None
    return answer.run_id
