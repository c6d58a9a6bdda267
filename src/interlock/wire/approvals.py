"""Approvals: the action that people are asked about, what they say, and what they said in advance."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field, NonNegativeInt

from interlock.lifecycle import ApprovalState, Tier
from interlock.wire.grammar import Body, Id, Name, Problem, Text, View, encodable


class Action(View):
    """The exact action people are asked about. Its digest is what their answer is bound to."""

    tool: str | None = None
    connector: str | None = None
    operation: str | None = None
    target: Any = None
    fields: dict[str, Any] = {}
    # The names of the secrets that fields hold, by field; what is shown there as `${secrets.name}` is one.
    secrets: dict[str, list[str]] = {}
    digest: str


class Rationale(View):
    """Why people are asked: the rules that decided, and the policy they stand in."""

    rule_ids: list[str] = []
    reason: str | None = None
    policy_digest: str | None = None


class Vote(View):
    by: str
    decision: Literal[ApprovalState.APPROVED, ApprovalState.REJECTED]
    reason: str | None = None
    at: AwareDatetime


class Approval(View):
    id: Id
    # gate (the workflow asks), action (the policy asks) or in_doubt (did an interrupted effect happen?)
    kind: str = "gate"
    run_id: Id
    step_key: str
    session_id: Id | None = None
    status: ApprovalState
    tier: Tier
    two_person: bool = False
    summary: str = ""
    action: Action
    rationale: Rationale = Rationale()
    requested_by: str = ""
    # Groups whose members decide; empty means anybody who may approve.
    approvers: list[str] = []
    reason_required: bool = False
    # The effect in doubt, where that is the question.
    receipt_id: Id | None = None
    votes: list[Vote] = []
    # While it is open, for the key that looks: why it cannot say yes, if it cannot, and whether it may say no.
    barred: str | None = None
    may_reject: bool = True
    requested_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    resolved_at: AwareDatetime | None = None


class Allow(Body):
    """The body of a run's approve: yes to whatever it waits for. For yes to one exact action there is `Decide`."""

    reason: Text | None = None
    request_id: Name | None = None


class Reject(Body):
    """The body of reject. With `digest` the decision counts only for that exact action."""

    reason: Text | None = None
    digest: Name | None = None
    request_id: Name | None = None


class Decide(Reject):
    """The body of approve. With `digest` the decision counts only for that exact action."""

    # Approve an edited action instead: these fields replace the proposed ones, and it is judged again.
    patch: Annotated[dict[str, Any] | None, AfterValidator(encodable)] = None


class BulkDecide(Body):
    ids: Annotated[list[Id], Field(min_length=1, max_length=100)]
    decision: Literal["approve", "reject"]
    reason: Text | None = None
    request_id: Name | None = None


class Decided(View):
    """What became of one id of a bulk decision."""

    id: str
    ok: bool
    status: ApprovalState | None = None
    problem: Problem | None = None


class NewGrant(Body):
    """An answer given in advance: this tool, these arguments, for so long. Never for `high` or two people."""

    tool: Name
    arguments: Annotated[dict[str, Any], AfterValidator(encodable)] = {}
    tier: Literal[Tier.LOW, Tier.MED] = Tier.LOW
    expires_in: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600
    reason: Text | None = None
    request_id: Name | None = None


class Grant(View):
    id: Id
    tool: str
    arguments: dict[str, Any] = {}
    tier: Tier
    reason: str | None = None
    workspace_id: str | None = None
    created_by: str
    created_at: AwareDatetime
    expires_at: AwareDatetime
    revoked_at: AwareDatetime | None = None
    uses: NonNegativeInt = 0
