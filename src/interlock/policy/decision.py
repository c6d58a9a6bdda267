"""A decision: allow, deny or needs_approval, with the reason, the rules and the request it was made on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from interlock.definition.duration import format_duration
from interlock.lifecycle import Term, Tier


class PolicyAnswer(Term):
    ALLOW = "allow", "It may be done."
    DENY = "deny", "It may not be done."
    NEEDS_APPROVAL = "needs_approval", "People decide."


@dataclass(frozen=True, slots=True)
class Asker:
    """The principal that started the run: Actor::"<id>"."""

    id: str
    role: str
    groups: tuple[str, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """`hour` is 0 to 23, `weekday` 1 (Monday) to 7 (Sunday), both in the time zone of the tenant's rules."""

    hour: int
    weekday: int
    workflow: str
    workspace: str
    auto_approve: bool
    run_id: str
    step: str


# The default circumstances: a Wednesday at noon, in no run and, like the runs of a whole tenant's key, in no workspace.
NOON = Circumstances(hour=12, weekday=3, workflow="", workspace="", auto_approve=False, run_id="", step="")


@dataclass(frozen=True, slots=True)
class ApprovalDemand:
    """The part of a decision that a policy change may affect: the answer and the requirements for approvers."""

    answer: str
    tier: str | None = None
    two_person: bool = False
    approvers: tuple[str, ...] = ()  # groups; empty means every key that may approve
    reason_required: bool = False
    expires_in: float | None = None
    escalate_to: tuple[str, ...] = ()
    escalate_after: float | None = None

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "ApprovalDemand":
        """Return the outcome of a decision as `Decision.recorded` gives it."""
        known = {name: record[name] for name in OUTCOME_FIELDS if record.get(name) is not None}
        groups = {name: tuple(known.get(name, ())) for name in _GROUPS}
        return cls(**{"answer": "unknown", **known, **groups})

    def __str__(self) -> str:
        extras = [f"tier {self.tier}"] * bool(self.tier) + ["two people"] * self.two_person
        extras += [f"by {' or '.join(self.approvers)}"] * bool(self.approvers) + [
            "with a reason"
        ] * self.reason_required
        extras += [f"within {format_duration(self.expires_in)}"] if self.expires_in is not None else []
        extras += [f"then by {' or '.join(self.escalate_to)}"] * bool(self.escalate_to)
        extras += [f"after {format_duration(self.escalate_after)}"] if self.escalate_after is not None else []
        return f"{self.answer} ({', '.join(extras)})" if extras else str(self.answer)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def passes_more_than(self, before: "ApprovalDemand") -> bool:
        """Return whether an action needs less under this outcome than it needed before."""
        if self.answer != before.answer:
            return _STRICTNESS.index(self.answer) < _STRICTNESS.index(before.answer)
        return self.answer == PolicyAnswer.NEEDS_APPROVAL and (
            _TIERS.index(self.tier) < _TIERS.index(before.tier)
            or self.two_person < before.two_person
            or self.reason_required < before.reason_required
            or not _is_within(self._deciders(), before._deciders())
        )

    def _deciders(self) -> frozenset[str] | None:
        """Return the groups that can ever decide; None means every key that may approve."""
        return frozenset((*self.approvers, *self.escalate_to)) if self.approvers else None


OUTCOME_FIELDS = tuple(field.name for field in fields(ApprovalDemand))
_ALWAYS = ("answer", "tier", "two_person")
_GROUPS = ("approvers", "escalate_to")
_TIERS: tuple[str | None, ...] = (None, *Tier)
_STRICTNESS = (PolicyAnswer.ALLOW, PolicyAnswer.NEEDS_APPROVAL, PolicyAnswer.DENY)


def _is_within(some: frozenset[str] | None, all_of: frozenset[str] | None) -> bool:
    return all_of is None or (some is not None and some <= all_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer, its reason, and the request as it was evaluated, so that it can be evaluated again."""

    answer: PolicyAnswer
    reason: str
    rule_ids: tuple[str, ...] = ()
    tier: Tier | None = None
    two_person: bool = False
    approvers: tuple[str, ...] = ()  # groups; empty means every key that may approve
    reason_required: bool = False
    expires_in: float | None = None
    escalate_to: tuple[str, ...] = ()
    escalate_after: float | None = None
    policy_digest: str | None = None
    errors: tuple[str, ...] = ()
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> ApprovalDemand:
        return ApprovalDemand(**{name: getattr(self, name) for name in OUTCOME_FIELDS})

    def recorded(self) -> dict[str, Any]:
        """Return the form that the journal stores and `replay` reads."""
        return {
            "answer": self.answer,
            "tier": self.tier,
            "two_person": self.two_person,
            # Left out where empty: a run records a decision for each of its writes.
            **{name: value for name, value in self.outcome.as_dict().items() if value and name not in _ALWAYS},
            "rule_ids": list(self.rule_ids),
            "reason": self.reason,
            "policy_digest": self.policy_digest,
            "errors": list(self.errors),
            "request": self.request,
        }
