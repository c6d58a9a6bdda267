"""Schedules: the workflows that start by themselves, their next slots, and why a schedule is paused."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from interlock.api.dependencies import AppContext, decode_cursor, encode_cursor
from interlock.console import live
from interlock.console.rendering import FormFields, Visit, Visitor, done, render
from interlock.definition.workflow import is_name
from interlock.engine.access.principal import Principal
from interlock.engine.ingress import schedules
from interlock.engine.runs import runs
from interlock.errors import InterlockError, Invalid
from interlock.policy.roles import Permission
from interlock.store.pool import UNSTORABLE, Row, Tx
from interlock.wire import NewSchedule
from interlock.wire.validation_errors import explain

router = APIRouter()

_PAGE = 50


async def _pulse(found: AppContext, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_schedules", visit.who.tenant_id, visit.who.workspace_id)


live.LISTS["schedules"] = _pulse


@dataclass(frozen=True, slots=True)
class Draft:
    """A new schedule as the user typed it, and what was wrong with it."""

    typed: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@router.get("/schedules")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    return await _page(request, visit, Draft())


async def _page(request: Request, visit: Visitor, draft: Draft, status: int = 200) -> Response:
    database, cursor = visit.services.database, decode_cursor(request.query_params.get("cursor"))
    rows = await schedules.listed(database, visit.who, cursor, _PAGE + 1)
    names = await database.fetch("workflow_names", visit.who.tenant_id)
    following = encode_cursor(rows[_PAGE - 1]["name"]) if len(rows) > _PAGE else None
    return await render(
        request, visit, "schedules.html", status=status, schedules=rows[:_PAGE], next=following, first=cursor is None,
        draft=draft, workflows=[row["name"] for row in names], live="/live/schedules",
    )  # fmt: skip


# ---------------------------------------------------------------- create


@router.post("/schedules")
async def add(request: Request, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.DEFINE)
    found = visit.services
    try:
        new = _new(said)
        cron = schedules.read_cron(new.cron, new.timezone)
        await found.plans.current(visit.who.tenant_id, new.workflow, None)
        row = await found.database.run_in_transaction(
            lambda tx: schedules.add(tx, found.database, visit.who, new, cron)
        )
    except UNSTORABLE as error:
        return await _page(request, visit, Draft(said, f"the input cannot be stored: {error}"), 422)
    except InterlockError as problem:
        return await _page(request, visit, Draft(said, problem.detail), problem.status)
    return done("/schedules", f"{row['name']} starts {row['workflow']} at {schedules.written(row['next_at'])} next.")


def _new(said: dict[str, str]) -> NewSchedule:
    try:
        given = orjson.loads(said.get("input", "{}"))
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the input is not JSON: {error}") from None
    if not is_name(said.get("name", "").strip()):
        got = f"not {said['name']!r}" if "name" in said else "this has none"
        raise Invalid(f"a name has lower-case letters, digits, `_`, `.` and `-`, and begins with a letter; {got}")
    wanted = {name: said[name].strip() for name in ("name", "cron", "timezone", "workflow", "missed") if name in said}
    try:
        return NewSchedule.model_validate(wanted | {"input": given})
    except ValidationError as error:
        raise Invalid(explain(error)) from None


# ---------------------------------------------------------------- one schedule

_Verb = Callable[[Tx, Principal, str], Awaitable[Row]]


@router.post("/schedules/{name}/pause")
async def pause(name: str, visit: Visit, said: FormFields) -> Response:
    return await _change(visit, name, schedules.pause, f"{name} is paused: no slot starts anything.")


@router.post("/schedules/{name}/resume")
async def resume(name: str, visit: Visit, said: FormFields) -> Response:
    return await _change(visit, name, schedules.resume, f"{name} goes on; what was due meanwhile is left out.")


@router.post("/schedules/{name}/delete")
async def delete(name: str, visit: Visit, said: FormFields) -> Response:
    return await _change(visit, name, schedules.delete, f"{name} is deleted; runs that it started go on.")


async def _change(visit: Visitor, name: str, verb: _Verb, told: str) -> Response:
    visit.who.require(Permission.DEFINE)
    database = visit.services.database
    await database.run_in_transaction(lambda tx: verb(tx, visit.who, name))
    return done("/schedules", told)


@router.post("/schedules/{name}/run")
async def run_now(name: str, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.START)
    found = visit.services
    who, new = await schedules.prepare_now(found.database, found.plans, visit.who, name)
    await found.database.run_in_transaction(lambda tx: runs.start(tx, who, new))
    return done(f"/runs/{new.id}", "Started, besides its slots.")
