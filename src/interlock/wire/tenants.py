"""Tenants: their caps and usage, and their keys and secrets."""

from typing import Annotated

from pydantic import AwareDatetime, Field, NonNegativeInt, PositiveInt, SecretStr, StringConstraints

from interlock.lifecycle import Term
from interlock.wire.common import Body, Id, Name, ReadableName, View


class Role(Term):
    """The permissions of a key. Every role includes the permissions of a viewer."""

    VIEWER = "viewer", "Reads everything of its tenant."
    OPERATOR = "operator", "Starts, cancels and retries runs, sends events, and publishes workflows."
    APPROVER = "approver", "Decides approvals."
    ADMIN = "admin", "Does all of that, and manages keys."
    AGENT = "agent", "Starts runs; can never approve."


class Tenant(View):
    id: Id
    name: str
    max_concurrency: int | None = None
    max_runs_per_min: int | None = None
    max_writes_per_run: int | None = None
    weight: float = 1
    created_at: AwareDatetime
    # The tenant's first admin key. Only in the response that created the tenant.
    key: str | None = None


class NewTenant(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,99}$")]
    max_concurrency: PositiveInt | None = None
    max_runs_per_min: PositiveInt | None = None
    max_writes_per_run: PositiveInt | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1
    request_id: Name | None = None


class ChangeTenant(Body):
    """The body to change a tenant. Omitted fields keep their value; null removes a cap."""

    max_concurrency: PositiveInt | None = None
    max_runs_per_min: PositiveInt | None = None
    max_writes_per_run: PositiveInt | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] = 1
    request_id: Name | None = None


class WorkflowUsage(View):
    """The current usage of a workflow that has a cap. All other workflows share the tenant's cap."""

    workflow: str
    max_concurrency: PositiveInt
    in_flight: NonNegativeInt = 0
    # Runs that could start or continue, and wait for a worker or for the cap.
    waiting: NonNegativeInt = 0


class Usage(View):
    """The current usage of a tenant's caps. A cap of null means no cap."""

    tenant_id: Id
    tenant: str
    weight: float = 1
    max_concurrency: int | None = None
    in_flight: NonNegativeInt = 0
    max_runs_per_min: int | None = None
    # The starts used in the current minute, and the runs that are scheduled for a later minute.
    runs_this_minute: NonNegativeInt = 0
    runs_waiting: NonNegativeInt = 0
    max_writes_per_run: int | None = None
    # Runs that a worker could take now; 10,000 means that many or more.
    ready: NonNegativeInt = 0
    workflows: list[WorkflowUsage] = []


class Key(View):
    id: Id
    name: str
    role: Role
    workspace_id: str | None = None
    groups: list[str] = []
    created_at: AwareDatetime
    revoked_at: AwareDatetime | None = None
    # The secret of the key. Only in the response that created it.
    key: str | None = None


class NewKey(Body):
    name: ReadableName
    role: Role
    workspace_id: ReadableName | None = None
    groups: list[ReadableName] = []
    request_id: Name | None = None


ToolPattern = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z_][A-Za-z0-9_.*-]{0,199})$")]


class SetSecret(Body):
    value: SecretStr
    # Names of the tools that may use the value, and patterns such as `shop.*`; `*` matches every tool. The list is
    # empty for a secret that only triggers use.
    tools: list[ToolPattern]
    # The workspaces whose runs and triggers may use it. If omitted, all of the tenant may.
    workspaces: list[Name] | None = None
    request_id: Name | None = None


class StoredSecret(View):
    """The name and history of a secret. No response contains its value."""

    name: str
    version: PositiveInt
    tools: list[str]
    workspaces: list[str] | None = None
    created_at: AwareDatetime
    created_by: str
