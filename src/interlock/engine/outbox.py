"""The outbox: messages to other systems, sent at least once after the change they are about was committed.

The statements that cause messages also write them (see 0008_messages.sql). This module claims and settles them, and
selects their receivers. The integrations send them.
"""

import base64
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import orjson

from interlock.engine.access import encryption
from interlock.engine.access.encryption import EncryptedValue
from interlock.engine.access.principal import Principal
from interlock.errors import Conflict, NotFound
from interlock.ids import MessageId, TargetId, TenantId, uuid7
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.wire import WebhookEvent

DAY = 24 * 3600.0
# The longest delay that a receiver may ask us for.
LONGEST_WAIT = 3600.0
# For how long a message is tried, with which pauses, and for how long its record is kept.
PATIENCE_SECONDS = DAY
BACKOFF_SECONDS = (5.0, 30.0, 120.0, 600.0, 3600.0)
KEPT_SECONDS = 30 * DAY
# Longer than a batch can take to send: a message is due again only after its sender has died.
LEASE_SECONDS = 120.0

# An approval card changes with every one of these. Only Slack receives `approval.voted`.
SLACK_EVENTS = (*(event for event in WebhookEvent if event.startswith("approval.")), "approval.voted")


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """One message for one destination, with all the data needed to send it."""

    id: int
    message_id: MessageId
    target_id: UUID
    tenant_id: TenantId
    channel: str
    event: str
    subject_id: UUID
    payload: dict[str, Any] | None
    address: str
    # A webhook's secret, as it is stored.
    sealed: EncryptedValue | None
    attempts: int
    created_at: Any
    now: Any
    # A later message about the same subject waits, and will show everything that this one would.
    superseded: bool


@dataclass(frozen=True, slots=True)
class Delivered:
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Undelivered:
    """`after`: the delay that the receiver asked for. `gone`: the receiver wants no more messages."""

    error: str
    status: int | None = None
    after: float | None = None
    gone: bool = False


# ---------------------------------------------------------------- sending


async def claim(
    database: Database, channels: Sequence[str], *, busy: Collection[UUID] = (), most: int = 200, of_each: int = 8
) -> list[OutboxMessage]:
    """Claim due messages for `LEASE_SECONDS`. Each destination gives a few, so that no backlog delays the others."""
    rows = await database.fetch("claim_messages", most, of_each, list(busy), list(channels), LEASE_SECONDS)
    return sorted((_message(row) for row in rows), key=lambda message: message.id)


def _message(row: Row) -> OutboxMessage:
    columns = {name: row[name] for name in OutboxMessage.__slots__ if name not in ("payload", "sealed")}
    sealed = EncryptedValue(row["nonce"], row["ciphertext"]) if row["nonce"] else None
    return OutboxMessage(payload=orjson.loads(row["payload"]) if row["payload"] else None, sealed=sealed, **columns)


async def settle(database: Database, message: OutboxMessage, outcome: Delivered | Undelivered) -> float:
    """Mark the message done, or due again. Return for how many seconds to send nothing to this destination."""
    if isinstance(outcome, Delivered):
        await database.fetch("message_delivered", message.id, outcome.status)
        return 0.0
    pause = pause_after(message.attempts) if outcome.after is None else outcome.after
    found = await database.row(
        "message_not_delivered", message.id, pause, outcome.error, outcome.status, PATIENCE_SECONDS
    )
    log.warning("message_not_delivered", event_=message.event, attempt=message.attempts, error=outcome.error)
    if found is not None and found["channel"] == "webhook":
        limit = timedelta(days=database.settings.webhook_disable_days)
        if outcome.gone or found["now"] - found["failing_since"] >= limit:
            await database.row("disable_destination", found["id"], "it kept failing", False)
            log.error("webhook_disabled", webhook_id=str(found["id"]), error=outcome.error)
    return pause


def pause_after(attempts: int) -> float:
    return BACKOFF_SECONDS[min(attempts, len(BACKOFF_SECONDS)) - 1]


async def put_off(database: Database, messages: Sequence[OutboxMessage], pause: float) -> None:
    await database.fetch("put_off_messages", [message.id for message in messages], pause)


async def tidy(database: Database) -> None:
    await database.fetch("give_up_messages", PATIENCE_SECONDS + 3600)
    await database.fetch("forget_messages", KEPT_SECONDS, 5000)


# ---------------------------------------------------------------- destinations


def webhook_id(message_id: MessageId) -> str:
    """Return the id by which receivers know a message. It is the same for all tries."""
    return f"msg_{message_id.hex}"


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


async def add_webhook(
    tx: Tx,
    database: Database,
    principal: Principal,
    webhook_id: TargetId,
    *,
    url: str,
    events: Sequence[str],
    secret: str,
) -> Row:
    sealed = encryption.encrypt(database.settings, encryption.place_of_webhook(principal.tenant_id, webhook_id), secret)
    row = await tx.row(
        "add_destination", webhook_id, principal.tenant_id, principal.workspace_id, "webhook", url,
        list(dict.fromkeys(events)), *sealed, principal.actor,
    )  # fmt: skip
    assert row is not None
    return row


async def webhook(tx: Tx | Database, principal: Principal, webhook_id: TargetId) -> Row:
    row = await tx.row("get_destination", principal.tenant_id, webhook_id, principal.workspace_id)
    if row is None or row["channel"] != "webhook":
        raise NotFound(f"no webhook {webhook_id}", code="WEBHOOK_NOT_FOUND")
    return row


async def remove_webhook(tx: Tx, principal: Principal, webhook_id: TargetId) -> Row:
    await webhook(tx, principal, webhook_id)
    row = await tx.row("disable_destination", webhook_id, "the webhook was removed", True)
    assert row is not None
    return row


async def enable_webhook(tx: Tx, principal: Principal, webhook_id: TargetId) -> Row:
    """Enable a webhook that was switched off after repeated failures. Messages that it missed are not sent."""
    await webhook(tx, principal, webhook_id)
    row = await tx.row("enable_destination", webhook_id)
    assert row is not None
    return row


async def test_webhook(tx: Tx, principal: Principal, webhook_id: TargetId) -> Row:
    """Queue a message without an event, sent like any other."""
    found = await webhook(tx, principal, webhook_id)
    row = await tx.row("add_test_message", webhook_id)
    if row is None:
        raise Conflict(
            f"webhook {webhook_id} is switched off since {found['disabled_at']:%Y-%m-%d %H:%M:%S} UTC; switch it on "
            "first, at POST /api/webhooks/{id}/enable", code="WEBHOOK_DISABLED",
        )  # fmt: skip
    return row


async def use_slack_channel(tx: Tx, tenant_id: TenantId, channel: str | None, by: str) -> Row | None:
    """Send a tenant's approvals to this channel from now on, or to no channel if None."""
    await tx.fetch("lock_slack_channel", tenant_id)
    before = await tx.row("slack_destination", tenant_id)
    if before is not None and before["address"] == channel:
        return before
    if before is not None:
        await tx.row("disable_destination", before["id"], "another channel was chosen", True)
    if channel is None:
        return None
    return await tx.row(
        "add_destination",
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
