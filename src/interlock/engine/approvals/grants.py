"""Standing grants: approvals given in advance for a tool, some arguments and a time.

A grant never covers a `high` action or a quorum of two.
"""

from collections.abc import Sequence
from typing import Any

from interlock.engine.access.principal import Principal
from interlock.errors import NotFound
from interlock.ids import GrantId
from interlock.journal import encode
from interlock.store.pool import NO_TIMEOUT, Database, Row, Tx
from interlock.store.records import AnyRun


async def give(
    tx: Tx, principal: Principal, grant_id: GrantId, *,
    tool: str, arguments: dict[str, Any], tier: str, expires_in: float, reason: str | None,
) -> Row:  # fmt: skip
    row = await tx.row(
        "give_grant", grant_id, principal.tenant_id, tool, encode(arguments), tier, reason,
        principal.actor, expires_in, principal.workspace_id,
    )  # fmt: skip
    assert row is not None
    return row


async def revoke(tx: Tx, principal: Principal, grant_id: GrantId) -> Row:
    row = await tx.row("revoke_grant", principal.tenant_id, grant_id, principal.actor, principal.workspace_id)
    if row is None:
        raise NotFound(f"no standing grant {grant_id}", code="GRANT_NOT_FOUND")
    return row


async def matching(
    database: Database, run: AnyRun, tool: str, fields: dict[str, Any], tier: str, *,
    approvers: Sequence[str] = (), reason_required: bool = False,
) -> Row | None:  # fmt: skip
    """Return a grant that covers this action, counted as used. A grant by the run's requester never matches.

    It replaces an approval, so it must satisfy what the rule asks of one: the approver's groups, and a reason.
    """
    return await database.row(
        "use_grant", run.tenant_id, tool, encode(fields), tier, run.id,
        list(approvers), reason_required, run.workspace_id, patience=NO_TIMEOUT,
    )  # fmt: skip


async def lets_pass(database: Database, run: AnyRun) -> bool:
    """Return whether the sender of the message approved its agent's actions in advance and their key is still valid."""
    if not run.auto_approve:
        return False
    return bool(await database.value("key_holds", run.requested_by, patience=NO_TIMEOUT))
