"""Links between Slack users and keys. A link is made by a person who holds both, never by an admin for someone else.

The holder of a key asks for a code and sends it from Slack, whose signature proves the team and the user. A Slack
team belongs to one tenant, unless an admin of that tenant offers it to another tenant whose admin accepts.
"""

import secrets
from datetime import datetime
from hashlib import sha256

from interlock.engine.access.principal import Principal
from interlock.engine.access.tenants import principal_of
from interlock.errors import Conflict, Forbidden, NotFound
from interlock.store.pool import Row, Tx

CODE_SECONDS = 600.0
# No letters that people mistake for digits. Sixteen of them are 77 bits.
_LETTERS = "23456789ABCDEFGHJKMNPQRSTVWX"


async def new_code(tx: Tx, who: Principal) -> tuple[str, datetime]:
    """Return a code for the caller's own key, and when it expires."""
    letters = [secrets.choice(_LETTERS) for _ in range(16)]
    code = "-".join("".join(letters[start : start + 4]) for start in range(0, 16, 4))
    row = await tx.row("add_link_code", _hash(code), who.key_id, CODE_SECONDS)
    assert row is not None
    return code, row["expires_at"]


async def link(tx: Tx, code: str, team_id: str, user_id: str) -> Principal:
    """Let the Slack user act with the key behind the code, and return that key's principal."""
    await tx.value("lock_slack_team", team_id)
    row = await tx.row("use_link_code", _hash(code))
    if row is None:
        raise NotFound(
            "This code is wrong, was used already, or is older than ten minutes. Ask for another one: "
            "`interlock slack link`.",
            code="SLACK_CODE_INVALID",
        )
    who = principal_of(row)
    if not await tx.value("is_in_slack_team", who.tenant_id, team_id):
        raise Forbidden(
            "This Slack workspace belongs to another tenant of this installation. An admin there has to offer it to "
            "your tenant (`interlock slack share`), and an admin of yours has to accept (`interlock slack join`).",
            code="SLACK_TEAM_OF_ANOTHER_TENANT",
        )
    await tx.fetch("link_slack_user", who.tenant_id, team_id, user_id, who.key_id)
    return who


def _hash(code: str) -> bytes:
    plain = "".join(letter for letter in code.upper() if letter.isalnum())
    return sha256(plain.encode()).digest()


async def unlink(tx: Tx, who: Principal, team_id: str, user_id: str) -> Row:
    row = await tx.row("unlink_slack_user", who.tenant_id, team_id, user_id, who.workspace_id)
    if row is None:
        raise NotFound(f"No Slack user {user_id} of team {team_id} is linked here.", code="SLACK_USER_NOT_FOUND")
    return row


async def offer(tx: Tx, who: Principal, team_id: str, tenant: str) -> None:
    """Offer a team of the caller's tenant to another tenant, which may then accept."""
    who.require_whole_tenant("a Slack team is")
    await tx.value("lock_slack_team", team_id)
    if not await tx.value("is_in_slack_team", who.tenant_id, team_id):
        raise NotFound(f"Slack team {team_id} does not belong to your tenant.", code="SLACK_TEAM_NOT_FOUND")
    # The answer is the same for a name that no tenant has: an admin must not be able to search for names of tenants.
    if (other := await tx.row("tenant_named", tenant)) is not None:
        await tx.fetch("offer_slack_team", who.tenant_id, other["id"], team_id, who.actor)


async def accept(tx: Tx, who: Principal, team_id: str) -> None:
    """Accept a team that an admin of another tenant offered; accepting it again changes nothing."""
    who.require_whole_tenant("a Slack team is")
    await tx.value("lock_slack_team", team_id)
    if await tx.value("is_in_slack_team", who.tenant_id, team_id):
        return
    if await tx.row("accept_slack_team", who.tenant_id, team_id, who.actor) is None:
        raise NotFound(f"No tenant has offered Slack team {team_id} to yours.", code="SLACK_TEAM_NOT_FOUND")


async def leave(tx: Tx, who: Principal, team_id: str) -> None:
    """Remove the caller's tenant from a team, or decline an offer. Its people cannot act from that team any more."""
    who.require_whole_tenant("a Slack team is")
    await tx.value("lock_slack_team", team_id)
    if await tx.row("leave_slack_team", who.tenant_id, team_id) is None:
        raise Conflict(
            f"Your tenant shares Slack team {team_id} with no other tenant, so it cannot leave it.",
            code="SLACK_TEAM_NOT_SHARED",
        )
