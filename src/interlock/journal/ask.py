"""Asking people: one form for a workflow's gates, for what policy holds, and for effects in doubt."""

from dataclasses import dataclass
from typing import Any

from interlock.ids import uuid7
from interlock.journal.entry import EntryType
from interlock.journal.journal import Journal, StepFold
from interlock.lifecycle import StepEvent, Term, Tier


class AskKind(Term):
    GATE = "gate", "The workflow asks for a person here."
    ACTION = "action", "The policy asks for a person before this action."
    IN_DOUBT = "in_doubt", "The action was interrupted; somebody has to find out whether it happened."


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that has to be put to people. It is about one exact action: its digest."""

    id: str
    kind: AskKind
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


def ask(
    journal: Journal,
    fold: StepFold,
    event: StepEvent,
    kind: AskKind,
    *,
    data: dict[str, Any] | None = None,
    **about: Any,
) -> Ask:
    """Record that the step waits for people. The approval itself is opened with the entry, in one transaction."""
    question = Ask(str(uuid7()), kind, fold.step.key, **about)
    journal.move_step(
        fold,
        event,
        actor="system:engine" if kind == AskKind.GATE else "system:policy",
        type=EntryType.APPROVAL_REQUESTED,
        data={
            **(data or {}), "approval_id": question.id, "kind": kind, "tier": question.tier,
            "two_person": question.two_person, "summary": question.summary, "digest": question.digest,
            "policy_digest": question.policy_digest, "approvers": list(question.approvers),
            "reason_required": question.reason_required,
        },
    )  # fmt: skip
    return question
