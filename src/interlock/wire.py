"""The wire: what the API and its clients say to each other.

Views are what the server answers. They ignore fields they do not know, so that an older client can read a newer
server. Bodies are what a caller sends. They refuse fields they do not know, so that a misspelt `deadline_second` is an
error and not a run without a deadline.
"""

import re
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
    SecretStr,
    StringConstraints,
)

from interlock.lifecycle import (
    ApprovalState,
    JobState,
    ReceiptState,
    RunReason,
    RunState,
    StepState,
    Term,
    Tier,
    WorkerState,
)

T = TypeVar("T")


class Role(Term):
    """What a key may do. Every role may also do what a viewer may."""

    VIEWER = "viewer", "Reads everything of its tenant."
    OPERATOR = "operator", "Starts, cancels and retries runs, sends events, and publishes workflows."
    APPROVER = "approver", "Decides approvals."
    ADMIN = "admin", "Does all of that, and manages keys."
    AGENT = "agent", "Starts runs; can never approve."


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, UUID) else value


def _encodable(value: T) -> T:
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


class Initiator(Term):
    """Who or what made a transition."""

    USER = "user", "Somebody with a key, or a person in Slack."
    SYSTEM = "system", "The engine, a worker, a schedule or another run."
    TIMEOUT = "timeout", "A deadline passed."
    POLICY = "policy", "The policy decided."
    WEBHOOK = "webhook", "A delivery from outside."
    APPROVAL = "approval", "People decided on an approval."


class ExternalEvent(View):
    """The event of another system that a run answers."""

    event_type: str
    source: str | None = None
    event_id: str | None = None


class Trigger(View):
    """What started a run: `source` is a kind (api, cli, github, schedule …), `ref` its own name for the occasion."""

    source: str
    ref: str | None = None
    initiator: Initiator | None = None
    # Who, by the name that the source has for them.
    user: str | None = None
    metadata: dict[str, Any] = {}
    external_event: ExternalEvent | None = None
    # The W3C trace context that came with the request; steps and tools go on with it.
    traceparent: str | None = None


class Tokens(View):
    input: NonNegativeInt = 0
    output: NonNegativeInt = 0


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
    # While it waits for an event from outside: `event`, `correlation` and `timeout_at`.
    waits_for: dict[str, Any] | None = None
    last_error: Any = None
    idempotency_key: str | None = None
    output: Any = None
    cost_usd: float = 0
    # After a crash a resumable step is not done again, its output is used; an idempotent one may be done again. Null:
    # nobody has looked at its tool yet.
    resumable: bool = False
    idempotent: bool | None = None
    # What its models took and gave, if it said so.
    tokens: Tokens | None = None
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    # How long its last attempt took.
    duration_ms: float | None = None
    needs: list[str] = []
    # The label of the workers that may do it; null: any.
    runs_on: str | None = None

    @property
    def retrying(self) -> bool:
        """It failed and will be tried again; to the lifecycle it is simply pending."""
        return self.status is StepState.PENDING and self.attempt >= 1


class Compensation(Step):
    """What undoes a step of a run that failed or was canceled; `undoes` is that step's key."""

    undoes: str


class Run(View):
    id: Id
    tenant_id: Id
    workspace_id: str | None = None
    workflow: str
    workflow_version: int
    status: RunState
    reason: RunReason | None = None
    # What is missing, if the run waits for more than people, events and time.
    waiting_for: str | None = None
    input: Any = None
    result: Any = None
    error: Any = None
    trigger: Trigger
    session_id: Id | None = None
    job_id: Id | None = None
    parent_run_id: Id | None = None
    resumed_from: Id | None = None
    # How often it was taken up again: after a lost worker, or as a new run that continues another.
    resume_count: NonNegativeInt = 0
    # Of the worker that holds it now.
    last_heartbeat_at: AwareDatetime | None = None
    cost_usd: float = 0
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    duration_ms: int | None = None
    steps: list[Step] = []
    # What it undoes or has undone, in that order: the last thing that it did comes first.
    compensation: list[Compensation] = []


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


# ---------------------------------------------------------------- events from outside


