"""`interlock webhook`: webhooks for approvals and ended runs, and their deliveries."""

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Json, Limit
from interlock.cli.parsing import visible
from interlock.wire import WebhookEvent

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import Delivery, Webhook

app = typer.Typer(
    no_args_is_help=True,
    help="Webhooks: who is told of approvals and ended runs.",
    epilog=example("interlock webhook add https://example.com/hook"),
)

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The webhook's id.")]

_ID = "01990000-0000-7000-8000-000000000000"
_STYLES = {"delivered": "green", "pending": "yellow", "failed": "red"}
_LAST = 10
_PAUSE_SECONDS = 0.2

WEBHOOKS: "formatting.Columns[Webhook]" = {
    "id": lambda webhook: webhook.id,
    "url": lambda webhook: visible(webhook.url),
    "events": lambda webhook: visible(", ".join(webhook.events)),
    "state": lambda webhook: _state(webhook),
    "created": lambda webhook: formatting.moment(webhook.created_at),
}

DELIVERIES: "formatting.Columns[Delivery]" = {
    "id": lambda delivery: delivery.id,
    "event": lambda delivery: visible(delivery.event),
    "about": lambda delivery: delivery.subject_id,
    "status": lambda delivery: Text(delivery.status, style=_STYLES[delivery.status]),
    "tries": lambda delivery: str(delivery.attempts),
    "answer": lambda delivery: str(delivery.response_status or ""),
    "at": lambda delivery: formatting.moment(delivery.done_at or delivery.created_at),
    "note": lambda delivery: _note(delivery),
}


def _state(webhook: "Webhook") -> Text:
    if webhook.disabled_at is not None:
        return Text("off", style="red")
    return Text("failing", style="yellow") if webhook.failing_since is not None else Text("on", style="green")


def _note(delivery: "Delivery") -> str:
    if delivery.status == "delivered":
        return ""
    again = f"again at {formatting.moment(delivery.next_try_at)}" if delivery.attempts and delivery.next_try_at else ""
    return "; ".join(filter(None, (formatting.cell(delivery.last_error or ""), again)))


@app.command(
    epilog=example(
        "interlock webhook add https://example.com/hook",
        "interlock webhook add https://example.com/hook --event run.completed",
    )
)
def add(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(help="Where messages are sent: https, at a public address.")],
    event: Annotated[
        list[WebhookEvent] | None,
        typer.Option(
            help="What it is told of; can be repeated. "
            + " ".join(f"{term}: {term.doc}" for term in WebhookEvent)
            + " Without it: approval.requested, approval.resolved and run.completed."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a webhook with signed messages (Standard Webhooks). The secret that verifies them is shown once."""
    with connect(ctx) as client:
        webhook = client.add_webhook(url, event)
    page = formatting.facts(
        id=webhook.id,
        url=visible(webhook.url),
        events=visible(", ".join(webhook.events)),
        secret=webhook.secret,
        note="Keep the secret now: it is not shown again." if webhook.secret else None,
    )
    formatting.print_view(webhook, lambda: page, as_json=as_json)


@app.command("list", epilog=example("interlock webhook list"))
def list_webhooks(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List the webhooks, and whether messages reach them."""
    with connect(ctx) as client:
        page = client.webhooks(limit=limit, cursor=cursor)
    formatting.print_page(page, WEBHOOKS, as_json=as_json)


@app.command("show", epilog=example(f"interlock webhook show {_ID}"))
def show_webhook(ctx: typer.Context, webhook_id: WebhookId, as_json: Json = False) -> None:
    """Show a webhook and its latest messages."""
    with connect(ctx) as client:
        webhook, last = client.webhook(webhook_id), client.deliveries(webhook_id, limit=_LAST)
    if as_json:
        deliveries = [delivery.model_dump(mode="json") for delivery in last.items]
        formatting.print_json({**webhook.model_dump(mode="json"), "deliveries": deliveries})
    else:
        formatting.console().print(_page(webhook, last.items))


def _page(webhook: "Webhook", last: "list[Delivery]") -> RenderableType:
    head = formatting.facts(
        id=webhook.id,
        url=visible(webhook.url),
        events=visible(", ".join(webhook.events)),
        state=_state(webhook),
        workspace=visible(webhook.workspace_id or ""),
        created=formatting.moment(webhook.created_at),
        failing_since=formatting.moment(webhook.failing_since),
        last_error=formatting.cell(webhook.last_error or ""),
        off_since=formatting.moment(webhook.disabled_at),
        note=f"interlock webhook enable {webhook.id} switches it on again" if webhook.disabled_at else None,
    )
    return Group(head, "", formatting.table(last, DELIVERIES)) if last else head


@app.command(epilog=example(f"interlock webhook deliveries {_ID}"))
def deliveries(
    ctx: typer.Context, webhook_id: WebhookId, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False
) -> None:
    """List what was sent to a webhook in the last 30 days, and what waits."""
    with connect(ctx) as client:
        page = client.deliveries(webhook_id, limit=limit, cursor=cursor)
    formatting.print_page(page, DELIVERIES, as_json=as_json)


@app.command("test", epilog=example(f"interlock webhook test {_ID}"))
def send_test(
    ctx: typer.Context,
    webhook_id: WebhookId,
    wait: Annotated[float, typer.Option(min=0, max=300, metavar="SECONDS", help="How long to wait for it.")] = 15,
    as_json: Json = False,
) -> int:
    """Send a test message to a webhook and wait for the result. Exits with 1 if the delivery failed."""
    with connect(ctx) as client:
        delivery = _after_its_first_try(client, webhook_id, client.test_webhook(webhook_id), wait)
    formatting.print_view(delivery, lambda: formatting.table([delivery], DELIVERIES), as_json=as_json)
    return 0 if delivery.status == "delivered" else 1


def _after_its_first_try(client: "Client", webhook_id: str, sent: "Delivery", wait: float) -> "Delivery":
    deadline = time.monotonic() + wait
    while sent.attempts == 0 or (sent.status == "pending" and sent.last_error is None):
        if time.monotonic() > deadline:
            return sent
        time.sleep(_PAUSE_SECONDS)
        # Newest first: other messages may have been added since, but not many in so short a time.
        last = client.deliveries(webhook_id, limit=100).items
        sent = next((delivery for delivery in last if delivery.id == sent.id), sent)
    return sent


@app.command(epilog=example(f"interlock webhook enable {_ID}"))
def enable(ctx: typer.Context, webhook_id: WebhookId, as_json: Json = False) -> None:
    """Enable a webhook again that was disabled because its deliveries kept failing. Missed messages are not sent."""
    with connect(ctx) as client:
        webhook = client.enable_webhook(webhook_id)
    formatting.print_view(webhook, lambda: formatting.table([webhook], WEBHOOKS), as_json=as_json)


@app.command(epilog=example(f"interlock webhook remove {_ID}"))
def remove(ctx: typer.Context, webhook_id: WebhookId, as_json: Json = False) -> None:
    """Remove a webhook. Messages that still wait are not sent."""
    with connect(ctx) as client:
        webhook = client.remove_webhook(webhook_id)
    formatting.print_view(webhook, lambda: f"removed {webhook.id}, {visible(webhook.url)}", as_json=as_json)
