"""Approval requests: one form for a workflow's approval gates, for actions held by policy, and for effects in doubt."""

from dataclasses import dataclass
from typing import Any

from interlock.ids import uuid7
from interlock.journal.cause import POLICY
from interlock.journal.entry import EntryType
from interlock.journal.journal import Journal, StepSnapshot
from interlock.lifecycle import StepEvent, Term, Tier


class ApprovalKind(Term):
    GATE = "gate", "The workflow asks for a person here."
    ACTION = "action", "The policy asks for a person before this action."
    IN_DOUBT = "in_doubt", "The action was interrupted; somebody has to find out whether it happened."


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A question to people about one exact action, named by its digest."""

    id: str
    kind: ApprovalKind
    step: str
    tier: Tier
    two_person: bool
    expires_in: float
    summary: str
    action: dict[str, Any]
    digest: str
    rule_ids: tuple[str, ...] = ()
    reason: str | None = None
    reason_required: bool = False
    policy_digest: str | None = None
    approvers: tuple[str, ...] = ()
    escalate_to: tuple[str, ...] = ()
    escalate_after: float | None = None
    receipt_id: str | None = None


def request_approval(
    journal: Journal,
    fold: StepSnapshot,
    event: StepEvent,
    kind: ApprovalKind,
    *,
    data: dict[str, Any] | None = None,
    **about: Any,
) -> ApprovalRequest:
    """Record that the step waits for approval. The same transaction writes the entry and opens the approval."""
    question = ApprovalRequest(str(uuid7()), kind, fold.step.key, **about)
    journal.move_step(
        fold,
        event,
        actor=POLICY if kind == ApprovalKind.ACTION else "system:engine",
        type=EntryType.APPROVAL_REQUESTED,
        data={
            **(data or {}), "approval_id": question.id, "kind": kind, "tier": question.tier,
            "two_person": question.two_person, "summary": question.summary,
            "requested_by": journal.requested_by, "digest": question.digest, "policy_digest": question.policy_digest,
            "approvers": list(question.approvers), "reason_required": question.reason_required,
        },
    )  # fmt: skip
    return question
