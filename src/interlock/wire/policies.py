"""Policies: a policy's decision on an action, and how another policy would decide."""

from typing import Annotated, Any

from pydantic import AwareDatetime, Field, NonNegativeInt, StringConstraints

from interlock.lifecycle import Tier
from interlock.wire.approvals import Action
from interlock.wire.common import Body, Id, Name, View
from interlock.wire.tenants import Role


class Policy(View):
    """A tenant's policy. Version 0 is the built-in one."""

    version: NonNegativeInt
    digest: str
    text: str | None = None
    created_at: AwareDatetime | None = None
    created_by: str | None = None
    # Whether this version is in force.
    in_force: bool | None = None


class Evaluate(Body):
    """A proposed action to evaluate. Nothing is executed."""

    tool: Name
    input: dict[str, Any] = {}
    role: Role = Role.OPERATOR
    # The groups of the key that starts the run.
    groups: list[Name] = []
    workflow: str = ""
    hour: Annotated[int, Field(ge=0, le=23)] | None = None
    # Evaluate with this text instead of the policy in force.
    policy: Annotated[str, StringConstraints(max_length=200_000)] | None = None


class PolicyDecision(View):
    answer: str
    tier: Tier | None = None
    two_person: bool = False
    # Groups; if empty, every key that may approve.
    approvers: list[str] = []
    reason_required: bool = False
    expires_in: float | None = None
    escalate_to: list[str] = []
    escalate_after: float | None = None
    rule_ids: list[str] = []
    reason: str = ""
    policy_digest: str | None = None
    action: Action | None = None


class Backtest(Body):
    """Evaluate recorded decisions under another policy, and list the differences."""

    policy: Annotated[str, StringConstraints(min_length=1, max_length=200_000)]
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000


class Outcome(View):
    """The part of a decision that another policy may change: the answer, and everything required of approvers."""

    answer: str
    tier: str | None = None
    two_person: bool = False
    approvers: list[str] = []
    reason_required: bool = False
    expires_in: float | None = None
    escalate_to: list[str] = []
    escalate_after: float | None = None


class Difference(View):
    """A recorded or made-up action that another policy decides differently."""

    run_id: Id | None = None
    step: str | None = None
    at: AwareDatetime | None = None
    summary: str
    before: Outcome
    after: Outcome
    # Whether the action needs less than before: no approval, or fewer, other or more easily found approvers.
    passes_more: bool = False
    reason: str = ""
    rule_ids: list[str] = []
    errors: list[Any] = []


class Backtested(View):
    """How another policy would have decided, and what it would newly allow."""

    decisions: NonNegativeInt
    changed: NonNegativeInt
    changes: list[Difference] = []
    # Made-up actions that need less than under the policy in force. The list is not complete.
    loosened: list[Difference] = []

    @property
    def passes_more(self) -> bool:
        return bool(self.loosened) or any(change.passes_more for change in self.changes)


class PublishedPolicy(Policy):
    """A policy that was just published, with examples of actions that need less than under the previous one."""

    loosened: list[Difference] = []


class Rollback(Body):
    """The version whose content comes into force again. Version 0 of a policy is the built-in one."""

    version: Annotated[int, Field(ge=0, le=2**31 - 1)]
    request_id: Name | None = None


class VersionDifference(View):
    """The difference between two versions, as a unified diff."""

    before: NonNegativeInt
    after: NonNegativeInt
    diff: str
