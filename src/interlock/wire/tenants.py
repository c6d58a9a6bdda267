"""Tenants: what they may use, and the keys and secrets that act for them."""

from typing import Annotated

from pydantic import AwareDatetime, Field, NonNegativeInt, PositiveInt, SecretStr, StringConstraints

from interlock.lifecycle import Term
from interlock.wire.grammar import Body, Id, Name, View


class Role(Term):
    """What a key may do. Every role may also do what a viewer may."""

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
    # The tenant's first admin key, in the answer that created the tenant and never again.
    key: str | None = None


class NewTenant(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,99}$")]
    max_concurrency: PositiveInt | None = None
    max_runs_per_min: PositiveInt | None = None
    max_writes_per_run: PositiveInt | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1
    request_id: Name | None = None


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
    request_id: Name | None = None


class SetSecret(Body):
    value: SecretStr
    request_id: Name | None = None


class StoredSecret(View):
    """A secret's name and history; its value is never shown again."""

    name: str
    version: PositiveInt
    created_at: AwareDatetime
    created_by: str
