"""Opening approvals: the rows of new questions, in the transaction that holds their steps."""

from collections.abc import Sequence
from uuid import UUID

from interlock.engine.writing.change import WrittenRow
from interlock.ids import ApprovalId, ReceiptId
from interlock.journal import ApprovalRequest, encode
from interlock.store import sql
from interlock.store.pool import Executor
from interlock.store.records import NewApproval


async def open_all(tx: Executor, found: Sequence[tuple[WrittenRow, ApprovalRequest]]) -> None:
    await sql.open_approvals(tx, approvals=[_new_approval(row, request) for row, request in found])


def _new_approval(row: WrittenRow, request: ApprovalRequest) -> NewApproval:
    return NewApproval(
        id=ApprovalId(UUID(request.id)), tenant_id=row.tenant_id, run_id=row.run_id, step=request.step,
        kind=request.kind, tier=request.tier, two_person=request.two_person, summary=request.summary,
        action=encode(request.action), digest=request.digest, requested_by=row.requested_by, rule_ids=request.rule_ids,
        reason=request.reason, reason_required=request.reason_required, policy_digest=request.policy_digest,
        approvers=request.approvers, escalate_to=request.escalate_to, escalate_after=request.escalate_after,
        expires_in=request.expires_in, receipt_id=ReceiptId(UUID(request.receipt_id)) if request.receipt_id else None,
    )  # fmt: skip
