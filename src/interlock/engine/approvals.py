"""Approvals: one question, its votes, one decision. API, CLI and sweeps all decide through here."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any
from uuid import UUID

from interlock.definition.plan import EXPIRES_IN
from interlock.engine import runs
from interlock.engine.observe import observe_approval_end
from interlock.engine.outside import OpenRun, open_run, put_back, read_journal, say
from interlock.engine.policies import Policies
from interlock.engine.principal import Principal
from interlock.engine.workflows import Plans
from interlock.errors import Conflict, Forbidden, Invalid, NotFound, Problem
from interlock.governance import policy
from interlock.governance.action import ProposedAction
from interlock.governance.quorum import Question, Refusal, Vote, outcome, refusal
from interlock.governance.roles import MAY, Permission, roles_with
from interlock.journal import AskKind, Command, EntryType, Word, encode
from interlock.lifecycle import APPROVAL, ApprovalEvent, ApprovalState, ReceiptEvent, ReceiptState, Tier
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import metrics
from interlock.wire import Role


async def decide(
    tx: Tx, database: Database, plans: Plans, principal: Principal, approval_id: UUID, *,
    approves: bool, reason: str | None = None, digest: str | None = None, found_out: dict[str, Any] | None = None,
    whoever_said_it: bool = False,
) -> Row:  # fmt: skip
    """Cast one vote; with the vote that was missing, the run moves in the same transaction.

    Whoever repeats the vote with which they decided it is answered with the decision. Anybody else comes too late, even
    with the same vote; unless the caller only wants it to be so, `whoever_said_it`. `found_out` is what a person says
    became of an effect in doubt: see `resolve_doubt`.
    """
    found = await get(tx, principal, approval_id)
    run, approval = await _open(tx, database, plans, found, principal.workspace_id)
    state = ApprovalState(approval["status"])
    wanted = ApprovalState.APPROVED if approves else ApprovalState.REJECTED
    votes = _cast(await votes_on(tx, [approval]))
    said_it = whoever_said_it or any(vote.voter == principal.actor for vote in votes)
    if state == wanted and found_out is None and said_it:
        await put_back(tx, run)
        return approval
    _still_open(approval, "approve" if approves else "reject", digest)
    if approves and approval["kind"] == AskKind.IN_DOUBT and found_out is None:
        raise Conflict(
            "this is not a yes-or-no question: say whether it happened, at POST /api/receipts/{id}/resolve",
            code="EFFECT_IN_DOUBT", receipt_id=str(approval["receipt_id"]),
        )  # fmt: skip
    question = question_of(approval)
    refused = refusal(question, votes, principal.actor, principal.groups, approves=approves, reason=reason)
    if refused:
        raise _refused(refused)
    await tx.fetch("cast_vote", database.clock(), approval_id, approval["digest"], principal.actor, wanted, reason)
    votes.append(Vote(principal.actor, approves))
    event = outcome(question, votes)
    if event is None:
        about = {"type": EntryType.APPROVAL_VOTE, "approval_id": str(approval_id), "votes": len(votes)}
        await say(tx, database, run, Word(Command.NOTE, principal.actor, about, step=approval["step"]))
        return approval
    return await _resolve(tx, database, run, approval, event, principal.actor, reason, found_out)


async def _open(
    tx: Tx, database: Database, plans: Plans, found: Row, workspace_id: str | None = None
) -> tuple[OpenRun, Row]:
    """The run and then the approval under their locks: the lock order."""
    run = await open_run(tx, database, plans, found["tenant_id"], found["run_id"], workspace_id)
    approval = await tx.row("lock_approval", database.clock(), found["tenant_id"], found["id"])
    assert approval is not None
    return run, approval


def _still_open(approval: Row, event: str, digest: str | None) -> None:
    if approval["status"] != ApprovalState.REQUESTED:
        raise _too_late(approval, event)
    if approval["expires_at"] <= approval["now"]:
        raise Conflict("its time is over; nobody can decide it any more", code="APPROVAL_EXPIRED")
    if digest is not None and digest != approval["digest"]:
        raise Conflict(
            "the action is not the one you looked at; look again and decide on what it says now",
            code="ACTION_DIGEST_MISMATCH", digest=approval["digest"],
        )  # fmt: skip


def question_of(approval: Row) -> Question:
    escalated = approval["escalated_at"] is not None
    groups = [*approval["approvers"], *(approval["escalate_to"] if escalated else ())] if approval["approvers"] else []
    return Question(
        Tier(approval["tier"]), approval["two_person"],
        frozenset((approval["requested_by"], *approval["asked_by"])), editors=frozenset(approval["edited_by"]),
        is_action=approval["kind"] != AskKind.GATE,
        by_agent=approval["session_id"] is not None and not approval["edited_by"],
        groups=frozenset(groups), reason_required=approval["reason_required"],
    )  # fmt: skip


def barred(approval: Row, votes: Sequence[Row], who: Principal, *, approves: bool) -> str | None:
    """Why they cannot decide so, in words for them, or None. Asked of the function that will refuse them."""
    if Permission.APPROVE not in MAY[who.role]:
        if who.role == Role.AGENT:
            return "an agent never approves"
        return f"your key's role is {who.role}; deciding takes {roles_with(Permission.APPROVE)}"
    refused = refusal(question_of(approval), _cast(votes), who.actor, who.groups, approves=approves, reason="given")
    return refused.detail if refused else None


def _cast(votes: Sequence[Row]) -> list[Vote]:
    return [Vote(vote["voter"], vote["decision"] == ApprovalState.APPROVED) for vote in votes]


async def votes_on(tx: Tx | Database, approvals: Sequence[Row]) -> list[Row]:
    """Only those that were cast on the action as it stands now."""
    digests = {approval["id"]: approval["digest"] for approval in approvals}
    return [v for v in await tx.fetch("votes_on", list(digests)) if digests[v["approval_id"]] == v["digest"]]


async def edit(
    tx: Tx, database: Database, plans: Plans, policies: Policies, principal: Principal, approval_id: UUID, *,
    patch: dict[str, Any], reason: str | None = None, digest: str | None = None,
) -> Row:  # fmt: skip
    """Approve a changed action: it is judged again as if proposed anew, and votes on the old one no longer count."""
    found = await get(tx, principal, approval_id)
    run, approval = await _open(tx, database, plans, found, principal.workspace_id)
    _still_open(approval, "edit", digest)
    if approval["kind"] != AskKind.ACTION:
        raise Conflict("only a proposed action can be edited, not a gate", code="NOT_AN_ACTION")
    # Whoever may not even say no to it may not change it and set aside what others said.
    if refused := refusal(question_of(approval), [], principal.actor, principal.groups, approves=False, reason=reason):
        raise _refused(refused)
    journal = run.journal or await read_journal(tx, plans, run.row)
    fold = journal.fold_of(approval["step"])
    given = fold.step.input.render(journal.scope_of(fold)) or {}
    action, decision = await policies.judge_edit(tx, run.row, approval, given, patch, run.now)
    if decision.answer == policy.Answer.DENY:
        raise Forbidden(f"the policy denies the edited action: {decision.reason}", code="POLICY_DENIED")
    edited = await _put_in_place(tx, database, approval, action, decision, principal.actor)
    data = _edit_in_journal(edited, action, decision, policies.hidden(action.tool))
    await say(tx, database, run, Word(Command.EDIT, principal.actor, data, step=approval["step"]))
    question = question_of(edited)
    if refusal(question, [], principal.actor, principal.groups, approves=True, reason=reason):
        return edited  # whoever changed it may not be the one to allow it: others are asked
    return await decide(tx, database, plans, principal, approval_id, approves=True, reason=reason, digest=action.digest)


async def _put_in_place(
    tx: Tx, database: Database, approval: Row, action: ProposedAction, decision: policy.Decision, by: str
) -> Row:
    """The edited action in place of the proposed one. What is asked of approvers is what the policy asks about it now;
    if the policy would allow it without asking, they are asked as before."""
    asks = decision.answer == policy.Answer.NEEDS_APPROVAL
    edited = await tx.row(
        "edit_action", approval["id"], encode(action.as_dict()), action.digest,
        decision.tier if asks else approval["tier"], decision.two_person if asks else approval["two_person"],
        list(decision.rule_ids), decision.reason, decision.policy_digest,
        f"{action.tool} on {action.target}" if action.target else action.tool, by, database.clock(),
        list(decision.approvers if asks else approval["approvers"]),
        decision.reason_required if asks else approval["reason_required"],
        (decision.expires_in or EXPIRES_IN[decision.tier or Tier.HIGH]) if asks else None,
        list(decision.escalate_to if asks else approval["escalate_to"]), decision.escalate_after,
    )  # fmt: skip
    assert edited is not None
    return edited


def _edit_in_journal(
    edited: Row, action: ProposedAction, decision: policy.Decision, hidden: Iterable[str]
) -> dict[str, Any]:
    """Without the fields that are secret: they stay the workflow's, and the journal has no text in place of them."""
    held_back = {*action.secrets, *hidden}
    return {
        "approval_id": str(edited["id"]), "digest": action.digest,
        "fields": {name: value for name, value in action.plain_fields.items() if name not in held_back},
        "policy_digest": decision.policy_digest, "decision": decision.recorded(),
        "tier": edited["tier"], "two_person": edited["two_person"], "approvers": list(edited["approvers"]),
        "reason_required": edited["reason_required"],
    }  # fmt: skip


