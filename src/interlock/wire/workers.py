"""Workers, their supervisors, and jobs with reserved workers."""

from typing import Annotated, Any
from uuid import UUID

from pydantic import AwareDatetime, Field, NonNegativeInt, PositiveInt, StringConstraints

from interlock.lifecycle import JobState, WorkerState
from interlock.wire.common import Body, Id, Name, StateChange, Text, View
from interlock.wire.runs import Input


class WorkerView(View):
    """A worker.

    `pid` is its process; `job_id` is the job that it is reserved for; `tenants` is null if it serves all tenants.

    `log` is the file on its host that its supervisor redirects its output to; null if it has none.
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
    # Metadata given by the creator of the worker.
    metadata: dict[str, Any] = {}
    holds: NonNegativeInt = 0
    heartbeat_at: AwareDatetime
    # The later of its last heartbeat and its last transition.
    updated_at: AwareDatetime
    started_at: AwareDatetime
    stopped_at: AwareDatetime | None = None
    state_history: list[StateChange] | None = None


Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]


class NewWorker(Body):
    """A worker that a supervisor will start. `tenants` are names; without them it serves all tenants."""

    name: Name | None = None
    workspace_id: Name | None = None
    host: Name | None = None
    labels: Annotated[list[Label], Field(min_length=1, max_length=20)] = ["default"]
    tenants: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = None
    metadata: Input = {}
    request_id: Name | None = None


class Order(Body):
    """A command to a worker, with a reason."""

    reason: Text | None = None
    request_id: Name | None = None


class SupervisorView(View):
    """A supervisor of worker processes.

    `desired_workers` is the number of processes that it keeps alive, `workers` the current number; `reason` explains a
    shortfall.
    """

    id: Id
    host: str
    pid: int
    desired_workers: NonNegativeInt
    workers: NonNegativeInt
    reason: str | None = None
    heartbeat_at: AwareDatetime
    started_at: AwareDatetime
    stopped_at: AwareDatetime | None = None


class NewJob(Body):
    """The body to start one run for each input, on workers that are reserved for the job."""

    task_description: Text
    workflow: Name
    version: PositiveInt | None = None
    inputs: Annotated[list[Input], Field(min_length=1, max_length=10_000)] = [{}]
    worker_count: Annotated[int, Field(ge=1, le=10)] = 1
    parent_job_id: UUID | None = None
    timeout_seconds: Annotated[float, Field(gt=0, le=365 * 86400)] | None = None
    request_id: Name | None = None


class JobProgress(View):
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
    progress: JobProgress
    workers: list[JobWorker] = []
    deadline_at: AwareDatetime | None = None
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    state_history: list[StateChange] | None = None


class JobTree(Job):
    children: list["JobTree"] = []


class JobHistoryEvent(View):
    """A line of a job's history: a transition or its progress."""

    seq: NonNegativeInt
    type: str
    at: AwareDatetime
    data: dict[str, Any] = {}


class Health(View):
    status: str = "ok"
