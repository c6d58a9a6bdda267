"""Quorum: who may decide on an approval, and when it is decided. The only place that says so.

In code and never in policy: who asked for an action cannot approve it, approvers are distinct people, agents never
approve (their role has no such permission), and an answer given in advance never satisfies `high` or two people.

In a session it is the agent that comes up with an action. Whoever talks to it may confirm what is not `high`, if the
policy asks for one person and does not say who.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from interlock.lifecycle import ApprovalEvent, Tier


@dataclass(frozen=True, slots=True)
class Question:
    """`is_action`: about an effect, not only a gate in a workflow. `askers`: who asked for it.

    `editors`: who changed it meanwhile, and so asked for what it is now.
    `by_agent`: the asker's agent came up with it, in their own session, and nobody has changed it since.
    """

    tier: Tier
    two_person: bool
    askers: frozenset[str]
    is_action: bool = False
    by_agent: bool = False
    groups: frozenset[str] = field(default_factory=frozenset)
    reason_required: bool = False
    editors: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a rule asks of a yes. `approvers` are groups; none means anybody who may approve."""

    tier: Tier
    two_person: bool
    approvers: frozenset[str]
    reason_required: bool

    def covers(self, other: "Demand") -> bool:
        """A yes to this is one to the other too: no less was asked of whoever gave it."""
        tiers = list(Tier)
        return (
            tiers.index(self.tier) >= tiers.index(other.tier)
            and self.two_person >= other.two_person
            and self.reason_required >= other.reason_required
            and (not other.approvers or (bool(self.approvers) and self.approvers <= other.approvers))
        )


@dataclass(frozen=True, slots=True)
class Vote:
    voter: str
    approves: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    code: str
    detail: str


def refusal(
    question: Question,
    votes: Sequence[Vote],
    voter: str,
    groups: Collection[str],
    *,
    approves: bool,
    reason: str | None,
) -> Refusal | None:
    """Why this voter's vote does not count, or None. Whoever may decide may also say no to their own request."""
    if question.groups and not question.groups & set(groups):
        return Refusal("NOT_AN_APPROVER", f"only {' or '.join(sorted(question.groups))} may decide this")
    if question.reason_required and not reason:
        return Refusal("REASON_REQUIRED", "the rule asks for a reason; say why")
    if not approves:
        return None
    if voter in question.askers | question.editors and _needs_another(question):
        did = "asked for it" if voter in question.askers else "changed it"
        return Refusal("SELF_APPROVAL", f"who {did} cannot approve it: another person has to")
    if any(vote.voter == voter for vote in votes):
        return Refusal("ALREADY_VOTED", "you have voted; a second person has to approve too")
    return None


def _needs_another(question: Question) -> bool:
    """Whether a yes of the asker's own would be no second pair of eyes."""
    is_own = question.is_action and not (question.by_agent and not question.groups)
    return is_own or question.two_person or question.tier == Tier.HIGH


def outcome(question: Question, votes: Sequence[Vote]) -> ApprovalEvent | None:
    """One vote against ends it; it needs one distinct person in favour, or two."""
    if any(not vote.approves for vote in votes):
        return ApprovalEvent.REJECT
    in_favour = {vote.voter for vote in votes}
    return ApprovalEvent.APPROVE if len(in_favour) >= (2 if question.two_person else 1) else None


def in_advance(tier: Tier, *, two_person: bool) -> bool:
    """Whether a standing grant or `auto_approve` may answer."""
    return tier != Tier.HIGH and not two_person
