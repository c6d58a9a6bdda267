"""/api/receipts, and a run's receipts"""

from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.services import Json, Svc, Who, change
from interlock.api.views import dump, receipt_view, run_view
from interlock.engine import approvals, reversals, runs
from interlock.engine.idempotency import Answer
from interlock.engine.outside import read_journal
from interlock.errors import NotFound
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.store.pool import Tx
from interlock.wire import Page, Receipt, ResolveReceipt, Run, Stop

router = APIRouter(prefix="/api", tags=["receipts"])


@router.get("/runs/{run_id}/receipts", response_model=Page[Receipt])
async def of_run(run_id: UUID, found: Svc, who: Who) -> Response:
    """Every effect of a run: what was attempted, and what became of it."""
    who.require(Permission.READ)
    await runs.get(found.database, who, run_id)
    rows = await found.database.fetch("receipts_of", who.tenant_id, run_id)
    return Json({"items": [receipt_view(row) for row in rows], "next_cursor": None})


@router.get("/receipts/{receipt_id}", response_model=Receipt)
async def show(receipt_id: UUID, found: Svc, who: Who) -> Response:
    who.require(Permission.READ)
    row = await found.database.row("get_receipt", who.tenant_id, receipt_id)
    if row is None:
        raise NotFound(f"no receipt {receipt_id}", code="RECEIPT_NOT_FOUND")
    await runs.get(found.database, who, row["run_id"])
    return Json(receipt_view(row))


@router.post("/receipts/{receipt_id}/resolve", response_model=Receipt)
async def resolve(receipt_id: UUID, body: ResolveReceipt, request: Request, found: Svc, who: Who) -> Response:
    """Say what became of an effect in doubt: it happened, it did not, or the run shall fail."""
    who.require(Permission.APPROVE)

    async def work(tx: Tx) -> Answer:
        await approvals.resolve_doubt(
            tx,
            found.database,
            found.plans,
            who,
            receipt_id,
            outcome=body.outcome,
            output=body.output,
            reason=body.reason,
        )
        row = await tx.row("get_receipt", who.tenant_id, receipt_id)
        assert row is not None
        return Answer(200, dump(receipt_view(row)), row["run_id"])

    return await change(found, who, request, work)


@router.post("/receipts/{receipt_id}/reverse", status_code=201, response_model=Run)
async def reverse(receipt_id: UUID, request: Request, found: Svc, who: Who, body: Stop | None = None) -> Response:
    """Undo an effect by a run of its own, which passes the gate like any other. At most once per receipt."""
    who.require(Permission.START)
    new_id, reason = uuid7(), body.reason if body else None

    async def work(tx: Tx) -> Answer:
        row, plan = await reversals.reverse(
            tx, found.database, found.plans, found.policies.tools, who, receipt_id, new_id, reason
        )
        return Answer(201, dump(run_view(row, await read_journal(tx, found.plans, row, plan))), row["id"])

    return await change(found, who, request, work)
