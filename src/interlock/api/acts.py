"""/api/acts"""

import re
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.runs import watched_until_settled
from interlock.api.services import Json, Services, Svc, Who, change
from interlock.api.views import dump
from interlock.engine import acts, approvals, runs
from interlock.engine.idempotency import Answer
from interlock.engine.principal import Principal
from interlock.errors import Invalid, NotFound
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.lifecycle import RUN, ApprovalState, RunState
from interlock.store.pool import Tx
from interlock.wire import Act, NewAct

router = APIRouter(prefix="/api/acts", tags=["acts"])

Wait = Annotated[float, Query(ge=0, le=60, description="Answer when it is done or held, or after so many seconds.")]
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@router.post("", status_code=201, response_model=Act)
async def act(body: NewAct, request: Request, found: Svc, who: Who, wait: Wait = 30.0) -> Response:
    """Call one tool through the gate: done, or held for people, to be asked for again by its id."""
    who.require(Permission.START)
    if odd := [name for name in body.args if not _PARAMETER.fullmatch(name)]:
        raise Invalid(f"{odd[0]!r:.80} is no parameter of a tool; a name has letters, digits and `_`")
    plan, run_id = acts.plan_for(body.tool, body.args), uuid7()

    async def work(tx: Tx) -> Answer:
        await acts.start(tx, found.database, who, run_id, body.tool, body.args, plan)
        return Answer(201, dump({"id": run_id}), run_id)

    response = await change(found, who, request, work)
    if response.status_code != 201:
        return response
    begun = UUID(orjson.loads(bytes(response.body))["id"])  # another, if the key answered with it
    return Json(await _act(found, who, begun, wait), 201)


@router.get("/{act_id}", response_model=Act)
async def show(act_id: UUID, found: Svc, who: Who, wait: Wait = 0.0) -> Response:
    """What became of it."""
    who.require(Permission.READ)
    row = await runs.get(found.database, who, act_id)
    if orjson.loads(row["trigger"])["source"] != "act":
        raise NotFound(f"no act {act_id}; it is a run of {row['workflow']}", code="ACT_NOT_FOUND")
    return Json(await _act(found, who, act_id, wait))


async def _act(found: Services, who: Principal, act_id: UUID, wait: float) -> dict[str, Any]:
    row, _ = await watched_until_settled(found, who, act_id, wait)
    status = RunState(row["status"])
    asked = await approvals.listed(found.database, who, status=ApprovalState.REQUESTED, run_id=row["id"])
    is_held = status == RunState.WAITING_APPROVAL and bool(asked)
    ended = "done" if status == RunState.SUCCEEDED else "failed" if status in RUN.terminal else "running"
    return {
        "id": row["id"],
        "tool": orjson.loads(row["trigger"])["ref"],
        "status": "pending_approval" if is_held else ended,
        "result": orjson.loads(row["result"] or "null"),
        "error": orjson.loads(row["error"] or "null"),
        "reason": row["reason"],
        "approval_id": asked[0]["id"] if is_held else None,
    }
