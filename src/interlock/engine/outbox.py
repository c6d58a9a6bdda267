"""The outbox: messages to the outside, sent at least once after what they speak of was committed.

Messages are written by the statements that cause them (see 0008_messages.sql). Here they are claimed and
settled, and here is who gets them. Sending itself is the integrations' business.
"""

import base64
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import orjson

from interlock.engine import vault
from interlock.engine.principal import Principal
from interlock.engine.vault import Sealed
from interlock.errors import Conflict, NotFound
from interlock.ids import uuid7
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.wire import WebhookEvent

DAY = 24 * 3600.0
# The longest that a receiver may ask us to wait.
LONGEST_WAIT = 3600.0
# How long a message is tried, with which pauses, and for how long its trace is kept.
PATIENCE_SECONDS = DAY
BACKOFF_SECONDS = (5.0, 30.0, 120.0, 600.0, 3600.0)
KEPT_SECONDS = 30 * DAY
# Longer than a batch can take to send: a message is due again only when its sender is gone.
LEASE_SECONDS = 120.0

# A card changes with every one of these; that somebody voted is Slack's alone to show.
SLACK_EVENTS = (*(event for event in WebhookEvent if event.startswith("approval.")), "approval.voted")


@dataclass(frozen=True, slots=True)
class Message:
    """One thing to say to one destination, with everything that is needed to say it."""

    id: int
    message_id: UUID
    destination_id: UUID
    tenant_id: UUID
    channel: str
    event: str
    subject_id: UUID
    payload: dict[str, Any] | None
    address: str
    # A webhook's secret, as it is stored.
    sealed: Sealed | None
    attempts: int
    created_at: Any
    now: Any
    # A later message about the same subject waits: it will show all that this one would.
    superseded: bool


@dataclass(frozen=True, slots=True)
class Delivered:
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Undelivered:
    """`after`: when the receiver wants to be asked again. `gone`: it never wants to be."""

    error: str
    status: int | None = None
    after: float | None = None
    gone: bool = False


# ---------------------------------------------------------------- sending


async def claim(
    database: Database, channels: Sequence[str], *, busy: Collection[UUID] = (), most: int = 200, of_each: int = 8
) -> list[Message]:
    """Messages that are due, taken for `LEASE_SECONDS`. Each destination gives a few, whatever waits for others."""
    rows = await database.fetch(
        "claim_messages", database.clock(), most, of_each, list(busy), list(channels), LEASE_SECONDS
    )
    return sorted((_message(row) for row in rows), key=lambda message: message.id)


def _message(row: Row) -> Message:
    columns = {name: row[name] for name in Message.__slots__ if name not in ("payload", "sealed")}
    sealed = Sealed(row["nonce"], row["ciphertext"]) if row["nonce"] else None
    return Message(payload=orjson.loads(row["payload"]) if row["payload"] else None, sealed=sealed, **columns)


async def settle(database: Database, message: Message, outcome: Delivered | Undelivered) -> float:
    """Mark it done, or due again. Returns for how many seconds the destination is better left alone."""
    if isinstance(outcome, Delivered):
        await database.fetch("message_delivered", database.clock(), message.id, outcome.status)
        return 0.0
    pause = pause_after(message.attempts) if outcome.after is None else outcome.after
    found = await database.row(
        "message_not_delivered", database.clock(), message.id, pause, outcome.error, outcome.status, PATIENCE_SECONDS
    )
    log.warning("message_not_delivered", event_=message.event, attempt=message.attempts, error=outcome.error)
    if found is not None and found["channel"] == "webhook":
        limit = timedelta(days=database.settings.webhook_disable_days)
        if outcome.gone or found["now"] - found["failing_since"] >= limit:
            await database.row("disable_destination", database.clock(), found["id"], "it kept failing", False)
            log.error("webhook_disabled", webhook_id=str(found["id"]), error=outcome.error)
    return pause


def pause_after(attempts: int) -> float:
    return BACKOFF_SECONDS[min(attempts, len(BACKOFF_SECONDS)) - 1]


async def put_off(database: Database, messages: Sequence[Message], pause: float) -> None:
    await database.fetch("put_off_messages", database.clock(), [message.id for message in messages], pause)


