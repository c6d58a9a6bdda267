"""The commands that run Interlock itself: up, supervise, demo, flows, db."""

from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from interlock.cli import formatting
from interlock.cli.environment import read_settings, tools_here
from interlock.cli.exit_codes import example
from interlock.cli.options import Json
from interlock.cli.parsing import one_line, visible

if TYPE_CHECKING:
    from interlock.main import Serving
    from interlock.wire import Flow

db = typer.Typer(
    no_args_is_help=True, help="The database: its schema and its state.", epilog=example("interlock db status")
)

Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Runs one worker holds at a time; else INTERLOCK_CONCURRENCY.")
]
Labels = Annotated[
    list[str] | None,
    typer.Option(help="Serve steps that ask for this label; can be repeated. Others are served by `default`."),
]
Tenants = Annotated[list[str] | None, typer.Option(help="Serve this tenant; can be repeated. Else all.")]


FLOWS: "formatting.Columns[Flow]" = {
    "flow": lambda flow: visible(flow.name),
    "version": lambda flow: visible(flow.version),
    "new runs": lambda flow: "no, retired" if flow.retired else "yes",
    "description": lambda flow: one_line(flow.description),
}


MONTHS: "formatting.Columns[dict[str, Any]]" = {
    "month": lambda month: month["name"],
    "state": lambda month: "taken out" if month["detached_at"] else "kept" if month["kept_at"] else "in the journal",
    "taken out": lambda month: formatting.moment(month["detached_at"]),
    "dropped": lambda month: formatting.moment(month["drops_at"]),
}


def serving(concurrency: int | None, label: list[str] | None, tenant: list[str] | None) -> "Serving":
    from interlock.definition.workflow import is_label

    for name in label or ():
        if not is_label(name):  # no step could ask for it
            says = f"expected a label such as gpu, of lower-case letters, digits, `_`, `.` and `-`; found {name!r}"
            raise typer.BadParameter(says, param_hint="--label")
    from interlock.main import Serving

    return Serving(concurrency, tuple(label or ("default",)), tuple(tenant or ()))


def register(app: typer.Typer) -> None:
    app.command(epilog=example("interlock up", "interlock up --workers 4 --port 9000"))(up)
    app.command(
        epilog=example("interlock supervise --workers 8", "interlock supervise --workers 2 --label gpu --tenant acme")
    )(supervise)
    app.command(epilog=example("interlock demo", "interlock demo --yes"))(demo)
    app.command(epilog=example("INTERLOCK_TOOLS=shop.py interlock flows"))(flows)
    app.add_typer(db, name="db")


def up(
    workers: Annotated[int, typer.Option(min=0, help="Worker processes to start; 0 for none.")] = 1,
    concurrency: Concurrency = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; else INTERLOCK_HOST.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Where to listen; else INTERLOCK_PORT.")] = None,
) -> int:
    """Serve the API and start workers, on the embedded database or on INTERLOCK_DATABASE_URL."""
    settings = read_settings(host=host, port=port)
    from interlock.listening import listen
    from interlock.settings import share_metrics

    # First of all: if the port is taken, no directory and no database was created, and no key was printed.
    with closing(listen(settings.host, settings.port)) as listening:
        share_metrics(settings.data_dir)
        from interlock import main

        return main.up(settings, listening, workers=workers, concurrency=concurrency)


def supervise(
    workers: Annotated[int, typer.Option(min=0, help="Worker processes to keep alive; 0: only those asked for.")] = 1,
    concurrency: Concurrency = None,
    label: Labels = None,
    tenant: Tenants = None,
) -> int:
    """Keep worker processes alive on this machine, and start the workers that users create."""
    settings = read_settings()
    from interlock import main

    return main.supervise(settings, workers, serving(concurrency, label, tenant))


def demo(
    yes: Annotated[bool, typer.Option("--yes", help="Answer its question by itself.")] = False,
) -> int:
    """Run a refund that stops for approval, from start to finish."""
    settings = read_settings()
    from interlock import main

    return main.demo(settings, yes=yes, console=formatting.console())


def flows(as_json: Json = False) -> None:
    """List the Python flows that INTERLOCK_TOOLS names, with their versions, as a worker here would load them."""
    from interlock.wire import Flow, Page

    found = [
        Flow(name=flow.name, version=flow.version, description=flow.description, retired=flow.is_retired)
        for flow in tools_here().flows.all()
    ]
    if found or as_json:
        formatting.print_page(Page[Flow](items=found), FLOWS, as_json=as_json)
    else:
        formatting.console().print("none; name files of yours in INTERLOCK_TOOLS")


