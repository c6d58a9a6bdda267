"""/api/tool-calls"""

import re
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, idempotent_write
from interlock.api.known_tools import AllowUnknownTools, require_known_tool
from interlock.api.runs import stop_run, watched_until_settled
from interlock.api.views import dump
from interlock.engine.access.principal import Principal
from interlock.engine.approvals import approvals
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.runs import runs, tool_calls
from interlock.errors import Invalid, NotFound
from interlock.ids import RunId, uuid7
from interlock.lifecycle import RUN, ApprovalState, RunState
from interlock.policy.roles import Permission
from interlock.store.pool import Tx
from interlock.store.records import RunDetails
from interlock.wire import CancelRequest, NewToolCall, ToolCall

router = APIRouter(prefix="/api/tool-calls", tags=["tool calls"])

Wait = Annotated[
    float, Query(ge=0, le=60, description="Answer when the call has ended, or after so many seconds.")
]  # fmt: skip
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@router.post("", status_code=200, response_model=ToolCall, responses={202: {"model": ToolCall}})
async def create(
    body: NewToolCall, request: Request, found: Ctx, who: Caller, allow_unknown_tools: AllowUnknownTools = False
) -> Response:
    """Call one tool through the policy gate.

    Answers 200 with the result when the call has ended. Answers 202 when an approver has to decide first, or when the
    call is still running after `wait` seconds; then ask for it again by its `id`.
    """
    who.require(Permission.START)
    if odd := [name for name in body.args if not _PARAMETER.fullmatch(name)]:
        raise Invalid(f"{odd[0]!r:.80} is not a parameter name. Use letters, digits and `_`.")
    plan, run_id = tool_calls.plan_for(body.tool, body.args), uuid7()

    async def work(tx: Tx) -> StoredResponse:
        require_known_tool(found, who, body.tool, allow_unknown=allow_unknown_tools)
        await tool_calls.start(tx, found.database, who, RunId(run_id), body.tool, body.args, plan)
        return StoredResponse(201, dump({"id": run_id}), RunId(run_id))

    response = await idempotent_write(found, who, request, work)
    if response.status_code != 201:
        return response
    begun = UUID(orjson.loads(bytes(response.body))["id"])  # an earlier call if the idempotency key was used before
    view = await _view(found, who, RunId(begun), body.wait)
    return Json(view, 200 if view["status"] in ("done", "failed") else 202)


@router.get("/{tool_call_id}", response_model=ToolCall)
async def show(tool_call_id: RunId, found: Ctx, who: Caller, wait: Wait = 0.0) -> Response:
    """Return a tool call. With `wait`, a call that is held for approval waits too, until it has ended."""
    who.require(Permission.READ)
    await _get(found, who, tool_call_id)
    return Json(await _view(found, who, tool_call_id, wait, until_ended=True))


@router.post("/{tool_call_id}/cancel", response_model=ToolCall)
async def cancel(
    tool_call_id: RunId, request: Request, found: Ctx, who: Caller, body: CancelRequest | None = None
) -> Response:  # fmt: skip
    """Cancel a tool call. The key that made the call may always cancel it."""
    who.require(Permission.START)
    row = await _get(found, who, tool_call_id)
    if row.requested_by != who.actor:
        who.require(Permission.STOP)
    response = await idempotent_write(
        found, who, request, lambda tx: stop_run(tx, found, who, tool_call_id, body, interrupt=False)
    )
    return response if response.status_code >= 400 else Json(await _view(found, who, tool_call_id, 0))


async def _get(found: AppContext, who: Principal, tool_call_id: RunId) -> RunDetails:
    row = await runs.get(found.database, who, tool_call_id)
    if orjson.loads(row.trigger)["source"] != tool_calls.SOURCE:
        raise NotFound(
            f"There is no tool call {tool_call_id}. It is a run of {row.workflow}.", code="TOOL_CALL_NOT_FOUND"
        )
    return row


async def _view(
    found: AppContext, who: Principal, call_id: RunId, wait: float, *, until_ended: bool = False
) -> dict[str, Any]:
    row, _ = await watched_until_settled(found, who, call_id, wait, until_ended=until_ended)
    status = row.status
    asked = await approvals.list_approvals(found.database, who, status=ApprovalState.REQUESTED, run_id=row.id)
    is_held = status == RunState.WAITING_APPROVAL and bool(asked)
    ended = "done" if status == RunState.SUCCEEDED else "failed" if status in RUN.terminal else "running"
    return {
        "id": row.id,
        "tool": orjson.loads(row.trigger)["ref"],
        "status": "pending_approval" if is_held else ended,
        "result": orjson.loads(row.result or "null"),
        "error": orjson.loads(row.error or "null"),
        "reason": row.reason,
        "approval_id": asked[0]["id"] if is_held else None,
    }