# What a person says of an effect in doubt, as an event of its receipt.
_FOUND_OUT = {"happened": ReceiptEvent.CONFIRM, "did_not_happen": ReceiptEvent.FAIL, "fail": ReceiptEvent.FAIL}


async def resolve_doubt(
    tx: Tx, database: Database, plans: Plans, principal: Principal, receipt_id: UUID, *,
    outcome: str, output: Any = None, reason: str | None = None,
) -> None:  # fmt: skip
    """A person found out what became of an interrupted effect: it happened, it did not, or the run shall fail.

    Its run may have ended meanwhile. Then only the receipt learns it, and with it whoever wants the same effect.
    """
    receipt = await tx.row("get_receipt", principal.tenant_id, receipt_id)
    run = await tx.row("get_run", principal.tenant_id, receipt["run_id"]) if receipt else None
    if receipt is None or run is None or not principal.reaches(run["workspace_id"]):
        raise NotFound(f"no receipt {receipt_id}", code="RECEIPT_NOT_FOUND")
    if receipt["status"] != ReceiptState.IN_DOUBT:
        metrics.refused.labels("receipt", receipt["status"], _FOUND_OUT[outcome]).inc()
        raise Conflict(f"the receipt is {receipt['status']}; there is no doubt about it", code="RECEIPT_RESOLVED")
    text = encode(output) if outcome == "happened" else None
    approval = await tx.row("approval_on_receipt", principal.tenant_id, receipt_id)
    if approval is not None and approval["status"] == ApprovalState.REQUESTED:
        await decide(
            tx, database, plans, principal, approval["id"], approves=outcome != "fail", reason=reason,
            found_out={"outcome": outcome, "output": text},
        )  # fmt: skip
    elif outcome == "fail":
        raise Conflict("its run does not wait for an answer any more", code="RUN_TERMINAL_STATE")
    elif principal.actor in await tx.value("askers_of", run["id"]):
        raise Forbidden("who asked for it cannot settle it: another person has to", code="SELF_APPROVAL")
    if outcome == "fail":
        return  # that the run ends tells nobody whether it happened: its key stays taken until somebody knows
    status = ReceiptState.SUCCEEDED if outcome == "happened" else ReceiptState.FAILED
    if await tx.row("resolve_doubt", database.clock(), receipt_id, status, text) is None:
        raise Conflict("somebody else has said what became of it", code="RECEIPT_RESOLVED")
    tx.afterwards(metrics.transition("receipt", receipt["status"], status).inc)


