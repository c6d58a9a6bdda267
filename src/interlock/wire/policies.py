"""Policies: what they say about an action, and what another one would have said."""

from typing import Annotated, Any

from pydantic import AwareDatetime, Field, NonNegativeInt, StringConstraints

from interlock.lifecycle import Tier
from interlock.wire.approvals import Action
from interlock.wire.grammar import Body, Id, Name, View
from interlock.wire.tenants import Role


class Policy(View):
    """A tenant's policy. Version 0 is the built-in one."""

    version: NonNegativeInt
    digest: str
    text: str | None = None
    created_at: AwareDatetime | None = None


class Evaluate(Body):
    """A proposed action, as a run would propose it: judged, and nothing done."""

    tool: Name
    input: dict[str, Any] = {}
    role: Role = Role.OPERATOR
    workflow: str = ""
    hour: Annotated[int, Field(ge=0, le=23)] | None = None
    # Judge by this text instead of the policy in force.
    policy: Annotated[str, StringConstraints(max_length=200_000)] | None = None


class PolicyDecision(View):
    answer: str
    tier: Tier | None = None
    two_person: bool = False
    rule_ids: list[str] = []
    reason: str = ""
    policy_digest: str | None = None
    action: Action | None = None


class Backtest(Body):
    """Judge what was decided before by another policy, and see what would differ."""

    policy: Annotated[str, StringConstraints(min_length=1, max_length=200_000)]
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000


class Outcome(View):
    """The part of a decision that another policy may change."""

    answer: str
    tier: str | None = None
    two_person: bool = False

    def __str__(self) -> str:
        extras = [f"tier {self.tier}"] * bool(self.tier) + ["two people"] * self.two_person
        return f"{self.answer} ({', '.join(extras)})" if extras else self.answer


class Difference(View):
    """A recorded decision that would be another one under the policy that was tried."""

    run_id: Id | None = None
    step: str | None = None
    at: AwareDatetime | None = None
    summary: str
    before: Outcome
    after: Outcome
    reason: str = ""
    rule_ids: list[str] = []
    errors: list[Any] = []


class Backtested(View):
    decisions: NonNegativeInt
    changed: NonNegativeInt
    changes: list[Difference] = []