@db.command(epilog=example("interlock db migrate"))
def migrate(as_json: Json = False) -> None:
    """Bring the schema up to date. Safe to run again, and from several machines at once."""
    settings = read_settings()
    from interlock import main

    applied = main.migrate(settings)
    if as_json:
        formatting.print_json({"applied": applied})
    else:
        formatting.console().print("\n".join(f"applied {name}" for name in applied) or "up to date")


@db.command(epilog=example("interlock db status --json"))
def status(as_json: Json = False) -> None:
    """Show which database is used, its version, size and migrations."""
    settings = read_settings()
    from interlock import main

    found = main.database_status(settings)
    if as_json:
        formatting.print_json(found)
    else:
        formatting.console().print(_status_page(found))


Month = Annotated[str, typer.Argument(metavar="MONTH", help="A month of the journal, like 2026-01.")]


@db.command(epilog=example("interlock db months", "interlock db months --json"))
def months(as_json: Json = False) -> None:
    """List the months of the journal, including those that retention removed and will drop."""
    settings = read_settings()
    from interlock import main

    found = main.journal_months(settings)
    if as_json:
        formatting.print_json({"items": found})
    else:
        formatting.console().print(formatting.table(found, MONTHS))


@db.command(epilog=example("interlock db keep 2026-01"))
def keep(month: Month, as_json: Json = False) -> None:
    """Restore a month to the journal after retention removed it, and keep it."""
    _keep(month, kept=True, as_json=as_json)


@db.command(epilog=example("interlock db release 2026-01"))
def release(month: Month, as_json: Json = False) -> None:
    """Let retention remove a month again that was kept."""
    _keep(month, kept=False, as_json=as_json)


def _keep(month: str, *, kept: bool, as_json: bool) -> None:
    settings = read_settings()
    from interlock import main

    main.keep_month(settings, month, kept=kept)
    if as_json:
        formatting.print_json({"name": month, "kept": kept})
    else:
        formatting.console().print(f"{month} is kept." if kept else f"{month} goes when it is old enough.")


@db.command(epilog=example("interlock db restored", "interlock db restored --yes --json"))
def restored(
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False, as_json: Json = False
) -> None:
    """Begin a new epoch after the database was restored to an earlier moment. Stop all processes first.

    The writes of runs that were open at that moment may already have happened. They are held for people, unless the
    tool is idempotent or can report what happened. Every schedule is paused.
    """
    settings = read_settings()
    from interlock import main

    if not yes:
        _ask_about_restore(main.database_restored_to(settings))
    epoch = main.begin_epoch(settings)
    if as_json:
        formatting.print_json(asdict(epoch))
        return
    formatting.console().print(
        f"Epoch {epoch.number} began. The database was restored to {epoch.restored_to:%Y-%m-%d %H:%M:%S} UTC.\n"
        f"Runs that had not ended: {epoch.runs}. Writes that they may already have done are held for people.\n"
        f"Schedules that are paused now: {', '.join(map(visible, epoch.schedules)) or 'none'}.\n"
        "Start the servers and workers. Resume each schedule with `interlock schedule resume NAME`."
    )


def _ask_about_restore(moment: datetime) -> None:
    typer.echo(
        f"The latest moment that the database knows is {moment:%Y-%m-%d %H:%M:%S} UTC.\n"
        "Every worker that is still running loses its runs, and every schedule is paused.",
        err=True,
    )
    try:
        typer.confirm("Was the database restored, and are all processes stopped?", abort=True, err=True)
    except typer.Abort:
        raise typer.TyperException("Nothing was changed. To do it without a question, give --yes.") from None


def _status_page(found: dict[str, Any]) -> RenderableType:
    return formatting.facts(
        database=f"{found['url']} ({'embedded' if found['embedded'] else 'external'})",
        postgresql=str(found["server_version"]),
        size=f"{found['size_bytes'] / 1_000_000:.1f} MB",
        runs=str(found["runs"]),
        applied=", ".join(found["applied"]) or "nothing",
        pending=", ".join(found["pending"]) or "nothing",
    )