async def tidy(database: Database) -> None:
    await database.fetch("give_up_messages", database.clock(), PATIENCE_SECONDS + 3600)
    await database.fetch("forget_messages", database.clock(), KEPT_SECONDS, 5000)


# ---------------------------------------------------------------- destinations


def webhook_id(message_id: UUID) -> str:
    """What receivers know a message by, the same over all tries."""
    return f"msg_{message_id.hex}"


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


async def add_webhook(
    tx: Tx, database: Database, principal: Principal, webhook_id: UUID, *, url: str, events: Sequence[str], secret: str
) -> Row:
    sealed = vault.encrypt(database.settings, vault.place_of_webhook(principal.tenant_id, webhook_id), secret)
    row = await tx.row(
        "add_destination", database.clock(), webhook_id, principal.tenant_id, principal.workspace_id, "webhook", url,
        list(dict.fromkeys(events)), *sealed, principal.actor,
    )  # fmt: skip
    assert row is not None
    return row


async def webhook(tx: Tx | Database, principal: Principal, webhook_id: UUID) -> Row:
    row = await tx.row("get_destination", principal.tenant_id, webhook_id, principal.workspace_id)
    if row is None or row["channel"] != "webhook":
        raise NotFound(f"no webhook {webhook_id}", code="WEBHOOK_NOT_FOUND")
    return row


async def remove_webhook(tx: Tx, database: Database, principal: Principal, webhook_id: UUID) -> Row:
    await webhook(tx, principal, webhook_id)
    row = await tx.row("disable_destination", database.clock(), webhook_id, "the webhook was removed", True)
    assert row is not None
    return row


async def enable_webhook(tx: Tx, principal: Principal, webhook_id: UUID) -> Row:
    """For one that was switched off because it kept failing. What was missed meanwhile is not sent."""
    await webhook(tx, principal, webhook_id)
    row = await tx.row("enable_destination", webhook_id)
    assert row is not None
    return row


async def test_webhook(tx: Tx, database: Database, principal: Principal, webhook_id: UUID) -> Row:
    """A message that tells of nothing, sent like any other."""
    found = await webhook(tx, principal, webhook_id)
    row = await tx.row("add_test_message", database.clock(), webhook_id)
    if row is None:
        raise Conflict(
            f"webhook {webhook_id} is switched off since {found['disabled_at']:%Y-%m-%d %H:%M:%S} UTC; switch it on "
            "first, at POST /api/webhooks/{id}/enable", code="WEBHOOK_DISABLED",
        )  # fmt: skip
    return row


async def use_slack_channel(tx: Tx, database: Database, tenant_id: UUID, channel: str | None, by: str) -> Row | None:
    """A tenant's approvals go to this channel from now on; None: to no channel."""
    await tx.fetch("lock_slack_channel", tenant_id)
    before = await tx.row("slack_destination", tenant_id)
    if before is not None and before["address"] == channel:
        return before
    if before is not None:
        await tx.row("disable_destination", database.clock(), before["id"], "another channel was chosen", True)
    if channel is None:
        return None
    return await tx.row(
        "add_destination",
        database.clock(),
        uuid7(),
        tenant_id,
        None,
        "slack",
        channel,
        list(SLACK_EVENTS),
        None,
        None,
        by,
    )


# ---------------------------------------------------------------- people in Slack


async def map_slack_user(
    tx: Tx, database: Database, principal: Principal, *, team_id: str, user_id: str, key_id: UUID
) -> Row:
    if not await tx.value("is_key_of_workspace", key_id, principal.tenant_id, principal.workspace_id):
        raise Conflict(f"key {key_id} is not one of yours, or was revoked", code="KEY_NOT_USABLE")
    row = await tx.row(
        "map_slack_user", database.clock(), principal.tenant_id, team_id, user_id, key_id, principal.actor,
        principal.workspace_id,
    )  # fmt: skip
    if row is None:
        raise Conflict(f"Slack user {user_id} acts with a key that is not one of yours", code="SLACK_USER_TAKEN")
    return row


async def unmap_slack_user(tx: Tx, principal: Principal, team_id: str, user_id: str) -> Row:
    row = await tx.row("unmap_slack_user", principal.tenant_id, team_id, user_id, principal.workspace_id)
    if row is None:
        raise NotFound(f"no Slack user {user_id} of team {team_id} is known here", code="SLACK_USER_NOT_FOUND")
    return row
