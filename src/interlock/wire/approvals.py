"""Approvals: the proposed action, the votes on it, and grants."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field, NonNegativeInt, model_validator

from interlock.lifecycle import ApprovalState, Tier
from interlock.wire.common import Body, Id, Name, Problem, Text, View, encodable


class Action(View):
    """The exact action that an approval is about. A vote is bound to its digest."""

    tool: str | None = None
    connector: str | None = None
    operation: str | None = None
    target: Any = None
    fields: dict[str, Any] = {}
    # The names of the secrets in each field. A field shows such a secret as `${secrets.name}`.
    secrets: dict[str, list[str]] = {}
    digest: str


class Rationale(View):
    """Why approval is needed: the rules that decided, and the policy that contains them."""

    rule_ids: list[str] = []
    reason: str | None = None
    policy_digest: str | None = None


class FieldChange(View):
    """A field of an action that an approver changed."""

    field: str
    before: Any = None
    after: Any = None


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
    # Groups whose members decide; if empty, every key that may approve. The people in `excluded` asked for the action
    # or changed it, and cannot approve it.
    approvers: list[str] = []
    excluded: list[str] = []
    reason_required: bool = False
    # The effect in doubt, if `kind` is in_doubt.
    receipt_id: Id | None = None
    votes: list[Vote] = []
    # How many more people have to approve.
    approvers_needed: NonNegativeInt = 0
    # Who last changed the action after it was proposed, when, and the fields that differ from the proposal. A yes to an
    # edited action has to carry its digest.
    edited_by: list[str] = []
    edited_at: AwareDatetime | None = None
    changes: list[FieldChange] = []
    # For an open approval and the calling key: whether the caller has voted yes on the current action, why the caller
    # cannot vote yes if so, and whether the caller may vote no.
    voted: bool = False
    barred: str | None = None
    may_reject: bool = True
    requested_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    resolved_at: AwareDatetime | None = None


# The message after the first of two votes.
VOTE_RECORDED = "Your vote is recorded. One more approver is needed."


class ApproveRequest(Body):
    """Body to approve a run: yes to everything it waits for. With `digest`, yes to that exact action and no other.

    If a person edited an action that the run waits for, its digest is required.
    """

    reason: Text | None = None
    digest: Name | None = None
    request_id: Name | None = None


class Reject(Body):
    """Body to reject. With `digest` the vote counts only for that exact action."""

    reason: Text | None = None
    digest: Name | None = None
    request_id: Name | None = None


class Decide(Reject):
    """Body to approve. With `digest` the vote counts only for that exact action.

    Once a person has edited the action, the digest is required.
    """

    # Approve an edited action instead: these fields replace the proposed ones, and the policy evaluates it again.
    patch: Annotated[dict[str, Any] | None, AfterValidator(encodable)] = None


class BulkDecide(Body):
    """The same vote on several approvals. `digests` maps an approval's id to the digest of its action."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=100)]
    decision: Literal["approve", "reject"]
    digests: dict[Id, Name] | None = None
    reason: Text | None = None
    request_id: Name | None = None


class Decided(View):
    """The result for one id of a bulk vote."""

    id: str
    ok: bool
    status: ApprovalState | None = None
    problem: Problem | None = None


class NewGrant(Body):
    """A standing approval for one tool with fixed arguments, for a limited time.

    It never covers tier `high` or a quorum of two.

    A grant without arguments covers every call of the tool and requires `any_arguments`.
    """

    tool: Name
    arguments: Annotated[dict[str, Any], AfterValidator(encodable)] = {}
    any_arguments: bool | None = None
    tier: Literal[Tier.LOW, Tier.MED] = Tier.LOW
    expires_in: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600
    reason: Text | None = None
    request_id: Name | None = None

    @model_validator(mode="after")
    def _says_what_it_covers(self) -> "NewGrant":
        if not self.arguments and not self.any_arguments:
            raise ValueError(
                "A grant without arguments covers every call of the tool. Name the arguments that it covers in"
                " `arguments`, or send `any_arguments: true`."
            )
        if self.arguments and self.any_arguments:
            raise ValueError("`arguments` and `any_arguments: true` contradict each other. Send one of them.")
        return self


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
