"""A decision: allow, deny or ask people; with why, by which rules, and on what request."""

from dataclasses import dataclass, field
from typing import Any

from interlock.lifecycle import Term, Tier


class Answer(Term):
    ALLOW = "allow", "It may be done."
    DENY = "deny", "It may not be done."
    NEEDS_APPROVAL = "needs_approval", "People decide."


@dataclass(frozen=True, slots=True)
class Asker:
    """Who started the run: Actor::"<id>"."""

    id: str
    role: str
    groups: tuple[str, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """`hour` is 0 to 23, `weekday` 1 (Monday) to 7 (Sunday), both in the time zone that the tenant's rules mean."""

    hour: int
    weekday: int
    workflow: str
    workspace: str
    auto_approve: bool
    run_id: str
    step: str


# Where nobody says when: a Wednesday at noon, in no run.
NOON = Circumstances(hour=12, weekday=3, workflow="", workspace="default", auto_approve=False, run_id="", step="")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The part of a decision that a change of policy may change."""

    answer: str
    tier: str | None = None
    two_person: bool = False

    def __str__(self) -> str:
        extras = [f"tier {self.tier}"] * bool(self.tier) + ["two people"] * self.two_person
        return f"{self.answer} ({', '.join(extras)})" if extras else str(self.answer)

    def as_dict(self) -> dict[str, Any]:
        return {"answer": self.answer, "tier": self.tier, "two_person": self.two_person}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided and why, with the request as it was evaluated, so that it can be evaluated again."""

    answer: Answer
    reason: str
    rule_ids: tuple[str, ...] = ()
    tier: Tier | None = None
    two_person: bool = False
    approvers: tuple[str, ...] = ()  # groups; empty means anybody who may approve
    reason_required: bool = False
    expires_in: float | None = None
    escalate_to: tuple[str, ...] = ()
    escalate_after: float | None = None
    policy_digest: str | None = None
    errors: tuple[str, ...] = ()
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.answer, self.tier, self.two_person)

    def recorded(self) -> dict[str, Any]:
        """What the journal keeps of it, and `replay` reads."""
        return {
            "answer": self.answer,
            "tier": self.tier,
            "two_person": self.two_person,
            "rule_ids": list(self.rule_ids),
            "reason": self.reason,
            "policy_digest": self.policy_digest,
            "errors": list(self.errors),
            "request": self.request,
        }
