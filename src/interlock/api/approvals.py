"""/api/approvals"""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, idempotent_write, page, problem_body, uuid_cursor
from interlock.api.views import approval_view, dump
from interlock.engine.access.principal import Principal
from interlock.engine.approvals import approvals
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.errors import InterlockError, Invalid
from interlock.ids import ApprovalId, RunId, SessionId
from interlock.lifecycle import ApprovalState
from interlock.policy.roles import Permission
from interlock.store.pool import Tx
from interlock.wire import Approval, BulkDecide, Decide, Decided, Page, Reject

router = APIRouter(prefix="/api/approvals", tags=["approvals"])


@router.get("", response_model=Page[Approval])
async def list_approvals(
    found: Ctx, who: Caller, status: ApprovalState | None = None, run_id: RunId | None = None,
    session_id: SessionId | None = None, cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> Response:  # fmt: skip
    """List approvals, newest first."""
    who.require(Permission.READ)
    rows = await approvals.list_approvals(
        found.database,
        who,
        status=status,
        run_id=run_id,
        session_id=session_id,
        cursor=uuid_cursor(cursor),
        limit=limit + 1,
    )
    votes = await found.database.fetch("votes_on", [row["id"] for row in rows])
    return Json(page(rows, limit, lambda row: approval_view(row, votes, who)))


@router.get("/{approval_id}", response_model=Approval)
async def show(approval_id: ApprovalId, found: Ctx, who: Caller) -> Response:
    who.require(Permission.READ)
    row = await approvals.get(found.database, who, approval_id)
    return Json(approval_view(row, await found.database.fetch("votes_on", [approval_id]), who))


@router.post("/{approval_id}/approve", response_model=Approval)
async def approve(
    approval_id: ApprovalId, request: Request, found: Ctx, who: Caller, body: Decide | None = None
) -> Response:
    return await decide_one(approval_id, request, found, who, body or Decide(), approves=True)


@router.post("/{approval_id}/reject", response_model=Approval)
async def reject(
    approval_id: ApprovalId, request: Request, found: Ctx, who: Caller, body: Reject | None = None
) -> Response:
    return await decide_one(approval_id, request, found, who, body or Reject(), approves=False)


@router.post("/decide", response_model=Page[Decided])
async def decide_many(body: BulkDecide, request: Request, found: Ctx, who: Caller) -> Response:
    """Vote the same way on several approvals, named by id. The answer has a separate result for each."""
    who.require(Permission.APPROVE)
    ids = list(dict.fromkeys(_uuid(text) for text in body.ids))
    digests = {_uuid(text): digest for text, digest in (body.digests or {}).items()}
    if stray := next((approval_id for approval_id in digests if approval_id not in ids), None):
        raise Invalid(f"`digests` names approval {stray}, and `ids` does not.")

    async def one(tx: Tx, approval_id: ApprovalId) -> dict[str, Any]:
        try:
            async with tx.savepoint():
                row = await approvals.decide(
                    tx, found.plans, who, approval_id, approves=body.decision == "approve",
                    reason=body.reason, digest=digests.get(approval_id),
                )  # fmt: skip
        except InterlockError as problem:
            return {"id": approval_id, "ok": False, "problem": problem_body(problem)}
        return {"id": approval_id, "ok": True, "status": row["status"]}

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(
            200, dump({"items": [await one(tx, ApprovalId(approval_id)) for approval_id in ids], "next_cursor": None})
        )

    return await idempotent_write(found, who, request, work)


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Invalid(f"{text!r} is not an id") from None


async def decide_one(
    approval_id: ApprovalId, request: Request, found: AppContext, who: Principal, body: Reject, *, approves: bool
) -> Response:
    who.require(Permission.APPROVE)
    patch = body.patch if isinstance(body, Decide) else None

    async def work(tx: Tx) -> StoredResponse:
        said: dict[str, Any] = {"reason": body.reason, "digest": body.digest}
        if patch is not None:
            row = await approvals.edit(tx, found.plans, found.policies, who, approval_id, patch=patch, **said)
        else:
            row = await approvals.decide(tx, found.plans, who, approval_id, approves=approves, **said)
        view = approval_view(row, await tx.fetch("votes_on", [approval_id]), who)
        return StoredResponse(200, dump(view), row["run_id"])

    return await idempotent_write(found, who, request, work)
