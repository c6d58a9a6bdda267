"""Approvals: one question, its votes, one decision. The API, the CLI and the sweeps all decide through here."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.plan import EXPIRES_IN
from interlock.engine.access.principal import Principal, name_of
from interlock.engine.effects import receipts
from interlock.engine.expression_answers import with_answers
from interlock.engine.policies import Policies
from interlock.engine.proof.instrumentation import observe_approval_end
from interlock.engine.runs import runs
from interlock.engine.workflows import Plans
from interlock.engine.writing.deliver import deliver_command, put_back
from interlock.engine.writing.load import OpenRun, load_journal, open_run
from interlock.errors import Conflict, Forbidden, InterlockError, Invalid, NotFound
from interlock.ids import ApprovalId, ReceiptId, RunId, SessionId, TenantId
from interlock.journal import ApprovalKind, CommandType, EntryType, RunCommand, encode
from interlock.lifecycle import APPROVAL, ApprovalEvent, ApprovalState, ReceiptEvent, ReceiptState, Tier
from interlock.policy import policy
from interlock.policy.action import ProposedAction
from interlock.policy.quorum import CastVote, Question, Refusal, excluded, missing, outcome, refusal
from interlock.policy.roles import MAY, Permission, roles_with
from interlock.store.pool import Database, Row, Tx
from interlock.store.records import RunRecord
from interlock.telemetry import metrics
from interlock.visible import visible_json, visible_text
from interlock.wire import Role


async def decide(
    tx: Tx, plans: Plans, principal: Principal, approval_id: ApprovalId, *,
    approves: bool, reason: str | None = None, digest: str | None = None, found_out: dict[str, Any] | None = None,
    whoever_said_it: bool = False,
) -> Row:  # fmt: skip
    """Cast one vote. The vote that completes the quorum moves the run in the same transaction.

    If the deciding voter repeats the same vote, return the existing decision. Any other voter gets
    `APPROVAL_DECIDED`, unless `whoever_said_it` is set: then the same vote of another voter succeeds too. `found_out`
    is what a person found out about an effect in doubt: see `resolve_doubt`.
    """
    found = await get(tx, principal, approval_id)
    run, approval = await _open(tx, plans, found, principal.workspace_id)
    state = ApprovalState(approval["status"])
    wanted = ApprovalState.APPROVED if approves else ApprovalState.REJECTED
    votes = _cast(await votes_on(tx, [approval]))
    said_it = whoever_said_it or any(vote.voter == principal.actor for vote in votes)
    if state == wanted and found_out is None and said_it:
        await put_back(tx, run)
        return approval
    _check_open(approval, "approve" if approves else "reject")
    _check_digest(approval, digest)
    if approves and approval["kind"] == ApprovalKind.IN_DOUBT and found_out is None:
        raise Conflict(
            "this is not a yes-or-no question: say whether it happened, at POST /api/receipts/{id}/resolve",
            code="EFFECT_IN_DOUBT", receipt_id=str(approval["receipt_id"]),
        )  # fmt: skip
    question = question_of(approval)
    refused = refusal(question, votes, principal.actor, principal.groups, approves=approves, reason=reason)
    if refused:
        raise _refused(refused)
    if approves:
        _require_digest(approval, digest)
    await tx.fetch("cast_vote", approval_id, approval["digest"], principal.actor, wanted, reason)
    votes.append(CastVote(principal.actor, approves))
    event = outcome(question, votes)
    if event is None:
        about = {"type": EntryType.APPROVAL_VOTE, "approval_id": str(approval_id), "votes": len(votes)}
        await deliver_command(tx, run, RunCommand(CommandType.NOTE, principal.actor, about, step=approval["step"]))
        return approval
    return await _resolve(tx, run, approval, event, principal.actor, reason, found_out)


async def _open(tx: Tx, plans: Plans, found: Row, workspace_id: str | None = None) -> tuple[OpenRun, Row]:
    """Lock the run and then the approval, in lock order, and return both."""
    run = await open_run(tx, plans, found["tenant_id"], found["run_id"], workspace_id)
    approval = await tx.row("lock_approval", found["tenant_id"], found["id"])
    assert approval is not None
    return run, approval


def _check_open(approval: Row, event: str) -> None:
    if approval["status"] != ApprovalState.REQUESTED:
        raise _too_late(approval, event)
    if approval["expires_at"] <= approval["now"]:
        raise Conflict(
            f"This approval expired at {_at(approval['expires_at'])} and can no longer be decided.",
            code="APPROVAL_EXPIRED",
        )


def _check_digest(approval: Row, digest: str | None) -> None:
    """Raise if the vote names another action than the current one."""
    if digest in (None, approval["digest"]):
        return
    edits = edits_of(approval)
    changed = f" {_told(edits)}" if edits["edited_by"] else ""
    raise Conflict(
        f"The action is not the one that your vote names (digest mismatch).{changed} Read the action as it is now, and"
        " vote again.",
        code="ACTION_DIGEST_MISMATCH", digest=approval["digest"], **edits,
    )  # fmt: skip


def _require_digest(approval: Row, digest: str | None) -> None:
    """Raise if an approving vote names no digest after an edit, because the voter may not have seen the edit.

    A rejection needs no digest, because no action follows it.
    """
    if digest is None and approval["edited_by"]:
        edits = edits_of(approval)
        raise Conflict(
            f"{_told(edits)} Read the action as it is now, and send its digest with your vote.",
            code="ACTION_DIGEST_REQUIRED", digest=approval["digest"], **edits,
        )  # fmt: skip


def edits_of(approval: Row) -> dict[str, Any]:
    """Return which people changed the action, when last, and each field that differs from what was proposed."""
    now = orjson.loads(approval["action"]).get("fields") or {}
    before = orjson.loads(approval["proposed"]).get("fields") or {} if approval["proposed"] else now
    return {
        "edited_by": list(dict.fromkeys(map(name_of, approval["edited_by"]))),
        "edited_at": approval["edited_at"],
        "changes": [
            {"field": name, "before": before.get(name), "after": now.get(name)}
            for name in dict.fromkeys([*before, *now])
            if before.get(name) != now.get(name)
        ],
    }


def _told(edits: Mapping[str, Any]) -> str:
    who, at = " and ".join(map(visible_text, edits["edited_by"])), _at(edits["edited_at"])
    changes = "; ".join(
        f"{visible_text(change['field'])}: {visible_json(change['before'])} → {visible_json(change['after'])}"
        for change in edits["changes"]
    )
    return f"{who} changed the action at {at} ({changes or 'back to what was proposed'})."


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def question_of(approval: Row) -> Question:
    escalated = approval["escalated_at"] is not None
    groups = [*approval["approvers"], *(approval["escalate_to"] if escalated else ())] if approval["approvers"] else []
    return Question(
        Tier(approval["tier"]), approval["two_person"],
        frozenset((approval["requested_by"], *approval["asked_by"])), editors=tuple(approval["edited_by"]),
        is_action=approval["kind"] != ApprovalKind.GATE,
        by_agent=approval["session_id"] is not None,
        groups=frozenset(groups), reason_required=approval["reason_required"],
    )  # fmt: skip


def why_cannot_vote(approval: Row, votes: Sequence[Row], who: Principal, *, approves: bool) -> str | None:
    """Return why this principal cannot cast this vote, or None. `decide` uses the same check."""
    if Permission.APPROVE not in MAY[who.role]:
        if who.role == Role.AGENT:
            return "an agent never approves"
        return f"your key's role is {who.role}; deciding takes {roles_with(Permission.APPROVE)}"
    refused = refusal(question_of(approval), _cast(votes), who.actor, who.groups, approves=approves, reason="given")
    return refused.detail if refused else None


def excluded_from(approval: Row) -> list[str]:
    """Return the names of the people who cannot approve because they requested or changed the action."""
    return sorted({name_of(actor) for actor in excluded(question_of(approval))})


def approvers_needed(approval: Row, votes: Sequence[Row]) -> int:
    return missing(question_of(approval), _cast(votes))


def _cast(votes: Sequence[Row]) -> list[CastVote]:
    return [CastVote(vote["voter"], vote["decision"] == ApprovalState.APPROVED) for vote in votes]


async def votes_on(tx: Tx | Database, approvals: Sequence[Row]) -> list[Row]:
    """Return only the votes on the current version of the action."""
    digests = {approval["id"]: approval["digest"] for approval in approvals}
    return [v for v in await tx.fetch("votes_on", list(digests)) if digests[v["approval_id"]] == v["digest"]]


async def edit(
    tx: Tx, plans: Plans, policies: Policies, principal: Principal, approval_id: ApprovalId, *,
    patch: dict[str, Any], reason: str | None = None, digest: str | None = None,
) -> Row:  # fmt: skip
    """Change the proposed action. The policy judges it again, and votes on the old one no longer count.

    The editor counts as the requester of the edited action, so another person has to approve it.
    """
    found = await get(tx, principal, approval_id)
    run, approval = await _open(tx, plans, found, principal.workspace_id)
    _check_open(approval, "edit")
    _check_digest(approval, digest)
    if approval["kind"] != ApprovalKind.ACTION:
        raise Conflict("only a proposed action can be edited, not a gate", code="NOT_AN_ACTION")
    # A principal that may not even reject the approval must not edit it, which would discard the votes of others.
    if refused := refusal(question_of(approval), [], principal.actor, principal.groups, approves=False, reason=reason):
        raise _refused(refused)
    _require_digest(approval, digest)
    journal = run.journal or await load_journal(tx, plans, run.row)
    fold = journal.fold_of(approval["step"])
    given = await with_answers(principal.tenant_id, partial(fold.step.input.render, journal.scope_of(fold))) or {}
    action, decision = await policies.judge_edit(tx, run.row, approval, given, patch, run.row.now)
    if decision.answer == policy.PolicyAnswer.DENY:
        raise Forbidden(f"the policy denies the edited action: {decision.reason}", code="POLICY_DENIED")
    edited = await _put_in_place(tx, approval, action, decision, principal.actor)
    data = _edit_in_journal(edited, action, decision, policies.hidden(action.tool))
    await deliver_command(tx, run, RunCommand(CommandType.EDIT, principal.actor, data, step=approval["step"]))
    return edited


async def _put_in_place(tx: Tx, approval: Row, action: ProposedAction, decision: policy.Decision, by: str) -> Row:
    """Replace the proposed action with the edited one.

    The policy's new decision sets the requirements for approvers. If the policy would now allow the action without
    approval, the previous requirements stay.
    """
    asks = decision.answer == policy.PolicyAnswer.NEEDS_APPROVAL
    edited = await tx.row(
        "edit_action", approval["id"], encode(action.as_dict()), action.digest,
        decision.tier if asks else approval["tier"], decision.two_person if asks else approval["two_person"],
        list(decision.rule_ids), decision.reason, decision.policy_digest,
        f"{action.tool} on {action.target}" if action.target else action.tool, by,
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
    """Return the edit as a journal entry, without secret fields.

    Secret fields keep the workflow's values, so the journal stores no replacement text for them.
    """
    held_back = {*action.secrets, *hidden}
    return {
        "approval_id": str(edited["id"]), "digest": action.digest,
        "fields": {name: value for name, value in action.plain_fields.items() if name not in held_back},
        "policy_digest": decision.policy_digest, "decision": decision.recorded(),
        "tier": edited["tier"], "two_person": edited["two_person"], "approvers": list(edited["approvers"]),
        "reason_required": edited["reason_required"],
    }  # fmt: skip


# Maps a person's finding about an effect in doubt to an event of its receipt.
_FOUND_OUT = {"happened": ReceiptEvent.CONFIRM, "did_not_happen": ReceiptEvent.FAIL, "fail": ReceiptEvent.FAIL}


async def resolve_doubt(
    tx: Tx, plans: Plans, principal: Principal, receipt_id: ReceiptId, *,
    outcome: str, output: Any = None, reason: str | None = None,
) -> None:  # fmt: skip
    """Record what a person found out about an interrupted effect: it happened, it did not, or the run shall fail.

    If the run has ended already, only the receipt changes. A later run that wants the same effect then sees the
    result.
    """
    receipt = await receipts.get(tx, principal, receipt_id)
    if receipt["status"] != ReceiptState.IN_DOUBT:
        metrics.refused.labels("receipt", receipt["status"], _FOUND_OUT[outcome]).inc()
        raise Conflict(f"the receipt is {receipt['status']}; there is no doubt about it", code="RECEIPT_RESOLVED")
    if outcome != "fail" and (worker := await tx.row("acting_worker", receipt_id)) is not None:
        raise Conflict(
            f"the call still runs in worker {worker['name']} and may yet have its effect; look again when it has ended,"
            f" or end the worker: interlock worker terminate {worker['id']}",
            code="EFFECT_STILL_RUNNING", decidable_at=worker["may_act_until"],
        )  # fmt: skip
    text = encode(output) if outcome == "happened" else None
    approval = await tx.row("approval_on_receipt", principal.tenant_id, receipt_id)
    if approval is not None and approval["status"] == ApprovalState.REQUESTED:
        await decide(
            tx, plans, principal, approval["id"], approves=outcome != "fail", reason=reason,
            found_out={"outcome": outcome, "output": text},
        )  # fmt: skip
    elif outcome == "fail":
        raise Conflict("its run does not wait for an answer any more", code="RUN_TERMINAL_STATE")
    elif principal.actor in await tx.value("requesters_of", receipt["run_id"]):
        raise Forbidden("you asked for it, so another person must say whether it happened", code="SELF_APPROVAL")
    if outcome == "fail":
        return  # the end of the run does not settle the effect: its key stays taken until a person resolves it
    status = ReceiptState.SUCCEEDED if outcome == "happened" else ReceiptState.FAILED
    if await tx.row("resolve_doubt", receipt_id, status, text) is None:
        raise Conflict("This receipt has been resolved already.", code="RECEIPT_RESOLVED")
    tx.on_commit(metrics.transition("receipt", receipt["status"], status).inc)


async def expire(tx: Tx, plans: Plans, tenant_id: TenantId, approval_id: ApprovalId) -> None:
    found = await tx.row("get_approval", tenant_id, approval_id)
    assert found is not None
    run, approval = await _open(tx, plans, found)
    if approval["status"] == ApprovalState.REQUESTED and approval["expires_at"] <= approval["now"]:
        await _resolve(tx, run, approval, ApprovalEvent.EXPIRE, "system:timeout", None)
    else:
        await put_back(tx, run)


async def remind_or_escalate(tx: Tx, plans: Plans, tenant_id: TenantId, approval_id: ApprovalId) -> None:
    """Escalate to the second group if that is due, else remind people, once. One change per transaction."""
    found = await tx.row("get_approval", tenant_id, approval_id)
    assert found is not None
    run, approval = await _open(tx, plans, found)
    now, still_open = approval["now"], approval["status"] == ApprovalState.REQUESTED
    about: dict[str, Any] = {"approval_id": str(approval_id)}
    if still_open and approval["escalated_at"] is None and _is_due(approval["escalate_at"], now):
        await tx.row("escalate_approval", approval_id)
        about |= {"type": EntryType.APPROVAL_ESCALATED, "escalate_to": list(approval["escalate_to"])}
    elif still_open and _is_due(approval["remind_at"], now):
        await tx.row("remind_approval", approval_id)
        about |= {"type": EntryType.APPROVAL_REMINDED, "expires_at": approval["expires_at"]}
    else:
        await put_back(tx, run)
        return
    await deliver_command(tx, run, RunCommand(CommandType.NOTE, "system:timer", about, step=approval["step"]))


def _is_due(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and moment <= now


async def _resolve(
    tx: Tx, run: OpenRun, approval: Row, event: ApprovalEvent, actor: str, reason: str | None,
    found_out: dict[str, Any] | None = None,
) -> Row:  # fmt: skip
    state = APPROVAL.move(ApprovalState(approval["status"]), event)
    resolved = await tx.row("resolve_approval", approval["id"], state)
    assert resolved is not None
    tx.on_commit(partial(observe_approval_end, state, resolved["requested_at"], resolved["resolved_at"]))
    data = {"approval_id": str(approval["id"]), "decision": state, "reason": reason, **(found_out or {})}
    await deliver_command(tx, run, RunCommand(CommandType.DECIDE, actor, data, step=approval["step"]))
    return resolved


async def approve_run(
    tx: Tx, plans: Plans, principal: Principal, run_id: RunId, *,
    reason: str | None = None, digest: str | None = None,
) -> None:  # fmt: skip
    """Approve all actions that the run waits for, or only the one with this digest."""
    run = await runs.get(tx, principal, run_id)
    waiting = await list_approvals(tx, principal, status=ApprovalState.REQUESTED, run_id=run_id)
    named = [approval for approval in waiting if digest in (None, approval["digest"])]
    if not waiting:
        await _check_repeated(tx, principal, run, digest)
    elif not named:
        _check_digest(waiting[0], digest)
    for approval in named:
        await decide(
            tx, plans, principal, approval["id"], approves=True, reason=reason, digest=digest,
            whoever_said_it=True,
        )  # fmt: skip


async def _check_repeated(tx: Tx, principal: Principal, run: RunRecord, digest: str | None) -> None:
    """Raise if the run waits for no approval, unless the caller repeats the vote that let the run continue."""
    if run.completed_at is not None:
        raise Conflict(
            f"The run is {run.status}: it waits for no approval.",
            code="RUN_TERMINAL_STATE", state=run.status, allowed=[],
        )  # fmt: skip
    approved = await list_approvals(tx, principal, status=ApprovalState.APPROVED, run_id=run.id, limit=1)
    last = [approval for approval in approved if digest in (None, approval["digest"])]
    if not any(vote["voter"] == principal.actor for vote in await votes_on(tx, last)):
        raise Conflict(
            f"The run is {run.status}: it waits for no approval.",
            code="NOTHING_TO_APPROVE", state=run.status, allowed=[],
        )  # fmt: skip


async def list_approvals(
    tx: Tx | Database,
    principal: Principal,
    *,
    status: str | None = None,
    run_id: RunId | None = None,
    session_id: SessionId | None = None,
    cursor: UUID | None = None,
    limit: int = 100,
) -> list[Row]:
    return await tx.fetch(
        "list_approvals", principal.tenant_id, cursor, status, run_id, limit, principal.workspace_id, session_id
    )


async def get(tx: Tx | Database, principal: Principal, approval_id: ApprovalId) -> Row:
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
        # The same code whether or not a sweep has already marked the approval as expired.
        return Conflict(
            f"nobody decided in time: it expired at {approval['expires_at']:%Y-%m-%d %H:%M:%S} UTC",
            code="APPROVAL_EXPIRED", state=approval["status"], allowed=[],
        )  # fmt: skip
    return Conflict(
        f"the approval is already {approval['status']}, since {approval['resolved_at']:%Y-%m-%d %H:%M:%S} UTC",
        code="APPROVAL_DECIDED", state=approval["status"], allowed=[],
    )  # fmt: skip


# A principal without the right to vote gets 403. Refusals not listed here conflict with the current state: 409.
REFUSED: Mapping[str, type[InterlockError]] = MappingProxyType(
    {"SELF_APPROVAL": Forbidden, "NOT_AN_APPROVER": Forbidden, "REASON_REQUIRED": Invalid}
)


def _refused(why: Refusal) -> InterlockError:
    return REFUSED.get(why.code, Conflict)(why.detail, code=why.code)