def _event_type(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,199}", value):
        raise ValueError("expected a type such as bank.settled: letters, digits, `_`, `.`, `:`, `/` and `-`")
    return value


class SendEvent(Body):
    """Something that happened outside. The same `id` again is the same event."""

    type: Annotated[str, AfterValidator(_event_type)]
    correlation: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
    payload: Annotated[Any, AfterValidator(_encodable)] = {}
    id: Name | None = None
    request_id: Name | None = None


class OutsideEvent(View):
    """An event and, once it was matched, the step that had waited for it."""

    id: str
    type: str
    correlation: str
    workspace_id: str | None = None
    payload: Any = None
    sent_by: str
    received_at: AwareDatetime
    expires_at: AwareDatetime
    run_id: Id | None = None
    step_key: str | None = None
    consumed_at: AwareDatetime | None = None


class SentEvent(OutsideEvent):
    """`matched`: a step had waited for it. Else it is kept until `expires_at`."""

    matched: bool


# ---------------------------------------------------------------- approvals


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


class Decide(Body):
    """The body of approve and reject. With `digest` the decision counts only for that exact action."""

    reason: Text | None = None
    digest: Name | None = None
    # Approve an edited action instead: these fields replace the proposed ones, and it is judged again.
    patch: dict[str, Any] | None = None
    request_id: Name | None = None


# ---------------------------------------------------------------- sessions


class Session(View):
    """A conversation with an agent. `run_id` is the run under way; `waiting` messages come after it."""

    id: Id
    agent: str
    status: Literal["idle", "busy"]
    run_id: Id | None = None
    waiting: NonNegativeInt = 0
    auto_approve: bool = False
    workspace_id: str | None = None
    messages: NonNegativeInt = 0
    cost_usd: float = 0
    created_by: str
    created_at: AwareDatetime


class NewSession(Body):
    """Without `agent` it is the tenant's `assistant`, or the built-in one."""

    agent: Name | None = None
    auto_approve: bool = False
    request_id: Name | None = None


# Long enough for a document, short enough to be stored with every event that quotes it.
Said = Annotated[str, StringConstraints(min_length=1, max_length=200_000, pattern=r"^[^\x00]+$")]


class NewMessage(Body):
    """Without `session_id` it opens a session, with `agent` as in `NewSession`.

    `auto_approve` lets pass what policy would ask one person about and is not high; it takes a key that may approve.
    """

    content: Said
    session_id: UUID | None = None
    agent: Name | None = None
    auto_approve: bool | None = None
    queue: bool = False
    request_id: Name | None = None


class Sent(View):
    """`run_id` is null while the message waits for the run before it."""

    session_id: Id
    run_id: Id | None = None
    message_id: Id
    queued: bool = False


class Message(View):
    """What somebody said, and what became of it: `answer` is the agent's, when its run has ended."""

    id: Id
    number: PositiveInt
    content: str
    by: str
    at: AwareDatetime
    run_id: Id | None = None
    status: RunState | Literal["queued"]
    reason: RunReason | None = None
    answer: str | None = None


class Agent(View):
    name: str
    version: int
    digest: str
    created_at: AwareDatetime
    model: str = ""
    source: Any = None


class NewAct(Body):
    """One call of one tool, for an agent that keeps its own loop."""

    tool: Name
    args: Annotated[dict[str, Any], AfterValidator(_encodable)] = {}
    request_id: Name | None = None


class Act(View):
    """`pending_approval`: people are asked; ask again by `id`, which is also its run's. `error` says why it failed."""

    id: Id
    tool: str
    status: Literal["done", "pending_approval", "running", "failed"]
    result: Any = None
    error: Any = None
    reason: RunReason | None = None
    approval_id: Id | None = None


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


class Flow(View):
    """A Python flow that is deployed; runs keep the version they began with."""

    name: str
    version: str
    description: str = ""
    retired: bool = False


# ---------------------------------------------------------------- triggers and schedules


class StoredTrigger(View):
    """A trigger: what starts its workflow, and where deliveries go."""

    name: str
    kind: str
    workflow: str
    # Where its sender posts; commands go to Slack's own address.
    path: str
    # The name of whose key it acts with.
    acts_as: str
    workspace_id: str | None = None
    digest: str
    created_at: AwareDatetime
    updated_at: AwareDatetime
    source: Any = None


