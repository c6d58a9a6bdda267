"""Roles: what a key may do. The API, the CLI and all other parts use this table."""

from interlock.lifecycle import Term
from interlock.wire import Role


class Permission(Term):
    READ = "read", "look at runs, approvals and workflows"
    START = "start", "start and retry runs"
    STOP = "stop", "cancel runs"
    TELL = "tell", "tell runs what happened outside"
    DEFINE = "define", "apply workflows"
    APPROVE = "approve", "decide on approvals"
    SUPERVISE = "supervise", "start, pause and stop workers"
    ADMINISTER = "administer", "manage keys, tenants and policies"


P = Permission

# An agent may start runs and read. It can never approve, nor send an event that a run waits for.
MAY: dict[Role, frozenset[Permission]] = {
    Role.VIEWER: frozenset({P.READ}),
    Role.OPERATOR: frozenset({P.READ, P.START, P.STOP, P.TELL, P.DEFINE, P.SUPERVISE}),
    Role.APPROVER: frozenset({P.READ, P.APPROVE}),
    Role.AGENT: frozenset({P.READ, P.START}),
    Role.ADMIN: frozenset(P),
}


def roles_with(permission: Permission) -> str:
    return " or ".join(role for role in Role if permission in MAY[role])
