"""`interlock schedule`: runs at fixed times."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import RenderableType
from rich.text import Text

from interlock.cli import formatting, run_view
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Json, Limit
from interlock.cli.parsing import parse_input, visible

if TYPE_CHECKING:
    from interlock.wire import Schedule

app = typer.Typer(
    no_args_is_help=True,
    help="Schedules: a run for every slot of a cron expression.",
    epilog=example('interlock schedule create nightly "30 2 * * *" clean-up --timezone Europe/Berlin'),
)

Name = Annotated[str, typer.Argument(help="The schedule's name.")]

SCHEDULES: "formatting.Columns[Schedule]" = {
    "name": lambda schedule: visible(schedule.name),
    "cron": lambda schedule: visible(schedule.cron),
    "timezone": lambda schedule: visible(schedule.timezone),
    "workflow": lambda schedule: visible(schedule.workflow),
    "missed": lambda schedule: schedule.missed,
    "next": lambda schedule: _next(schedule),
    "last": lambda schedule: formatting.moment(schedule.last_slot),
}


def _next(schedule: "Schedule") -> Text:
    if schedule.paused_at is not None:
        return Text("paused", style="yellow")
    return Text(formatting.moment(schedule.next_at))


@app.command(
    epilog=example(
        'interlock schedule create nightly "30 2 * * *" clean-up --timezone Europe/Berlin',
        "interlock schedule create hourly @hourly import --param limit=50 --missed all",
    )
)
def create(
    ctx: typer.Context,
    name: Name,
    cron: Annotated[str, typer.Argument(help="Five fields, or @daily and the like.")],
    workflow: Annotated[str, typer.Argument(help="The workflow's name.")],
    timezone: Annotated[str, typer.Option(help="Whose clocks count, such as Europe/Berlin.")] = "UTC",
    input: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="The input, a JSON object.")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="One field of the input.")] = None,
    missed: Annotated[
        Literal["skip", "last", "all"],
        typer.Option(metavar="skip|last|all", help="What becomes of slots that passed while nothing ran."),
    ] = "last",
    as_json: Json = False,
) -> None:
    """Create a schedule for a workflow. It acts with the key that creates it."""
    values = parse_input(input, param or ())
    with connect(ctx) as client:
        schedule = client.create_schedule(name, cron, workflow, values, timezone=timezone, missed=missed)
    formatting.print_view(schedule, lambda: formatting.table([schedule], SCHEDULES), as_json=as_json)


@app.command("list", epilog=example("interlock schedule list"))
def list_schedules(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List schedules, with their next and last slots."""
    with connect(ctx) as client:
        page = client.schedules(limit=limit, cursor=cursor)
    formatting.print_page(page, SCHEDULES, as_json=as_json)


@app.command("show", epilog=example("interlock schedule show nightly"))
def show_schedule(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Show a schedule."""
    with connect(ctx) as client:
        schedule = client.schedule(name)
    formatting.print_view(schedule, lambda: _page(schedule), as_json=as_json)


@app.command(epilog=example("interlock schedule pause nightly"))
def pause(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Pause a schedule. It starts nothing until it is resumed."""
    with connect(ctx) as client:
        schedule = client.pause_schedule(name)
    formatting.print_view(schedule, lambda: f"paused {visible(schedule.name)}", as_json=as_json)


@app.command(epilog=example("interlock schedule resume nightly"))
def resume(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Resume from now on; slots missed during the pause are skipped.

    If the schedule's key was revoked, yours replaces it.
    """
    with connect(ctx) as client:
        schedule = client.resume_schedule(name)
    said = f"resumed {visible(schedule.name)}, next at {formatting.moment(schedule.next_at)}"
    formatting.print_view(schedule, lambda: said, as_json=as_json)


@app.command(epilog=example("interlock schedule run nightly"))
def run(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Start a run now, in addition to the slots."""
    with connect(ctx) as client:
        started = client.run_schedule(name)
    formatting.print_view(started, lambda: run_view.run_page(started), as_json=as_json)


@app.command(epilog=example("interlock schedule delete nightly"))
def delete(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Delete a schedule. Runs that were started continue."""
    with connect(ctx) as client:
        schedule = client.delete_schedule(name)
    formatting.print_view(schedule, lambda: f"deleted {visible(schedule.name)}", as_json=as_json)


def _page(schedule: "Schedule") -> RenderableType:
    return formatting.facts(
        schedule=visible(schedule.name),
        cron=visible(schedule.cron),
        timezone=visible(schedule.timezone),
        workflow=visible(schedule.workflow),
        input=formatting.cell(schedule.input) if schedule.input else None,
        missed_slots=schedule.missed,
        acts_as=visible(schedule.acts_as),
        next=_next(schedule),
        paused=formatting.moment(schedule.paused_at),
        why=Text(visible(schedule.paused_why), style="red") if schedule.paused_why else None,
        last_slot=formatting.moment(schedule.last_slot),
        last_run=schedule.last_run_id,
    )
