"""Audit: the chain from its newest entry, the sealed part, and whether it is intact."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, encode_cursor, position_cursor
from interlock.audit.chain import Verdict
from interlock.console import live
from interlock.console.rendering import FormFields, Visit, Visitor, render, uuid_of
from interlock.engine.proof import audit
from interlock.engine.runs import runs
from interlock.ids import RunId
from interlock.policy.roles import Permission
from interlock.store.pool import Row

router = APIRouter()

_PAGE = 100


async def _pulse(found: AppContext, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_audit", visit.who.tenant_id)


live.LISTS["audit"] = _pulse


@router.get("/audit")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    return await _page(request, visit)


@router.post("/audit/verify")
async def verify(request: Request, visit: Visit, said: FormFields) -> Response:
    """Check the whole chain against the journal, one check at a time."""
    visit.who.require(Permission.READ)
    found = visit.services
    async with found.checking:
        verdict = await audit.verify(found.database, visit.who.tenant_id, found.notary.signing.trusted())
    return await _page(request, visit, verdict)


async def _page(request: Request, visit: Visitor, verdict: Verdict | None = None) -> Response:
    database, who = visit.services.database, visit.who
    run = (request.query_params.get("run") or "").strip()
    before = position_cursor(request.query_params.get("cursor"))
    [last] = await database.fetch("last_checkpoints", [who.tenant_id])
    rows = await _rows(visit, run, before)
    shown = rows[:_PAGE] if rows is not None else None
    following = encode_cursor(shown[-1]["position"]) if rows and shown and len(rows) > _PAGE else None
    signing = visit.services.notary.signing.key()
    return await render(
        request, visit, "audit.html", entries=shown, run=run, next=following, first=before is None, last=last,
        unsealed=await database.value("count_unsealed", who.tenant_id), verdict=verdict,
        key_id=signing.key_id if signing else None,
        live="/live/audit" if before is None and verdict is None and rows is not None else None,
    )  # fmt: skip


async def _rows(visit: Visitor, run: str, before: int | None) -> list[Row] | None:
    """Return a page of entries. None for a visitor of one workspace, because the chain covers all workspaces."""
    database, who = visit.services.database, visit.who
    if run:
        wanted = uuid_of(run, "run")
        await runs.get(database, who, RunId(wanted))
        return await database.fetch("newest_sealed_of_run", who.tenant_id, before, _PAGE + 1, wanted)
    if who.workspace_id is not None:
        return None
    return await database.fetch("newest_sealed", who.tenant_id, before, _PAGE + 1)
