"""Runs, their steps and their events."""

from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, Field, NonNegativeInt, PositiveInt, computed_field

from interlock.lifecycle import RunReason, RunState, StepState, Term
from interlock.wire.common import Body, Id, Name, Seconds, StateChange, Text, View, encodable


class Initiator(Term):
    """The initiator of a transition. A worker that carries out a person's decision is not its initiator."""

    USER = "user", "Somebody with a key, or a person in Slack."
    SYSTEM = "system", "The engine, a worker, a schedule or another run."
    TIMEOUT = "timeout", "A deadline passed."
    POLICY = "policy", "The policy decided."
    WEBHOOK = "webhook", "A delivery or an event from outside."
    APPROVAL = "approval", "People decided on an approval."


class ExternalEvent(View):
    """The event of another system that started or continued a run."""

    event_type: str
    source: str | None = None
    event_id: str | None = None


class Trigger(View):
    """What started a run.

    `source` is a kind (api, cli, github, schedule …), `ref` the source's own name for the occasion.
    """

    source: str
    ref: str | None = None
    initiator: Initiator | None = None
    # The user, by the name that the source has for them.
    user: str | None = None
    metadata: dict[str, Any] = {}
    external_event: ExternalEvent | None = None
    # The idempotency key of the request that started the run, if it had one; `idempotency_hit` in the log has the same
    # key.
    idempotency_key: str | None = None
    # The W3C trace context of the request; steps and tools continue it.
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
    # While the step waits for an external event: `event`, `correlation` and `timeout_at`.
    waits_for: dict[str, Any] | None = None
    last_error: Any = None
    idempotency_key: str | None = None
    # The tool's arguments: secrets by their names, and secret parameters of the tool as `[secret]`. Null before the
    # step begins, and for a flow's step that only reads: only the flow's code has its input.
    input: Any = None
    output: Any = None
    cost_usd: float = 0
    # After a crash, the output of a resumable step is used and the step is not repeated; an idempotent step may be
    # repeated. Null until a worker has read the tool's declaration.
    resumable: bool = False
    idempotent: bool | None = None
    # The model's token usage, if the model reported it.
    tokens: Tokens | None = None
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    # How long the last attempt took.
    duration_ms: float | None = None
    needs: list[str] = []
    # The label of the workers that may execute the step; null for any worker.
    runs_on: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def retrying(self) -> bool:
        """Return whether the step failed and will be retried. Its state is then pending."""
        return self.status is StepState.PENDING and self.attempt >= 1


class Compensation(Step):
    """A step that undoes another step of a failed or canceled run. `undoes` is the key of that other step."""

    undoes: str


# The version of this representation. It grows when a field changes its meaning or is removed.
SCHEMA_VERSION = 1


class Run(View):
    id: Id
    schema_version: int = SCHEMA_VERSION
    tenant_id: Id
    workspace_id: str | None = None
    workflow: str
    workflow_version: int
    status: RunState
    reason: RunReason | None = None
    # What is missing, if the run waits for anything besides people, events and time.
    waiting_for: str | None = None
    input: Any = None
    result: Any = None
    error: Any = None
    trigger: Trigger
    # The idempotency key of the request, or the identity of the delivery, that started the run. A child run's key names
    # its parent and the step.
    idempotency_key: str | None = None
    # The repository and the pull request's address, if the delivery that started the run was about one.
    repository: str | None = None
    pull_request: str | None = None
    session_id: Id | None = None
    job_id: Id | None = None
    parent_run_id: Id | None = None
    resumed_from: Id | None = None
    # How often the run was continued: after a lost worker, or as a new run that resumes another.
    resume_count: NonNegativeInt = 0
    # The last heartbeat of the worker that currently holds the run.
    last_heartbeat_at: AwareDatetime | None = None
    cost_usd: float = 0
    created_at: AwareDatetime
    # The time of the last entry.
    updated_at: AwareDatetime
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    duration_ms: int | None = None
    # The first step that runs, waits or comes next. Null in lists, which have no steps, and after the end of the run.
    current_step: str | None = None
    steps: list[Step] = []
    # The compensation steps in their order of execution: the most recent effect is undone first.
    compensation: list[Compensation] = []
    # Every state after `pending`. The reason of a cancellation is the person's text, otherwise a code.
    state_history: list[StateChange] = []


class Event(View):
    """One entry of a run's journal. `seq` counts from 1 without gaps and is the id in the event stream."""

    seq: NonNegativeInt
    type: str
    at: AwareDatetime
    run_id: Id
    session_id: Id | None = None
    data: dict[str, Any] = {}


# Sources that only the engine may name. A caller that starts a run with a key cannot claim one of them.
RESERVED_SOURCES = frozenset({"github", "slack", "webhook", "schedule", "session", "job", "run", "reversal", "console"})


def _not_reserved(source: str) -> str:
    if source in RESERVED_SOURCES:
        raise ValueError(
            f"{source} is reserved for runs that Interlock starts by itself; choose another source, or leave it out"
        )
    return source


class NewTrigger(Body):
    source: Annotated[Name, AfterValidator(_not_reserved)] = "api"
    ref: Text | None = None


Input = Annotated[dict[str, Any], AfterValidator(encodable)]
MOST_RUNS_AT_ONCE = 1000


class _Start(Body):
    workflow: Name
    version: PositiveInt | None = None
    trigger: NewTrigger | None = None
    deadline_seconds: Seconds | None = None
    request_id: Name | None = None


class StartRun(_Start):
    input: Input = {}


class StartRuns(_Start):
    """The body to start a run for each input."""

    inputs: Annotated[list[Input], Field(min_length=1, max_length=MOST_RUNS_AT_ONCE)]


class CancelRequest(Body):
    """The body to cancel or interrupt a run."""

    reason: Text | None = None
    request_id: Name | None = None
