"""Quorum: which people can decide on an approval, and when it is decided. These rules exist only here.

They are code and never policy: the requester of an action cannot approve it, approvers are distinct people, agents
never approve (their role lacks the permission), and a grant or `auto_approve` never satisfies `high` or two people.

In a session the agent proposes the action. The person in the session may confirm an action that is not `high`, if the
policy asks for one person and names no group. If a person changed the action, another person confirms it: either of two
people can therefore finish what the other one changed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from interlock.lifecycle import ApprovalEvent, Tier


@dataclass(frozen=True, slots=True)
class Question:
    """`is_action`: about an effect, not only an approval gate in a workflow. `askers`: the people who requested it.

    `editors`: the people that edited the action, the latest last.
    `by_agent`: an agent proposed the action in a session of the requester.
    """

    tier: Tier
    two_person: bool
    askers: frozenset[str]
    is_action: bool = False
    by_agent: bool = False
    groups: frozenset[str] = field(default_factory=frozenset)
    reason_required: bool = False
    editors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a rule requires of an approval. `approvers` are groups; empty means every key that may approve."""

    tier: Tier
    two_person: bool
    approvers: frozenset[str]
    reason_required: bool

    def covers(self, other: "Demand") -> bool:
        """Return True if an approval under this demand also satisfies the other, which requires no more."""
        tiers = list(Tier)
        return (
            tiers.index(self.tier) >= tiers.index(other.tier)
            and self.two_person >= other.two_person
            and self.reason_required >= other.reason_required
            and (not other.approvers or (bool(self.approvers) and self.approvers <= other.approvers))
        )


@dataclass(frozen=True, slots=True)
class CastVote:
    voter: str
    approves: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    code: str
    detail: str


def refusal(
    question: Question,
    votes: Sequence[CastVote],
    voter: str,
    groups: Collection[str],
    *,
    approves: bool,
    reason: str | None,
) -> Refusal | None:
    """Return why this voter's vote does not count, or None.

    A person may always reject their own request, if they may decide.
    """
    if question.groups and not question.groups & set(groups):
        return Refusal("NOT_AN_APPROVER", f"only {' or '.join(sorted(question.groups))} may decide this")
    if question.reason_required and not reason:
        return Refusal("REASON_REQUIRED", "the rule asks for a reason; say why")
    if not approves:
        return None
    if voter in excluded(question):
        did = "changed it" if voter in question.editors else "asked for it"
        return Refusal("SELF_APPROVAL", f"you {did}, so another person must approve it")
    if any(vote.voter == voter for vote in votes):
        return Refusal("ALREADY_VOTED", "Your vote is already recorded. One more approver is needed.")
    return None


def excluded(question: Question) -> Collection[str]:
    """Return the people who cannot approve because they requested or changed the action."""
    is_strict = question.two_person or question.tier == Tier.HIGH
    if question.by_agent and not question.groups and not is_strict:
        return question.editors[-1:]
    return question.askers.union(question.editors) if question.is_action or is_strict else ()


def outcome(question: Question, votes: Sequence[CastVote]) -> ApprovalEvent | None:
    """Return the decision, if there is one. One vote against rejects; one distinct approver, or two, approve."""
    if any(not vote.approves for vote in votes):
        return ApprovalEvent.REJECT
    return ApprovalEvent.APPROVE if missing(question, votes) == 0 else None


def missing(question: Question, votes: Sequence[CastVote]) -> int:
    """Return how many people still have to approve."""
    in_favour = {vote.voter for vote in votes if vote.approves}
    return max(0, (2 if question.two_person else 1) - len(in_favour))


def in_advance(tier: Tier, *, two_person: bool) -> bool:
    """Return True if a grant or `auto_approve` may answer."""
    return tier != Tier.HIGH and not two_person
