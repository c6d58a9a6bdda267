"""Approvals: one question, its votes, one decision. API, CLI and sweeps all decide through here."""

from typing import Any
from uuid import UUID

from interlock.engine.outside import move_on, open_run, put_back, say
from interlock.engine.principal import Principal
from interlock.engine.workflows import Plans
from interlock.errors import Conflict, Forbidden, NotFound
from interlock.governance.quorum import Question, Refusal, Vote, outcome, refusal
from interlock.journal import Command, EntryType, Word
from interlock.lifecycle import APPROVAL, ApprovalEvent, ApprovalState, Tier
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import metrics


async def decide(
    tx: Tx, database: Database, plans: Plans, principal: Principal, approval_id: UUID, *,
    approves: bool, reason: str | None = None, digest: str | None = None,
) -> Row:  # fmt: skip
    """Cast one vote; with the vote that was missing, the run moves in the same transaction."""
    found = await _find(tx, principal, approval_id)
    run = await open_run(tx, database, plans, principal.tenant_id, found["run_id"], principal.workspace_id)
    approval = await tx.row("lock_approval", database.clock(), principal.tenant_id, approval_id)
    assert approval is not None
    state = ApprovalState(approval["status"])
    wanted = ApprovalState.APPROVED if approves else ApprovalState.REJECTED
    if state == wanted:
        await put_back(tx, run)  # said already, by this person or another: nothing changes
        return approval
    if state != ApprovalState.REQUESTED:
        raise _too_late(approval, "approve" if approves else "reject")
    if approval["expires_at"] <= approval["now"]:
        raise Conflict("its time is over; nobody can decide it any more", code="APPROVAL_EXPIRED")
    if digest is not None and digest != approval["digest"]:
        raise Conflict(
            "the action is not the one you looked at; look again and decide on what it says now",
            code="ACTION_DIGEST_MISMATCH", digest=approval["digest"],
        )  # fmt: skip

    question = Question(Tier(approval["tier"]), approval["two_person"], approval["requested_by"])
    votes = [Vote(v["voter"], v["decision"] == "approved") for v in await tx.fetch("votes_on", [approval_id])]
    if refused := refusal(question, votes, principal.actor, approves=approves):
        raise _refused(refused)
    await tx.fetch("cast_vote", database.clock(), approval_id, principal.actor, wanted, reason)
    votes.append(Vote(principal.actor, approves))
    event = outcome(question, votes)
    if event is None:
        if run.journal is not None:
            data = {"approval_id": str(approval_id), "votes": len(votes)}
            run.journal.note(EntryType.APPROVAL_VOTE, actor=principal.actor, step=approval["step"], data=data)
            await move_on(tx, database, run)
        else:
            await put_back(tx, run)
        return approval
    return await _resolve(tx, database, run, approval, event, principal.actor, reason)


async def expire(tx: Tx, database: Database, plans: Plans, tenant_id: UUID, approval_id: UUID) -> None:
    found = await tx.row("get_approval", tenant_id, approval_id)
    assert found is not None
    run = await open_run(tx, database, plans, tenant_id, found["run_id"])
    approval = await tx.row("lock_approval", database.clock(), tenant_id, approval_id)
    assert approval is not None
    if approval["status"] == ApprovalState.REQUESTED and approval["expires_at"] <= approval["now"]:
        await _resolve(tx, database, run, approval, ApprovalEvent.EXPIRE, "system:timeout", None)
    else:
        await put_back(tx, run)


async def _resolve(
    tx: Tx, database: Database, run: Any, approval: Row, event: ApprovalEvent, actor: str, reason: str | None
) -> Row:
    state = APPROVAL.move(ApprovalState(approval["status"]), event)
    resolved = await tx.row("resolve_approval", database.clock(), approval["id"], state)
    assert resolved is not None
    metrics.transitions["approval"].labels(approval["status"], state).inc()
    data = {"approval_id": str(approval["id"]), "decision": state, "reason": reason}
    await say(tx, database, run, Word(Command.DECIDE, actor, data, step=approval["step"]))
    return resolved


async def approve_run(
    tx: Tx, database: Database, plans: Plans, principal: Principal, run_id: UUID, reason: str | None = None
) -> None:
    """Approve whatever the run waits for. If it waits for nothing, nothing changes."""
    row = await tx.row("get_run", principal.tenant_id, run_id)
    if row is None or (principal.workspace_id is not None and row["workspace_id"] != principal.workspace_id):
        raise NotFound(f"no run {run_id}", code="RUN_NOT_FOUND")
    for approval in await listed(tx, principal, status=ApprovalState.REQUESTED, run_id=run_id):
        await decide(tx, database, plans, principal, approval["id"], approves=True, reason=reason)


async def listed(
    tx: Tx | Database,
    principal: Principal,
    *,
    status: str | None = None,
    run_id: UUID | None = None,
    cursor: UUID | None = None,
    limit: int = 100,
) -> list[Row]:
    return await tx.fetch("list_approvals", principal.tenant_id, cursor, status, run_id, limit, principal.workspace_id)


async def get(tx: Tx | Database, principal: Principal, approval_id: UUID) -> Row:
    return await _find(tx, principal, approval_id)


async def _find(tx: Tx | Database, principal: Principal, approval_id: UUID) -> Row:
    row = await tx.row("get_approval", principal.tenant_id, approval_id)
    if row is not None and principal.workspace_id is not None:
        run = await tx.row("get_run", principal.tenant_id, row["run_id"])
        if run is None or run["workspace_id"] != principal.workspace_id:
            row = None
    if row is None:
        raise NotFound(f"no approval {approval_id}", code="APPROVAL_NOT_FOUND")
    return row


def _too_late(approval: Row, event: str) -> Conflict:
    metrics.refused.labels("approval", approval["status"], event).inc()
    return Conflict(
        f"the approval is {approval['status']} since {approval['resolved_at']:%Y-%m-%d %H:%M:%S} UTC",
        code="APPROVAL_DECIDED", state=approval["status"], allowed=[],
    )  # fmt: skip


def _refused(why: Refusal) -> Conflict | Forbidden:
    return Forbidden(why.detail, code=why.code) if why.code == "SELF_APPROVAL" else Conflict(why.detail, code=why.code)