class TestTrigger(Body):
    """An event to try a trigger on: nothing is started."""

    __test__ = False  # to pytest's collector its name looks like a test

    payload: Any = None
    # push, or pull_request.opened
    event: Name | None = None
    headers: dict[str, str] = {}


class Tried(View):
    """What an event would start."""

    starts: bool
    workflow: str
    input: dict[str, Any] | None = None
    # Why it starts nothing.
    reason: str | None = None


class Accepted(View):
    """What became of a delivery."""

    # started; ignored, with the reason; or processing, when the first delivery of it is still under way
    outcome: Literal["started", "ignored", "processing"]
    run_id: Id | None = None
    workflow: str | None = None
    reason: str | None = None


class NewSchedule(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,99}$")]
    cron: Name
    timezone: Name = "UTC"
    workflow: Name
    input: Annotated[dict[str, Any], AfterValidator(_encodable)] = {}
    # What becomes of slots that passed while nothing ran: none of them, the last one, or all.
    missed: Literal["skip", "last", "all"] = "last"
    request_id: Name | None = None


class Schedule(View):
    name: str
    cron: str
    timezone: str
    workflow: str
    input: Any = None
    missed: str
    acts_as: str
    workspace_id: str | None = None
    # Null while it is paused.
    next_at: AwareDatetime | None = None
    paused_at: AwareDatetime | None = None
    # Why it was paused, if not by a person.
    paused_why: str | None = None
    last_slot: AwareDatetime | None = None
    last_run_id: Id | None = None
    created_at: AwareDatetime


# ---------------------------------------------------------------- tenants, keys, workers


class Tenant(View):
    id: Id
    name: str
    max_concurrency: int | None = None
    max_runs_per_min: int | None = None
    max_writes_per_run: int | None = None
    weight: float = 1
    created_at: AwareDatetime
    # The tenant's first admin key, in the answer that created the tenant and never again.
    key: str | None = None


class NewTenant(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,99}$")]
    max_concurrency: PositiveInt | None = None
    max_runs_per_min: PositiveInt | None = None
    max_writes_per_run: PositiveInt | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1


class ChangeTenant(Body):
    """What is left out stays as it is; null takes a cap away."""

    max_concurrency: PositiveInt | None = None
    max_runs_per_min: PositiveInt | None = None
    max_writes_per_run: PositiveInt | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] = 1
    request_id: Name | None = None


class WorkflowUsage(View):
    """What a workflow with a cap of its own uses of it; the others share the tenant's."""

    workflow: str
    max_concurrency: PositiveInt
    in_flight: NonNegativeInt = 0
    # Runs that could begin or go on, and wait for a worker or for the cap.
    waiting: NonNegativeInt = 0


class Usage(View):
    """What a tenant uses of what it may use; a cap that is null is none."""

    tenant_id: Id
    tenant: str
    weight: float = 1
    max_concurrency: int | None = None
    in_flight: NonNegativeInt = 0
    max_runs_per_min: int | None = None
    # Places of the current minute that are taken, and runs that have one in a later minute.
    runs_this_minute: NonNegativeInt = 0
    runs_waiting: NonNegativeInt = 0
    max_writes_per_run: int | None = None
    # Runs that a worker could take now; 10,000 stands for that many or more.
    ready: NonNegativeInt = 0
    workflows: list[WorkflowUsage] = []


class SetSecret(Body):
    value: SecretStr
    request_id: Name | None = None


class StoredSecret(View):
    """A secret's name and history; its value is never shown again."""

    name: str
    version: PositiveInt
    created_at: AwareDatetime
    created_by: str


class Key(View):
    id: Id
    name: str
    role: Role
    workspace_id: str | None = None
    groups: list[str] = []
    created_at: AwareDatetime
    revoked_at: AwareDatetime | None = None
    # The secret, in the answer that created the key and never again.
    key: str | None = None


class NewKey(Body):
    name: Name
    role: Role
    workspace_id: Name | None = None
    groups: list[Name] = []


