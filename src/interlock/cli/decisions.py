"""Showing what is decided, by people and by policy: approvals, judgements, receipts, standing grants."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from interlock.cli import show
from interlock.cli.text import one_line, visible
from interlock.lifecycle import ApprovalState, ReceiptState

if TYPE_CHECKING:
    from interlock.wire import Action, Approval, Decided, Difference, Grant, Outcome, PolicyDecision, Receipt, Vote

# ---------------------------------------------------------------- approvals

APPROVALS: "show.Columns[Approval]" = {
    "id": lambda approval: approval.id,
    "tier": lambda approval: approval.tier,
    "step": lambda approval: visible(approval.step_key),
    "asks": lambda approval: one_line(approval.summary or approval.action.tool or ""),
    "votes": lambda approval: f"{len(approval.votes)}/{2 if approval.two_person else 1}",
    "expires": lambda approval: show.moment(approval.expires_at),
}


def approval_page(approval: "Approval") -> RenderableType:
    from interlock.journal import AskKind

    why, kinds = approval.rationale, {str(kind): kind.doc for kind in AskKind}
    head = show.facts(
        approval=approval.id,
        status=Text.assemble(show.word(approval.status), (f"  {approval.status.doc}", "dim")),
        time_left=_time_left(approval),
        run=f"{approval.run_id}  step {visible(approval.step_key)}",
        kind=Text.assemble(visible(approval.kind), (f"  {kinds.get(approval.kind, '')}", "dim")),
        asks=visible(approval.summary),
        asked_by=visible(approval.requested_by),
        tier=f"{approval.tier}, two people" if approval.two_person else str(approval.tier),
        may_decide=_who_decides(approval),
        why=visible(why.reason or ""),
        rules=visible(", ".join(why.rule_ids)),
        policy=visible(why.policy_digest or ""),
        requested=show.moment(approval.requested_at),
        decided=show.moment(approval.resolved_at),
    )
    parts: list[RenderableType] = [head, "", "action", action_block(approval.action)]
    if approval.votes:
        parts += ["", "votes", *(f"  {_vote_line(vote)}" for vote in approval.votes)]
    if approval.kind == AskKind.IN_DOUBT and approval.status is ApprovalState.REQUESTED:
        parts += ["", "what became of it?", _choices(approval.receipt_id or "RECEIPT")]
    return Group(*parts)


def action_block(action: "Action") -> RenderableType:
    """What would be done, field by field, and the digest a decision is bound to."""
    about = {"tool": action.tool, "target": action.target}
    shown = {name: value for name, value in about.items() if value is not None}
    parts: list[RenderableType] = [show.block({**shown, "digest": action.digest})]
    return Group(*parts, "  fields", show.block(action.fields, indent=4)) if action.fields else parts[0]


def _time_left(approval: "Approval") -> str | None:
    if approval.status is not ApprovalState.REQUESTED or approval.expires_at is None:
        return None
    left = (approval.expires_at - datetime.now(UTC)).total_seconds()
    return f"{show.span(left) if left > 0 else 'none'}, until {show.moment(approval.expires_at)}"


def _who_decides(approval: "Approval") -> str:
    who = f"members of {' or '.join(approval.approvers)}" if approval.approvers else "anybody who may approve"
    return visible(f"{who}; a reason is required" if approval.reason_required else who)


def barred_line(approval: "Approval") -> Text | None:
    if approval.barred is None:
        return None
    return Text(visible(f"You cannot approve this: {approval.barred}."), style="yellow")


def _choices(receipt_id: str) -> RenderableType:
    resolve = f"interlock receipt resolve {visible(receipt_id)}"
    choices = Table.grid(padding=(0, 2, 0, 0))
    choices.add_row("  it happened", f"{resolve} --happened --output JSON")
    choices.add_row("  it did not happen", f"{resolve} --did-not-happen")
    choices.add_row("  fail the run", f"{resolve} --fail")
    return choices


def _vote_line(vote: "Vote") -> str:
    return f"{show.moment(vote.at)}  {visible(vote.by)}: {vote.decision}  {one_line(vote.reason or '')}".rstrip()


def decided_line(decided: "Decided") -> Text:
    if decided.ok:
        said = visible(decided.status or "")
        more = ": one more person has to decide" if decided.status is ApprovalState.REQUESTED else ""
        return Text.assemble(("✓ ", "green"), f"{visible(decided.id)}  {said}{more}")
    problem = decided.problem
    why = f"{problem.title}: {problem.detail} ({problem.code})" if problem else "refused"
    return Text.assemble(("✗ ", "red"), f"{visible(decided.id)}  {one_line(why)}")


# ---------------------------------------------------------------- policy

_ANSWERS = {"allow": "green", "deny": "red", "needs_approval": "yellow"}

DIFFERENCES: "show.Columns[Difference]" = {
    "run": lambda change: change.run_id or "",
    "step": lambda change: visible(change.step or ""),
    "tool": lambda change: visible(_tool_and_target(change.summary)),
    "before → after": lambda change: Text.assemble(_answer(change.before), " → ", _answer(change.after)),
    "why": lambda change: one_line(change.reason),
}


def _tool_and_target(summary: str) -> str:
    """Of `shop.refund on ch_1 for operator ann in run … step …`, what no other column says."""
    action = summary.partition(" in run ")[0]
    return action.rpartition(" for ")[0] or action


def _answer(outcome: "Outcome") -> Text:
    return Text(visible(str(outcome)), style=_ANSWERS.get(outcome.answer, ""))


def decision_page(decision: "PolicyDecision") -> RenderableType:
    head = show.facts(
        answer=Text(visible(decision.answer), style=_ANSWERS.get(decision.answer, "")),
        why=visible(decision.reason),
        rules=visible(", ".join(decision.rule_ids)) or "none applies",
        tier=f"{decision.tier}, two people" if decision.tier and decision.two_person else decision.tier,
        policy=visible(decision.policy_digest or ""),
    )
    return Group(head, "", "action", action_block(decision.action)) if decision.action else head


# ---------------------------------------------------------------- receipts and grants

RECEIPTS: "show.Columns[Receipt]" = {
    "id": lambda receipt: receipt.id,
    "step": lambda receipt: visible(receipt.step_key),
    "tool": lambda receipt: visible(receipt.tool),
    "status": lambda receipt: show.word(receipt.status),
    "attempt": lambda receipt: str(receipt.attempt),
    "undo": lambda receipt: "undone" if receipt.reversal else "possible" if receipt.reversible else "",
    "created": lambda receipt: show.moment(receipt.created_at),
    "took": lambda receipt: show.took(receipt.created_at, receipt.completed_at) if receipt.completed_at else "",
}


def receipt_page(receipt: "Receipt") -> RenderableType:
    head = show.facts(
        receipt=receipt.id,
        status=Text.assemble(show.word(receipt.status), (f"  {receipt.status.doc}", "dim")),
        run=f"{receipt.run_id}  step {visible(receipt.step_key)}",
        tool=visible(receipt.tool),
        attempt=str(receipt.attempt),
        idempotency_key=visible(receipt.idempotency_key),
        undo=_undo(receipt),
        created=show.moment(receipt.created_at),
        completed=show.moment(receipt.completed_at),
    )
    parts: list[RenderableType] = [head]
    for name, metadata in (("request", receipt.request_metadata), ("response", receipt.response_metadata)):
        if metadata is not None:
            parts += ["", name, show.block(metadata if isinstance(metadata, dict) else {"": metadata})]
    if receipt.status is ReceiptState.IN_DOUBT:
        parts += ["", "what became of it?", _choices(receipt.id)]
    return Group(*parts)


def _undo(receipt: "Receipt") -> str | None:
    if receipt.reversal:
        by, reason = show.who(receipt.reversal.get("by") or ""), receipt.reversal.get("reason")
        said = [f"undone by run {receipt.reversal.get('run_id')}", f"asked by {by}" if by else "", reason or ""]
        return one_line(", ".join(filter(None, said)))
    return f"possible, with {visible(receipt.undo)}" if receipt.undo else "possible" if receipt.reversible else None


GRANTS: "show.Columns[Grant]" = {
    "id": lambda grant: grant.id,
    "tool": lambda grant: visible(grant.tool),
    "arguments": lambda grant: _arguments(grant),
    "tier": lambda grant: grant.tier,
    "by": lambda grant: visible(grant.created_by),
    "uses": lambda grant: str(grant.uses),
    "expires": lambda grant: show.moment(grant.expires_at),
    "revoked": lambda grant: show.moment(grant.revoked_at),
    "reason": lambda grant: one_line(grant.reason or ""),
}


def _arguments(grant: "Grant") -> str:
    return " ".join(f"{visible(name)}={show.cell(value)}" for name, value in grant.arguments.items()) or "any"
