"""Runs, their steps and their events."""

from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, Field, NonNegativeInt, PositiveInt, computed_field

from interlock.lifecycle import RunReason, RunState, StepState, Term
from interlock.wire.grammar import Body, Id, Name, Seconds, StateChange, Text, View, encodable


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
    # What the request that started it is known by, if it had a key; `idempotency_hit` in the log names the same.
    idempotency_key: str | None = None
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

    @computed_field  # type: ignore[prop-decorator]
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
    # Every state that it went to after `pending`. Who canceled it and why is here: in their words, else as a code.
    state_history: list[StateChange] = []


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
    """A run for each input."""

    inputs: Annotated[list[Input], Field(min_length=1, max_length=MOST_RUNS_AT_ONCE)]


class Stop(Body):
    """The body of cancel and interrupt."""

    reason: Text | None = None
    request_id: Name | None = None
