"""Views of decisions by people and by policy: approvals, policy evaluations, receipts, grants."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from interlock import clock
from interlock.cli import formatting
from interlock.cli.parsing import one_line, visible
from interlock.lifecycle import ApprovalState, ReceiptState

if TYPE_CHECKING:
    from interlock.wire import Action, Approval, Decided, Difference, Grant, Outcome, PolicyDecision, Receipt, Vote

# ---------------------------------------------------------------- approvals

APPROVALS: "formatting.Columns[Approval]" = {
    "id": lambda approval: approval.id,
    "tier": lambda approval: approval.tier,
    "step": lambda approval: visible(approval.step_key),
    "asks": lambda approval: one_line(approval.summary or approval.action.tool or ""),
    "votes": lambda approval: f"{len(approval.votes)}/{2 if approval.two_person else 1}",
    "expires": lambda approval: formatting.moment(approval.expires_at),
}


def approval_page(approval: "Approval") -> RenderableType:
    from interlock.journal import ApprovalKind

    why, kinds = approval.rationale, {str(kind): kind.doc for kind in ApprovalKind}
    head = formatting.facts(
        approval=approval.id,
        status=Text.assemble(formatting.word(approval.status), (f"  {approval.status.doc}", "dim")),
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
        requested=formatting.moment(approval.requested_at),
        changed=_changed(approval),
        decided=formatting.moment(approval.resolved_at),
    )
    parts: list[RenderableType] = [head, "", "action", action_block(approval.action)]
    if approval.changes:
        parts += ["", "changed after it was proposed", _changes(approval)]
    if approval.votes:
        parts += ["", "votes", *(f"  {_vote_line(vote)}" for vote in approval.votes)]
    if approval.kind == ApprovalKind.IN_DOUBT and approval.status is ApprovalState.REQUESTED:
        parts += ["", "what became of it?", _choices(approval.receipt_id or "RECEIPT")]
    return Group(*parts)


def action_block(action: "Action") -> RenderableType:
    """Return the action, field by field, and the digest that a vote is bound to."""
    about = {"tool": action.tool, "target": action.target}
    shown = {name: value for name, value in about.items() if value is not None}
    parts: list[RenderableType] = [formatting.block({**shown, "digest": action.digest})]
    return Group(*parts, "  fields", formatting.block(action.fields, indent=4)) if action.fields else parts[0]


def _changed(approval: "Approval") -> str | None:
    if not approval.edited_by:
        return None
    return f"{formatting.moment(approval.edited_at)} by {visible(', '.join(approval.edited_by))}"


def _changes(approval: "Approval") -> Table:
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for change in approval.changes:
        found.add_row(
            f"  {one_line(change.field)}", f"{formatting.exact(change.before)} → {formatting.exact(change.after)}"
        )
    return found


def _time_left(approval: "Approval") -> str | None:
    if approval.status is not ApprovalState.REQUESTED or approval.expires_at is None:
        return None
    left = (approval.expires_at - clock.now()).total_seconds()
    return f"{formatting.span(left) if left > 0 else 'none'}, until {formatting.moment(approval.expires_at)}"


def _who_decides(approval: "Approval") -> str:
    who = f"members of {' or '.join(approval.approvers)}" if approval.approvers else "any approver"
    if approval.excluded:
        who = f"{who} except {' and '.join(approval.excluded)}"
    return visible(f"{who}; a reason is required" if approval.reason_required else who)


CHANGED = Text("The action is changed. Another person has to approve it.", style="green")


def voted_line() -> Text:
    from interlock.wire import VOTE_RECORDED

    return Text(VOTE_RECORDED, style="green")


def barred_line(approval: "Approval") -> Text | None:
    if approval.voted:
        return voted_line()
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
    return f"{formatting.moment(vote.at)}  {visible(vote.by)}: {vote.decision}  {one_line(vote.reason or '')}".rstrip()


def decided_line(decided: "Decided") -> Text:
    if decided.ok:
        said = visible(decided.status or "")
        if decided.status is ApprovalState.REQUESTED:
            said = str(voted_line())
        return Text.assemble(("✓ ", "green"), f"{visible(decided.id)}  {said}")
    problem = decided.problem
    why = f"{problem.title}: {problem.detail} ({problem.code})" if problem else "refused"
    return Text.assemble(("✗ ", "red"), f"{visible(decided.id)}  {one_line(why)}")


# ---------------------------------------------------------------- policy

_ANSWERS = {"allow": "green", "deny": "red", "needs_approval": "yellow"}

DIFFERENCES: "formatting.Columns[Difference]" = {
    "run": lambda change: change.run_id or "",
    "step": lambda change: visible(change.step or ""),
    "tool": lambda change: visible(_tool_and_target(change.summary)),
    "before → after": lambda change: Text.assemble(_answer(change.before), " → ", _answer(change.after)),
    "why": lambda change: one_line(change.reason),
}


LOOSENED: "formatting.Columns[Difference]" = {
    "action": lambda change: visible(change.summary),
    "before → after": lambda change: Text.assemble(_answer(change.before), " → ", _answer(change.after)),
    "rules": lambda change: one_line(", ".join(change.rule_ids)),
}


def _tool_and_target(summary: str) -> str:
    """Return the tool and target of a summary.

    The summary is `shop.refund on ch_1 for operator ann in run … step …`; other columns have the rest.
    """
    action = summary.partition(" in run ")[0]
    return action.rpartition(" for ")[0] or action


def _answer(outcome: "Outcome") -> Text:
    from interlock.policy.decision import ApprovalDemand

    return Text(visible(str(ApprovalDemand.of_record(outcome.model_dump()))), style=_ANSWERS.get(outcome.answer, ""))


def decision_page(decision: "PolicyDecision") -> RenderableType:
    head = formatting.facts(
        answer=Text(visible(decision.answer), style=_ANSWERS.get(decision.answer, "")),
        why=visible(decision.reason),
        rules=visible(", ".join(decision.rule_ids)) or "none applies",
        tier=f"{decision.tier}, two people" if decision.tier and decision.two_person else decision.tier,
        policy=visible(decision.policy_digest or ""),
    )
    return Group(head, "", "action", action_block(decision.action)) if decision.action else head


# ---------------------------------------------------------------- receipts and grants

RECEIPTS: "formatting.Columns[Receipt]" = {
    "id": lambda receipt: receipt.id,
    "step": lambda receipt: visible(receipt.step_key),
    "tool": lambda receipt: visible(receipt.tool),
    "status": lambda receipt: formatting.word(receipt.status),
    "attempt": lambda receipt: str(receipt.attempt),
    "undo": lambda receipt: "undone" if receipt.reversal else "possible" if receipt.reversible else "",
    "created": lambda receipt: formatting.moment(receipt.created_at),
    "took": lambda receipt: formatting.took(receipt.created_at, receipt.completed_at) if receipt.completed_at else "",
}


def receipt_page(receipt: "Receipt") -> RenderableType:
    head = formatting.facts(
        receipt=receipt.id,
        status=Text.assemble(formatting.word(receipt.status), (f"  {receipt.status.doc}", "dim")),
        run=f"{receipt.run_id}  step {visible(receipt.step_key)}",
        tool=visible(receipt.tool),
        attempt=str(receipt.attempt),
        error=visible(receipt.error or ""),
        idempotency_key=visible(receipt.idempotency_key),
        undo=_undo(receipt),
        created=formatting.moment(receipt.created_at),
        completed=formatting.moment(receipt.completed_at),
    )
    parts: list[RenderableType] = [head]
    for name, metadata in (("request", receipt.request_metadata), ("response", receipt.response_metadata)):
        if metadata is not None:
            parts += ["", name, formatting.block(metadata if isinstance(metadata, dict) else {"": metadata})]
    if receipt.status is ReceiptState.IN_DOUBT:
        parts += ["", "what became of it?", _choices(receipt.id)]
    return Group(*parts)


def _undo(receipt: "Receipt") -> str | None:
    if receipt.reversal:
        by, reason = formatting.who(receipt.reversal.get("by") or ""), receipt.reversal.get("reason")
        said = [f"undone by run {receipt.reversal.get('run_id')}", f"asked by {by}" if by else "", reason or ""]
        return one_line(", ".join(filter(None, said)))
    return f"possible, with {visible(receipt.undo)}" if receipt.undo else "possible" if receipt.reversible else None


GRANTS: "formatting.Columns[Grant]" = {
    "id": lambda grant: grant.id,
    "tool": lambda grant: visible(grant.tool),
    "arguments": lambda grant: _arguments(grant),
    "tier": lambda grant: grant.tier,
    "by": lambda grant: visible(grant.created_by),
    "uses": lambda grant: str(grant.uses),
    "expires": lambda grant: formatting.moment(grant.expires_at),
    "revoked": lambda grant: formatting.moment(grant.revoked_at),
    "reason": lambda grant: one_line(grant.reason or ""),
}


def _arguments(grant: "Grant") -> str:
    return " ".join(f"{visible(name)}={formatting.cell(value)}" for name, value in grant.arguments.items()) or "any"