async def expire(tx: Tx, database: Database, plans: Plans, tenant_id: UUID, approval_id: UUID) -> None:
    found = await tx.row("get_approval", tenant_id, approval_id)
    assert found is not None
    run, approval = await _open(tx, database, plans, found)
    if approval["status"] == ApprovalState.REQUESTED and approval["expires_at"] <= approval["now"]:
        await _resolve(tx, database, run, approval, ApprovalEvent.EXPIRE, "system:timeout", None)
    else:
        await put_back(tx, run)


async def mention(tx: Tx, database: Database, plans: Plans, tenant_id: UUID, approval_id: UUID) -> None:
    """Ask the second group too if its time has come; else remind people, once. One thing per transaction."""
    found = await tx.row("get_approval", tenant_id, approval_id)
    assert found is not None
    run, approval = await _open(tx, database, plans, found)
    now, still_open = approval["now"], approval["status"] == ApprovalState.REQUESTED
    about: dict[str, Any] = {"approval_id": str(approval_id)}
    if still_open and approval["escalated_at"] is None and _is_due(approval["escalate_at"], now):
        await tx.row("escalate_approval", database.clock(), approval_id)
        about |= {"type": EntryType.APPROVAL_ESCALATED, "escalate_to": list(approval["escalate_to"])}
    elif still_open and _is_due(approval["remind_at"], now):
        await tx.row("remind_approval", database.clock(), approval_id)
        about |= {"type": EntryType.APPROVAL_REMINDED, "expires_at": approval["expires_at"]}
    else:
        await put_back(tx, run)
        return
    await say(tx, database, run, Word(Command.NOTE, "system:timer", about, step=approval["step"]))


