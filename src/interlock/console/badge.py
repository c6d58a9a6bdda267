"""The number beside the inbox: how many open approvals this key may approve now."""

from datetime import datetime
from uuid import UUID

from interlock.engine.access.principal import Principal
from interlock.engine.approvals import approvals
from interlock.policy.roles import MAY, Permission
from interlock.store.pool import Database

# The most that the badge counts, the most rows that it reads, and the rows per query: every page has the badge.
_MOST, _LOOKED_AT, _WINDOW = 100, 2000, 500


async def count_for(database: Database, who: Principal) -> str:
    """Return the number as text, "99+" and the like if there may be more, or nothing if it is 0."""
    if Permission.APPROVE not in MAY[who.role]:
        return ""
    count = looked_at = 0
    place: tuple[datetime | None, UUID | None] = None, None
    while looked_at < _LOOKED_AT:
        rows = await database.fetch("open_questions", who.tenant_id, who.workspace_id, _WINDOW, *place)
        votes = await approvals.votes_on(database, rows) if rows else []
        for row in rows:
            cast = [vote for vote in votes if vote["approval_id"] == row["id"]]
            count += approvals.why_cannot_vote(row, cast, who, approves=True) is None
        if count >= _MOST:
            return f"{_MOST - 1}+"
        if len(rows) < _WINDOW:
            return str(count or "")
        looked_at += len(rows)
        place = rows[-1]["expires_at"], rows[-1]["id"]
    return f"{count}+"
