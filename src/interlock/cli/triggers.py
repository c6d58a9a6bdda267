"""`interlock trigger`: start runs from other systems."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.diagnostics import applied
from interlock.cli.exit_codes import STARTS_NOTHING, example
from interlock.cli.options import Cursor, Files, Json, Limit
from interlock.cli.parsing import parse_json, parse_params, visible

if TYPE_CHECKING:
    from interlock.wire import StoredTrigger, TriggerPreview

app = typer.Typer(
    no_args_is_help=True,
    help="Triggers: GitHub, signed webhooks and Slack commands that start runs.",
    epilog=example("interlock trigger apply deploys.yaml", "interlock trigger test deploys --payload @push.json"),
)

Name = Annotated[str, typer.Argument(help="The trigger's name.")]

TRIGGERS: "formatting.Columns[StoredTrigger]" = {
    "name": lambda trigger: visible(trigger.name),
    "kind": lambda trigger: trigger.kind,
    "workflow": lambda trigger: visible(trigger.workflow),
    "path": lambda trigger: visible(trigger.path),
    "acts as": lambda trigger: visible(trigger.acts_as),
    "updated": lambda trigger: formatting.moment(trigger.updated_at),
}


@app.command(epilog=example("interlock secret set github_deploys --no-tool", "interlock trigger apply triggers/*.yaml"))
def apply(ctx: typer.Context, files: Files, as_json: Json = False) -> None:
    """Create or replace triggers by name. They act with the key that applies them."""
    from interlock.wire import Page, StoredTrigger

    with connect(ctx) as client:
        stored = [applied(name, client.apply_trigger, as_json=as_json) for name in files]
    formatting.print_page(Page[StoredTrigger](items=stored), TRIGGERS, as_json=as_json)


@app.command("list", epilog=example("interlock trigger list"))
def list_triggers(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List triggers, with the URLs for their senders."""
    with connect(ctx) as client:
        page = client.triggers(limit=limit, cursor=cursor)
    formatting.print_page(page, TRIGGERS, as_json=as_json)


@app.command("show", epilog=example("interlock trigger show deploys"))
def show_trigger(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Show a trigger and its source."""
    with connect(ctx) as client:
        trigger = client.trigger(name)
    formatting.print_view(trigger, lambda: _page(trigger), as_json=as_json)


@app.command(epilog=example("interlock trigger delete deploys"))
def delete(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Delete a trigger. Its deliveries are then rejected with 401. Runs that were started continue."""
    with connect(ctx) as client:
        trigger = client.delete_trigger(name)
    formatting.print_view(trigger, lambda: f"deleted {visible(trigger.name)}", as_json=as_json)


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
    event: Annotated[str | None, typer.Option(help="GitHub's event, as push or pull_request.opened.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header of it.")] = None,
    as_json: Json = False,
) -> int:
    """Show what a delivery would start, and with which input. Starts nothing.

    Exits with 0 if it would start a run, 3 if the trigger would ignore it, and 1 if the sender would get an error.
    """
    headers = {key: str(value) for key, value in parse_params(header or (), "--header").items()}
    with connect(ctx) as client:
        tried = client.test_trigger(name, parse_json(payload, "--payload"), event=event, headers=headers)
    formatting.print_view(tried, lambda: _tried(tried), as_json=as_json)
    return {"starts": 0, "ignored": STARTS_NOTHING, "refused": 1}[tried.outcome]


def _tried(tried: "TriggerPreview") -> RenderableType:
    match tried.outcome:
        case "starts":
            return Group(f"Starts {visible(tried.workflow)} with", formatting.block(tried.input or {}))
        case "ignored":
            return visible(f"Starts nothing: {tried.reason}")
        case "refused":
            return visible(f"The sender would get an error: {tried.reason}")


def _page(trigger: "StoredTrigger") -> RenderableType:
    head = formatting.facts(
        trigger=visible(trigger.name),
        kind=trigger.kind,
        workflow=visible(trigger.workflow),
        path=visible(trigger.path),
        acts_as=visible(trigger.acts_as),
        workspace=visible(trigger.workspace_id or ""),
        updated=formatting.moment(trigger.updated_at),
    )
    return formatting.with_source(head, trigger.source)
