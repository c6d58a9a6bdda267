"""Quorum: who may decide on an approval, and when it is decided. The only place that says so."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlock.lifecycle import ApprovalEvent, Tier


@dataclass(frozen=True, slots=True)
class Question:
    tier: Tier
    two_person: bool
    requested_by: str


@dataclass(frozen=True, slots=True)
class Vote:
    voter: str
    approves: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    code: str
    detail: str


def refusal(question: Question, votes: Sequence[Vote], voter: str, *, approves: bool) -> Refusal | None:
    """Why this voter's vote does not count, or None. Anybody who may decide may also say no to their own request."""
    if not approves:
        return None
    if voter == question.requested_by and (question.two_person or question.tier == Tier.HIGH):
        return Refusal("SELF_APPROVAL", "who asked for it cannot approve it: another person has to")
    if any(vote.voter == voter for vote in votes):
        return Refusal("ALREADY_VOTED", "you have voted; a second person has to approve too")
    return None


def outcome(question: Question, votes: Sequence[Vote]) -> ApprovalEvent | None:
    """One vote against ends it; it needs one distinct person in favour, or two."""
    if any(not vote.approves for vote in votes):
        return ApprovalEvent.REJECT
    in_favour = {vote.voter for vote in votes}
    return ApprovalEvent.APPROVE if len(in_favour) >= (2 if question.two_person else 1) else None
