"""`interlock event`: publish external events for runs."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Json, Limit
from interlock.cli.parsing import parse_json, visible

if TYPE_CHECKING:
    from interlock.wire import ReceivedEvent

app = typer.Typer(
    no_args_is_help=True,
    help="Tell runs what happened outside, and see what was told.",
    epilog=example("interlock event send bank.settled ch_1042"),
)


EVENTS: "formatting.Columns[ReceivedEvent]" = {
    "id": lambda event: visible(event.id),
    "type": lambda event: visible(event.type),
    "about": lambda event: visible(event.correlation),
    "received": lambda event: formatting.moment(event.received_at),
    "by": lambda event: visible(event.sent_by),
    "run": lambda event: event.run_id or Text("waits for a step", style="yellow"),
    "step": lambda event: visible(event.step_key or ""),
    "expires": lambda event: formatting.moment(event.expires_at),
}


@app.command(
    epilog=example(
        "interlock event send bank.settled ch_1042 --payload '{\"amount\": 120}'",
        "interlock event send bank.settled ch_1042 --payload @settled.json --id evt_77",
    )
)
def send(
    ctx: typer.Context,
    type: Annotated[str, typer.Argument(help="The type that a step waits for.")],
    correlation: Annotated[str, typer.Argument(help="What it is about, as the step says it.")],
    payload: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="What the waiting step gets as its output.")
    ] = None,
    event_id: Annotated[str | None, typer.Option("--id", help="The same id again is the same event.")] = None,
    as_json: Json = False,
) -> None:
    """Send an event to the step that waits for it, or keep it for one that will."""
    given = parse_json(payload, "--payload") if payload is not None else None
    with connect(ctx) as client:
        sent = client.send_event(type, correlation, given, id=event_id)
    kept = f"kept until {formatting.moment(sent.expires_at)}: no step waits for it yet"
    found = visible(f"matched step {sent.step_key} of run {sent.run_id}")
    formatting.print_view(sent, lambda: found if sent.matched else kept, as_json=as_json)


@app.command("list", epilog=example("interlock event list --waiting", "interlock event list --type bank.settled"))
def list_events(
    ctx: typer.Context,
    type: Annotated[str | None, typer.Option(help="Only events of this type.")] = None,
    correlation: Annotated[str | None, typer.Option(help="Only events about this.")] = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that no step has waited for yet.")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List the events that were sent, newest first, until they expire."""
    with connect(ctx) as client:
        page = client.outside_events(
            type=type, correlation=correlation, matched=False if waiting else None, limit=limit, cursor=cursor
        )
    formatting.print_page(page, EVENTS, as_json=as_json)
