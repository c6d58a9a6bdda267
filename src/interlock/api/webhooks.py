"""/api/webhooks"""

import contextlib
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import Caller, Ctx, Json, Limit, idempotent_write, page, position_cursor, uuid_cursor
from interlock.api.views import dump
from interlock.engine import outbox
from interlock.engine.ingress import url_guard
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.ids import TargetId, uuid7
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.wire import Delivery, EmptyBody, NewWebhook, Page, Webhook

router = APIRouter(prefix="/api/webhooks", tags=["webhooks"])


@router.post("", status_code=201, response_model=Webhook)
async def add(body: NewWebhook, request: Request, found: Ctx, who: Caller) -> Response:
    """Create a webhook for approvals and ended runs.

    Messages are signed (Standard Webhooks); the secret is shown only in this response.
    """
    who.require(Permission.ADMINISTER)
    url_guard.check_url(body.url)
    with contextlib.suppress(url_guard.Unresolved):  # the host name may be created later; each delivery resolves it
        await url_guard.resolve(body.url, allow_private=found.settings.webhook_allow_private)
    webhook_id, secret = uuid7(), outbox.new_secret()

    async def work(tx: Tx) -> StoredResponse:
        row = await outbox.add_webhook(
            tx, found.database, who, TargetId(webhook_id), url=body.url, events=body.events, secret=secret
        )
        return StoredResponse(
            201, dump({**webhook_view(row), "secret": secret}), kept=dump({**webhook_view(row), "secret": None})
        )

    return await idempotent_write(found, who, request, work)


@router.get("", response_model=Page[Webhook])
async def list_webhooks(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100) -> Response:
    who.require(Permission.ADMINISTER)
    rows = await found.database.fetch(
        "list_destinations", who.tenant_id, "webhook", who.workspace_id, uuid_cursor(cursor), limit + 1
    )
    return Json(page(rows, limit, webhook_view))


@router.get("/{webhook_id}", response_model=Webhook)
async def show(webhook_id: TargetId, found: Ctx, who: Caller) -> Response:
    who.require(Permission.ADMINISTER)
    return Json(webhook_view(await outbox.webhook(found.database, who, webhook_id)))


@router.delete("/{webhook_id}", response_model=Webhook)
async def remove(webhook_id: TargetId, request: Request, found: Ctx, who: Caller) -> Response:
    """Delete a webhook. Messages that still wait are not sent."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(webhook_view(await outbox.remove_webhook(tx, who, webhook_id))))

    return await idempotent_write(found, who, request, work)


@router.post("/{webhook_id}/enable", response_model=Webhook)
async def enable(
    webhook_id: TargetId, request: Request, found: Ctx, who: Caller, body: EmptyBody | None = None
) -> Response:
    """Enable a webhook again that was disabled because its deliveries kept failing."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(webhook_view(await outbox.enable_webhook(tx, who, webhook_id))))

    return await idempotent_write(found, who, request, work)


@router.post("/{webhook_id}/test", status_code=202, response_model=Delivery)
async def send_test(
    webhook_id: TargetId, request: Request, found: Ctx, who: Caller, body: EmptyBody | None = None
) -> Response:
    """Send a signed message of type `webhook.test` now. The list of deliveries shows the result."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> StoredResponse:
        row = await outbox.test_webhook(tx, who, webhook_id)
        return StoredResponse(202, dump(_without_number(delivery_view(row))))

    return await idempotent_write(found, who, request, work)


@router.get("/{webhook_id}/deliveries", response_model=Page[Delivery])
async def deliveries(
    webhook_id: TargetId, found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100
) -> Response:
    """List what was sent to a webhook in the last 30 days, and what waits, newest first."""
    who.require(Permission.ADMINISTER)
    await outbox.webhook(found.database, who, webhook_id)
    rows = await found.database.fetch("list_messages", webhook_id, position_cursor(cursor), limit + 1)
    return Json(page([delivery_view(row) for row in rows], limit, _without_number, key="number"))


def webhook_view(row: Row) -> dict[str, Any]:
    columns = ("id", "events", "workspace_id", "created_at", "failing_since", "last_error", "disabled_at")
    return {"url": row["address"], **{column: row[column] for column in columns}}


def delivery_view(row: Row) -> dict[str, Any]:
    columns = ("event", "subject_id", "attempts", "response_status", "last_error", "created_at", "done_at")
    done = row["done_at"] is not None
    return {column: row[column] for column in columns} | {
        "number": row["id"],
        "id": outbox.webhook_id(row["message_id"]),
        "status": "failed" if row["failed"] else "delivered" if done else "pending",
        "next_try_at": None if done else row["due_at"],
    }


def _without_number(view: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in view.items() if name != "number"}