def _is_due(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and moment <= now


async def _resolve(
    tx: Tx, database: Database, run: OpenRun, approval: Row, event: ApprovalEvent, actor: str, reason: str | None,
    found_out: dict[str, Any] | None = None,
) -> Row:  # fmt: skip
    state = APPROVAL.move(ApprovalState(approval["status"]), event)
    resolved = await tx.row("resolve_approval", database.clock(), approval["id"], state)
    assert resolved is not None
    tx.afterwards(partial(observe_approval_end, resolved))
    data = {"approval_id": str(approval["id"]), "decision": state, "reason": reason, **(found_out or {})}
    await say(tx, database, run, Word(Command.DECIDE, actor, data, step=approval["step"]))
    return resolved


async def approve_run(
    tx: Tx, database: Database, plans: Plans, principal: Principal, run_id: UUID, reason: str | None = None
) -> None:
    """Approve whatever the run waits for. If it waits for nothing, nothing changes."""
    await runs.get(tx, principal, run_id)
    for approval in await listed(tx, principal, status=ApprovalState.REQUESTED, run_id=run_id):
        await decide(tx, database, plans, principal, approval["id"], approves=True, reason=reason, whoever_said_it=True)


async def listed(
    tx: Tx | Database,
    principal: Principal,
    *,
    status: str | None = None,
    run_id: UUID | None = None,
    session_id: UUID | None = None,
    cursor: UUID | None = None,
    limit: int = 100,
) -> list[Row]:
    return await tx.fetch(
        "list_approvals", principal.tenant_id, cursor, status, run_id, limit, principal.workspace_id, session_id
    )


async def get(tx: Tx | Database, principal: Principal, approval_id: UUID) -> Row:
    row = await tx.row("get_approval", principal.tenant_id, approval_id)
    if row is not None and principal.workspace_id is not None:
        run = await tx.row("get_run", principal.tenant_id, row["run_id"])
        if run is None or not principal.reaches(run["workspace_id"]):
            row = None
    if row is None:
        raise NotFound(f"no approval {approval_id}", code="APPROVAL_NOT_FOUND")
    return row


def _too_late(approval: Row, event: str) -> Conflict:
    metrics.refused.labels("approval", approval["status"], event).inc()
    if approval["status"] == ApprovalState.EXPIRED:
        # The same code whether or not a sweep came by meanwhile.
        return Conflict(
            f"nobody decided in time: it expired at {approval['expires_at']:%Y-%m-%d %H:%M:%S} UTC",
            code="APPROVAL_EXPIRED", state=approval["status"], allowed=[],
        )  # fmt: skip
    return Conflict(
        f"the approval is already {approval['status']}, since {approval['resolved_at']:%Y-%m-%d %H:%M:%S} UTC",
        code="APPROVAL_DECIDED", state=approval["status"], allowed=[],
    )  # fmt: skip


# Who may not vote at all is forbidden to; any other refused vote is one that cannot be cast as things are.
REFUSED: Mapping[str, type[Problem]] = MappingProxyType(
    {"SELF_APPROVAL": Forbidden, "NOT_AN_APPROVER": Forbidden, "REASON_REQUIRED": Invalid}
)


def _refused(why: Refusal) -> Problem:
    return REFUSED.get(why.code, Conflict)(why.detail, code=why.code)
