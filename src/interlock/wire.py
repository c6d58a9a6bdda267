"""The wire: what the API and its clients say to each other.

Views are what the server answers. They ignore fields they do not know, so that an older client can read a newer
server. Bodies are what a caller sends. They refuse fields they do not know, so that a misspelt `deadline_second` is an
error and not a run without a deadline.
"""

from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import orjson
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)

from interlock.lifecycle import ApprovalState, RunReason, RunState, StepState, Term, Tier, WorkerState

T = TypeVar("T")


class Role(Term):
    """What a key may do. Every role may also do what a viewer may."""

    VIEWER = "viewer", "Reads everything of its tenant."
    OPERATOR = "operator", "Starts, cancels and retries runs, and publishes workflows."
    APPROVER = "approver", "Decides approvals."
    ADMIN = "admin", "Does all of that, and manages keys."
    AGENT = "agent", "Starts runs; can never approve."


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, UUID) else value


def _encodable(value: dict[str, Any]) -> dict[str, Any]:
    """What one parser of JSON reads another may not be able to write: half a character, a number without end."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"it cannot be stored: {error}") from None
    return value


# A string to whoever reads it, because nobody computes with an id; the server may hand in the UUID it has.
Id = Annotated[str, BeforeValidator(_as_text), Field(json_schema_extra={"format": "uuid"})]

# PostgreSQL cannot store a NUL, and a name or a reason needs none.
Text = Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00]+$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]


class View(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Page(View, Generic[T]):
    """Some of a list; `next_cursor` asks for what follows and is null on the last page."""

    items: list[T]
    next_cursor: str | None = None


class Problem(BaseModel):
    """application/problem+json (RFC 9457). Some problems have more fields: `allowed`, `errors`, …"""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str


# ---------------------------------------------------------------- runs


class Trigger(View):
    """What started a run: `source` is a kind (api, cli, github, schedule …), `ref` its own name for the occasion."""

    source: str
    ref: str | None = None


class Step(View):
    id: Id
    key: str
    index: NonNegativeInt
    kind: str
    tool: str | None = None
    status: StepState
    attempt: NonNegativeInt = 0
    max_attempts: PositiveInt = 1
    next_run_at: AwareDatetime | None = None
    last_error: Any = None
    idempotency_key: str | None = None
    output: Any = None
    cost_usd: float = 0
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    needs: list[str] = []

    @property
    def retrying(self) -> bool:
        """It failed and will be tried again; to the lifecycle it is simply pending."""
        return self.status is StepState.PENDING and self.attempt >= 1


class Run(View):
    id: Id
    tenant_id: Id
    workspace_id: str | None = None
    workflow: str
    workflow_version: int
    status: RunState
    reason: RunReason | None = None
    input: Any = None
    result: Any = None
    error: Any = None
    trigger: Trigger
    session_id: Id | None = None
    job_id: Id | None = None
    parent_run_id: Id | None = None
    resumed_from: Id | None = None
    resume_count: NonNegativeInt = 0
    cost_usd: float = 0
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    duration_ms: int | None = None
    steps: list[Step] = []


class Event(View):
    """One entry of a run's journal; `seq` counts from 1 without gaps and is the id in the event stream."""

    seq: NonNegativeInt
    type: str
    at: AwareDatetime
    run_id: Id
    session_id: Id | None = None
    data: dict[str, Any] = {}


class NewTrigger(Body):
    source: Name = "api"
    ref: Text | None = None


class StartRun(Body):
    workflow: Name
    version: PositiveInt | None = None
    input: Annotated[dict[str, Any], AfterValidator(_encodable)] = {}
    trigger: NewTrigger | None = None
    deadline_seconds: PositiveFloat | None = None
    request_id: Name | None = None


class Stop(Body):
    """The body of cancel and interrupt."""

    reason: Text | None = None
    request_id: Name | None = None


# ---------------------------------------------------------------- approvals


class Action(View):
    """The exact action people are asked about. Its digest is what their answer is bound to."""

    tool: str | None = None
    connector: str | None = None
    operation: str | None = None
    target: Any = None
    fields: dict[str, Any] = {}
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
    run_id: Id
    step_key: str
    session_id: Id | None = None
    status: ApprovalState
    tier: Tier
    two_person: bool = False
    summary: str = ""
    action: Action
    rationale: Rationale = Rationale()
    votes: list[Vote] = []
    requested_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    resolved_at: AwareDatetime | None = None


class Decide(Body):
    """The body of approve and reject. With `digest` the decision counts only for that exact action."""

    reason: Text | None = None
    digest: Name | None = None
    request_id: Name | None = None


# ---------------------------------------------------------------- workflows and tools


class Workflow(View):
    name: str
    version: int
    digest: str
    created_at: AwareDatetime
    source: Any = None


class Tool(View):
    name: str
    description: str = ""
    writes: bool = False
    risk: Tier = Tier.LOW
    idempotent: bool = False
    input_schema: dict[str, Any] = {}


# ---------------------------------------------------------------- tenants, keys, workers


class Tenant(View):
    id: Id
    name: str
    max_concurrency: int | None = None
    weight: float = 1
    created_at: AwareDatetime
    # The tenant's first admin key, in the answer that created the tenant and never again.
    key: str | None = None


class NewTenant(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,99}$")]
    max_concurrency: PositiveInt | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1


class Key(View):
    id: Id
    name: str
    role: Role
    workspace_id: str | None = None
    created_at: AwareDatetime
    revoked_at: AwareDatetime | None = None
    # The secret, in the answer that created the key and never again.
    key: str | None = None


class NewKey(Body):
    name: Name
    role: Role
    workspace_id: Name | None = None


class Worker(View):
    id: Id
    name: str
    host: str
    pid: int
    status: WorkerState
    capacity: NonNegativeInt
    heartbeat_at: AwareDatetime
    started_at: AwareDatetime
    stopped_at: AwareDatetime | None = None


class Health(View):
    status: str = "ok"
