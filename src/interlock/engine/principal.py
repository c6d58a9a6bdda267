"""A principal: who is asking, for which tenant, with which role."""

from dataclasses import dataclass, replace
from uuid import UUID

import orjson

from interlock.errors import Forbidden
from interlock.governance.roles import MAY, Permission, roles_with
from interlock.wire import Initiator, Role

# The tenant that was there first: it operates what all of them share.
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Principal:
    key_id: UUID
    tenant_id: UUID
    tenant: str
    name: str
    role: Role
    workspace_id: str | None = None
    groups: tuple[str, ...] = ()

    @property
    def actor(self) -> str:
        """In journals and votes: a name to read, an id that cannot be taken by somebody else."""
        return f"{self.name}:{self.key_id}"

    @property
    def facts(self) -> str:
        """What policies may ask about who asked, as it was at that moment."""
        return orjson.dumps({"role": self.role, "groups": self.groups, "tenant": self.tenant}).decode()

    @property
    def is_operator(self) -> bool:
        """Of the installation: whatever its role allows it may do for all tenants, to workers, channels and caps."""
        return self.tenant == DEFAULT_TENANT and self.workspace_id is None

    def reaches(self, workspace_id: str | None) -> bool:
        """Whether what is of this workspace is there for the key: a key of no workspace reaches all of its tenant."""
        return self.workspace_id in (None, workspace_id)

    def within(self, workspace_id: str | None) -> "Principal":
        """The same person at something of this workspace: what comes of it is there too, whatever their key's reach."""
        return replace(self, workspace_id=workspace_id)

    def require_whole_tenant(self, what: str) -> None:
        if self.workspace_id is not None:
            raise Forbidden(f"{what} the whole tenant's; this key is of workspace {self.workspace_id}")

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
    """The name in what journals and votes have: see `Principal.actor`. It may have colons of its own."""
    return actor.rpartition(":")[0]


# What acts by itself stands in journals with one of these names before its own; no key can be called so.
OURS = ("system", "worker", "run")
_SYSTEM = {
    "system:deadline": Initiator.TIMEOUT,
    "system:timeout": Initiator.TIMEOUT,
    "system:policy": Initiator.POLICY,
}


def initiator_of(actor: str) -> Initiator:
    ours = actor.partition(":")[0] in OURS
    return _SYSTEM.get(actor, Initiator.SYSTEM if ours else Initiator.USER)
