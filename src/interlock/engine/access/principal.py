"""A principal: the caller, their tenant and their role."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from interlock.errors import Forbidden
from interlock.ids import KeyId, TenantId
from interlock.journal import DEADLINE, POLICY, Cause
from interlock.lifecycle import ApprovalState
from interlock.policy.roles import MAY, Permission, roles_with
from interlock.wire import Initiator, Role

# The first tenant. It operates what all tenants share.
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Principal:
    key_id: KeyId
    tenant_id: TenantId
    tenant: str
    name: str
    role: Role
    workspace_id: str | None = None
    groups: tuple[str, ...] = ()

    @property
    def actor(self) -> str:
        """Return the name in journals and votes: a readable name, and an id that no other key can have."""
        return f"{self.name}:{self.key_id}"

    @property
    def facts(self) -> str:
        """Return what policies may ask about the requester, as it was at that moment."""
        return orjson.dumps({"role": self.role, "groups": self.groups, "tenant": self.tenant}).decode()

    @property
    def is_operator(self) -> bool:
        """Return whether the principal operates the installation.

        Within its role, an operator may act for all tenants: on workers, channels and caps.
        """
        return self.tenant == DEFAULT_TENANT and self.workspace_id is None

    def reaches(self, workspace_id: str | None) -> bool:
        """Return whether the key reaches this workspace. A key without a workspace reaches its whole tenant."""
        return self.workspace_id in (None, workspace_id)

    def within(self, workspace_id: str | None) -> "Principal":
        """Return the same principal, limited to this workspace, so that everything it creates is in this workspace."""
        return replace(self, workspace_id=workspace_id)

    def require_whole_tenant(self, what: str) -> None:
        if self.workspace_id is not None:
            raise Forbidden(f"{what} the whole tenant's; this key is of workspace {self.workspace_id}")

    def require_may_grant(self, groups: Sequence[str]) -> None:
        """Raise Forbidden if a workspace's key grants a group that it lacks.

        A group decides approvals in the whole tenant.
        """
        foreign = [] if self.workspace_id is None else sorted(set(groups) - set(self.groups))
        if foreign:
            raise Forbidden(
                f"This key of workspace {self.workspace_id} is not in {', '.join(foreign)}, so it cannot make keys "
                "that are. Ask an admin of the whole tenant.",
                code="GROUP_NOT_YOURS",
            )

    def require(self, permission: Permission) -> None:
        if permission == Permission.APPROVE and self.role == Role.AGENT:
            raise Forbidden(
                f"an agent never approves, whoever asked; that takes {roles_with(permission)}",
                code="AGENT_MAY_NOT_APPROVE", role=str(self.role),
            )  # fmt: skip
        if permission not in MAY[self.role]:
            raise Forbidden(
                f"a key of role {self.role} may not {permission.doc}; that takes {roles_with(permission)}",
                role=str(self.role),
            )


def name_of(actor: str) -> str:
    """Return the name part of an actor in journals and votes (see `Principal.actor`). The name may contain colons."""
    return actor.rpartition(":")[0]


# Internal actors in journals have one of these prefixes. No key can have such a name.
OURS = ("system", "worker", "run")
_SYSTEM = {DEADLINE: Initiator.TIMEOUT, "system:timeout": Initiator.TIMEOUT, POLICY: Initiator.POLICY}


def initiator_behind(actor: str, cause: Cause | None) -> Initiator:
    """Return the initiator of a transition. Its cause says more than the process that wrote the entry."""
    if cause is None:
        return initiator_of(actor)
    if cause.get("approval", {}).get("decision") in (ApprovalState.APPROVED, ApprovalState.REJECTED):
        return Initiator.APPROVAL
    if "received_at" in cause.get("external_event", {}):
        return Initiator.WEBHOOK
    return initiator_of(cause["by"])


def initiator_of(actor: str) -> Initiator:
    ours = actor.partition(":")[0] in OURS
    return _SYSTEM.get(actor, Initiator.SYSTEM if ours else Initiator.USER)
