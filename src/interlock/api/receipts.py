"""/api/receipts, and a run's receipts"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import Caller, Ctx, Json, idempotent_write
from interlock.api.views import dump, receipt_view, run_view
from interlock.engine.approvals import approvals
from interlock.engine.effects import receipts, reversals
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.runs import runs
from interlock.engine.writing.load import load_journal
from interlock.ids import ReceiptId, RunId, uuid7
from interlock.policy.roles import Permission
from interlock.store.pool import Tx
from interlock.wire import CancelRequest, Page, Receipt, ResolveReceipt, Run

router = APIRouter(prefix="/api", tags=["receipts"])


@router.get("/runs/{run_id}/receipts", response_model=Page[Receipt])
async def of_run(run_id: RunId, found: Ctx, who: Caller) -> Response:
    """List every effect of a run: what was attempted, and its result."""
    who.require(Permission.READ)
    await runs.get(found.database, who, run_id)
    rows = await found.database.fetch("receipts_of", who.tenant_id, run_id)
    return Json({"items": [receipt_view(row) for row in rows], "next_cursor": None})


@router.get("/receipts/{receipt_id}", response_model=Receipt)
async def show(receipt_id: ReceiptId, found: Ctx, who: Caller) -> Response:
    who.require(Permission.READ)
    return Json(receipt_view(await receipts.get(found.database, who, receipt_id)))


@router.post("/receipts/{receipt_id}/resolve", response_model=Receipt)
async def resolve(receipt_id: ReceiptId, body: ResolveReceipt, request: Request, found: Ctx, who: Caller) -> Response:
    """Resolve an effect in doubt: it happened, it did not happen, or the run shall fail."""
    who.require(Permission.APPROVE)

    async def work(tx: Tx) -> StoredResponse:
        await approvals.resolve_doubt(
            tx,
            found.plans,
            who,
            receipt_id,
            outcome=body.outcome,
            output=body.output,
            reason=body.reason,
        )
        row = await receipts.get(tx, who, receipt_id)
        return StoredResponse(200, dump(receipt_view(row)), row["run_id"])

    return await idempotent_write(found, who, request, work)


@router.post("/receipts/{receipt_id}/reverse", status_code=201, response_model=Run)
async def reverse(
    receipt_id: ReceiptId, request: Request, found: Ctx, who: Caller, body: CancelRequest | None = None
) -> Response:
    """Undo an effect with a new run, which passes the gate like any other.

    Each receipt can be reversed at most once.
    """
    who.require(Permission.START)
    new_id, reason = uuid7(), body.reason if body else None

    async def work(tx: Tx) -> StoredResponse:
        row, plan = await reversals.reverse(
            tx, found.database, found.plans, found.policies.tools, who, receipt_id, RunId(new_id), reason
        )
        journal = await load_journal(tx, found.plans, row, plan)
        return StoredResponse(201, dump(run_view(row, journal, found.policies.hidden)), row.id)

    return await idempotent_write(found, who, request, work)