class StateChange(View):
    """One transition of a worker or a job: when, by whom and why."""

    from_state: str | None = None
    event: str
    to_state: str
    reason: str | None = None
    by: str
    at: AwareDatetime


class Worker(View):
    """`pid` is there when its process is; `job_id`: the job that it is reserved for; `tenants` null: it serves all.

    `log`: the file on its host that its supervisor has it write to; null if it has none.
    """

    id: Id
    name: str
    host: str | None = None
    pid: int | None = None
    status: WorkerState
    reason: str | None = None
    capacity: NonNegativeInt
    labels: list[str] = []
    tenants: list[Id] | None = None
    workspace_id: str | None = None
    job_id: Id | None = None
    supervisor_id: Id | None = None
    log: str | None = None
    holds: NonNegativeInt = 0
    heartbeat_at: AwareDatetime
    started_at: AwareDatetime
    stopped_at: AwareDatetime | None = None
    state_history: list[StateChange] | None = None


Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]


class NewWorker(Body):
    """A worker that a supervisor will start. `tenants` by name; without it, it serves all."""

    name: Name | None = None
    workspace_id: Name | None = None
    host: Name | None = None
    labels: Annotated[list[Label], Field(min_length=1, max_length=20)] = ["default"]
    tenants: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = None
    request_id: Name | None = None


class Order(Body):
    """What a worker is told, and why."""

    reason: Text | None = None
    request_id: Name | None = None


class Supervisor(View):
    """`wished` processes it keeps alive, `workers` it has; `reason` says why it has fewer."""

    id: Id
    host: str
    pid: int
    wished: NonNegativeInt
    workers: NonNegativeInt
    reason: str | None = None
    heartbeat_at: AwareDatetime
    started_at: AwareDatetime
    stopped_at: AwareDatetime | None = None


class NewJob(Body):
    """One run for each of the inputs, done by workers that are reserved for it."""

    task_description: Text
    workflow: Name
    version: PositiveInt | None = None
    inputs: Annotated[list[Any], Field(min_length=1, max_length=10_000)] = [{}]
    worker_count: Annotated[int, Field(ge=1, le=10)] = 1
    parent_job_id: UUID | None = None
    timeout_seconds: Annotated[float, Field(gt=0, le=365 * 86400)] | None = None
    request_id: Name | None = None


class Progress(View):
    done: NonNegativeInt
    total: NonNegativeInt
    succeeded: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    canceled: NonNegativeInt = 0
    rate_per_second: float | None = None
    eta_seconds: float | None = None


class JobWorker(View):
    id: Id
    name: str


class Job(View):
    id: Id
    tenant_id: Id
    workspace_id: str | None = None
    parent_job_id: Id | None = None
    depth: NonNegativeInt
    task_description: str
    workflow: str
    workflow_version: int | None = None
    worker_count: PositiveInt
    status: JobState
    reason: str | None = None
    requested_by: str = ""
    progress: Progress
    workers: list[JobWorker] = []
    deadline_at: AwareDatetime | None = None
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    state_history: list[StateChange] | None = None


class JobTree(Job):
    children: list["JobTree"] = []


class JobEvent(View):
    """A line of a job's history: a transition, or how far it got."""

    seq: NonNegativeInt
    type: str
    at: AwareDatetime
    data: dict[str, Any] = {}


class Health(View):
    status: str = "ok"


# ---------------------------------------------------------------- policy, receipts, grants


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


class Receipt(View):
    """One effect on the outside world: what was attempted and what became of it, without the values."""

    id: Id
    run_id: Id
    step_key: str
    tool: str
    idempotency_key: str
    status: ReceiptState
    attempt: NonNegativeInt
    request_metadata: Any = None
    response_metadata: Any = None
    reversible: bool = False
    undo: str | None = None
    reversal: dict[str, Any] | None = None
    created_at: AwareDatetime
    completed_at: AwareDatetime | None = None


class ResolveReceipt(Body):
    """What became of an effect in doubt. `output` is what the tool would have returned."""

    outcome: Literal["happened", "did_not_happen", "fail"]
    output: Any = None
    reason: Text | None = None
    request_id: Name | None = None


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


