"""`interlock trigger`: what starts runs from outside."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.faults import applied
from interlock.cli.options import Cursor, Files, Json, Limit
from interlock.cli.outcome import example
from interlock.cli.text import parse_json, parse_params, visible

if TYPE_CHECKING:
    from interlock.wire import StoredTrigger, Tried

app = typer.Typer(
    no_args_is_help=True,
    help="Triggers: GitHub, signed webhooks and Slack commands that start runs.",
    epilog=example("interlock trigger apply deploys.yaml", "interlock trigger test deploys --payload @push.json"),
)

Name = Annotated[str, typer.Argument(help="The trigger's name.")]

TRIGGERS: "show.Columns[StoredTrigger]" = {
    "name": lambda trigger: visible(trigger.name),
    "kind": lambda trigger: trigger.kind,
    "workflow": lambda trigger: visible(trigger.workflow),
    "path": lambda trigger: visible(trigger.path),
    "acts as": lambda trigger: visible(trigger.acts_as),
    "updated": lambda trigger: show.moment(trigger.updated_at),
}


@app.command(epilog=example("interlock secret set github_deploys", "interlock trigger apply triggers/*.yaml"))
def apply(ctx: typer.Context, files: Files, as_json: Json = False) -> None:
    """Apply triggers. One of the same name is replaced. They act with the key that applies them."""
    from interlock.wire import Page, StoredTrigger

    with connect(ctx) as client:
        stored = [applied(name, client.apply_trigger, as_json=as_json) for name in files]
    show.print_page(Page[StoredTrigger](items=stored), TRIGGERS, as_json=as_json)


@app.command("list", epilog=example("interlock trigger list"))
def list_triggers(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List triggers, with where their senders post to."""
    with connect(ctx) as client:
        page = client.triggers(limit=limit, cursor=cursor)
    show.print_page(page, TRIGGERS, as_json=as_json)


@app.command("show", epilog=example("interlock trigger show deploys"))
def show_trigger(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Show a trigger and its source."""
    with connect(ctx) as client:
        trigger = client.trigger(name)
    show.print_view(trigger, lambda: _page(trigger), as_json=as_json)


@app.command(epilog=example("interlock trigger delete deploys"))
def delete(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Delete a trigger: its deliveries are answered with 404. Runs that were started go on."""
    with connect(ctx) as client:
        trigger = client.delete_trigger(name)
    show.print_view(trigger, lambda: f"deleted {visible(trigger.name)}", as_json=as_json)


@app.command(
    "test",
    epilog=example(
        "interlock trigger test deploys --event push --payload @push.json",
        """interlock trigger test alerts --payload '{"level": 3}' --json""",
    ),
)
def try_trigger(
    ctx: typer.Context,
    name: Name,
    payload: Annotated[str, typer.Option(metavar="JSON|@FILE", help="What the sender would post.")] = "{}",
    event: Annotated[str | None, typer.Option(help="The event, as push or pull_request.opened.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header of it.")] = None,
    as_json: Json = False,
) -> None:
    """Say what an event would start, and with which input. Nothing is started."""
    headers = {key: str(value) for key, value in parse_params(header or (), "--header").items()}
    with connect(ctx) as client:
        tried = client.test_trigger(name, parse_json(payload, "--payload"), event=event, headers=headers)
    show.print_view(tried, lambda: _tried(tried), as_json=as_json)


def _tried(tried: "Tried") -> RenderableType:
    if not tried.starts:
        return visible(f"starts nothing: {tried.reason}")
    return Group(f"starts {visible(tried.workflow)} with", show.block(tried.input or {}))


def _page(trigger: "StoredTrigger") -> RenderableType:
    head = show.facts(
        trigger=visible(trigger.name),
        kind=trigger.kind,
        workflow=visible(trigger.workflow),
        path=visible(trigger.path),
        acts_as=visible(trigger.acts_as),
        workspace=visible(trigger.workspace_id or ""),
        updated=show.moment(trigger.updated_at),
    )
    return show.with_source(head, trigger.source)
