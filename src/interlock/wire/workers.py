"""Workers, their supervisors, and the jobs that they are reserved for."""

from typing import Annotated, Any
from uuid import UUID

from pydantic import AwareDatetime, Field, NonNegativeInt, PositiveInt, StringConstraints

from interlock.lifecycle import JobState, WorkerState
from interlock.wire.grammar import Body, Id, Name, StateChange, Text, View
from interlock.wire.runs import Input


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
    inputs: Annotated[list[Input], Field(min_length=1, max_length=10_000)] = [{}]
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