class NewGrant(Body):
    """An answer given in advance: this tool, these arguments, for so long. Never for `high` or two people."""

    tool: Name
    arguments: dict[str, Any] = {}
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
    created_by: str
    created_at: AwareDatetime
    expires_at: AwareDatetime
    revoked_at: AwareDatetime | None = None
    uses: NonNegativeInt = 0


# ---------------------------------------------------------------- webhooks, Slack


class WebhookEvent(Term):
    """What a webhook can be told of. None of them carries inputs, outputs or the fields of an action."""

    APPROVAL_REQUESTED = "approval.requested", "People are asked to decide."
    APPROVAL_EDITED = "approval.edited", "A person changed the action that is to be decided."
    APPROVAL_REMINDED = "approval.reminded", "Half of an approval's time is over."
    APPROVAL_ESCALATED = "approval.escalated", "Nobody had decided; a second group is asked too."
    APPROVAL_RESOLVED = "approval.resolved", "People decided, nobody did in time, or the run ended."
    RUN_COMPLETED = "run.completed", "A run ended: succeeded, failed or canceled."


class NewWebhook(Body):
    url: Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00-\x20]+$")]
    events: Annotated[list[WebhookEvent], Field(min_length=1)] = [
        WebhookEvent.APPROVAL_REQUESTED,
        WebhookEvent.APPROVAL_RESOLVED,
        WebhookEvent.RUN_COMPLETED,
    ]
    request_id: Name | None = None


class Webhook(View):
    id: Id
    url: str
    events: list[str]
    workspace_id: str | None = None
    created_at: AwareDatetime
    # Since when every delivery failed, and with what; it is switched off when that lasts for days.
    failing_since: AwareDatetime | None = None
    last_error: str | None = None
    disabled_at: AwareDatetime | None = None
    # Verifies signatures (Standard Webhooks); in the answer that created it and never again.
    secret: str | None = None


class Delivery(View):
    """One message to a webhook. `id` is its `webhook-id`, the same over all tries."""

    id: str
    event: str
    subject_id: Id
    status: Literal["pending", "delivered", "failed"]
    attempts: NonNegativeInt
    response_status: int | None = None
    last_error: str | None = None
    created_at: AwareDatetime
    next_try_at: AwareDatetime | None = None
    done_at: AwareDatetime | None = None


class NewSlackUser(Body):
    """Who a Slack user is here: what they decide and start counts as that key's."""

    team_id: Name
    user_id: Name
    key_id: UUID
    request_id: Name | None = None


class SlackUser(View):
    team_id: str
    user_id: str
    key_id: Id
    name: str
    role: Role
    created_at: AwareDatetime
    # Then the key, and with it the link, is of no use any more.
    revoked_at: AwareDatetime | None = None


class SlackChannel(Body):
    channel: Name
    # Another tenant's, by its name.
    tenant: Name | None = None
    request_id: Name | None = None


class TenantChannel(View):
    """Where a tenant's approvals are posted; null is nowhere."""

    tenant: str
    channel: str | None = None


# ---------------------------------------------------------------- audit


class AuditEntry(Event):
    """An entry with its place in the tenant's chain, and the link that the next one is built on."""

    position: PositiveInt
    link: str


class Broken(View):
    """The first place where chain and journal differ. `position` is null where the chain never reached."""

    position: int | None = None
    run_id: Id | None = None
    seq: int | None = None
    why: str

    def __str__(self) -> str:
        entry = f"entry {self.seq} of run {self.run_id}" if self.run_id else None
        place = f"position {self.position}" if self.position is not None else "past the chain"
        return f"{place} ({entry}): {self.why}" if entry else f"{place}: {self.why}"


class AuditVerdict(View):
    """`unsealed` entries are a second old at most: nothing is wrong with them, and nothing is proven yet."""

    ok: bool
    events: NonNegativeInt
    checkpoints: NonNegativeInt
    unsealed: NonNegativeInt = 0
    broken_at: Broken | None = None


class VerifyAudit(Body):
    """Checkpoints that were kept elsewhere, as evidence has them."""

    checkpoints: Annotated[list[dict[str, Any]], Field(max_length=1000)] = []


class SigningKey(View):
    """A public key; the private half never leaves the machine that signs."""

    key_id: str
    current: bool
    pem: str
