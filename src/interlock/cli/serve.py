"""The commands that are Interlock itself: up, supervise, demo, flows, db."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from interlock.cli import show
from interlock.cli.environment import read_settings, tools_here
from interlock.cli.options import Json
from interlock.cli.outcome import example
from interlock.cli.text import one_line, visible

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


FLOWS: "show.Columns[Flow]" = {
    "flow": lambda flow: visible(flow.name),
    "version": lambda flow: visible(flow.version),
    "new runs": lambda flow: "no, retired" if flow.retired else "yes",
    "description": lambda flow: one_line(flow.description),
}


def serving(concurrency: int | None, label: list[str] | None, tenant: list[str] | None) -> "Serving":
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
    from interlock.settings import share_metrics

    share_metrics(settings.data_dir)
    from interlock import main

    return main.up(settings, workers=workers, concurrency=concurrency)


def supervise(
    workers: Annotated[int, typer.Option(min=0, help="Worker processes to keep alive; 0: only those asked for.")] = 1,
    concurrency: Concurrency = None,
    label: Labels = None,
    tenant: Tenants = None,
) -> int:
    """Keep worker processes alive on this machine, and start those that others ask for."""
    settings = read_settings()
    from interlock import main

    return main.supervise(settings, workers, serving(concurrency, label, tenant))


def demo(
    yes: Annotated[bool, typer.Option("--yes", help="Answer its question by itself.")] = False,
) -> int:
    """A refund that stops for a person, from nothing to done."""
    settings = read_settings()
    from interlock import main

    return main.demo(settings, yes=yes, console=show.console())


def flows(as_json: Json = False) -> None:
    """List the Python flows that INTERLOCK_TOOLS names, with their versions, as a worker here would load them."""
    from interlock.wire import Flow, Page

    found = [
        Flow(name=flow.name, version=flow.version, description=flow.description, retired=flow.is_retired)
        for flow in tools_here().flows.all()
    ]
    if found or as_json:
        show.print_page(Page[Flow](items=found), FLOWS, as_json=as_json)
    else:
        show.console().print("none; name files of yours in INTERLOCK_TOOLS")


@db.command(epilog=example("interlock db migrate"))
def migrate(as_json: Json = False) -> None:
    """Bring the schema up to date. Safe to run again, and from several machines at once."""
    settings = read_settings()
    from interlock import main

    applied = main.migrate(settings)
    if as_json:
        show.print_json({"applied": applied})
    else:
        show.console().print("\n".join(f"applied {name}" for name in applied) or "up to date")


@db.command(epilog=example("interlock db status --json"))
def status(as_json: Json = False) -> None:
    """Show which database is used, its version, size and migrations."""
    settings = read_settings()
    from interlock import main

    found = main.database_status(settings)
    if as_json:
        show.print_json(found)
    else:
        show.console().print(_status_page(found))


def _status_page(found: dict[str, Any]) -> RenderableType:
    return show.facts(
        database=f"{found['url']} ({'embedded' if found['embedded'] else 'external'})",
        postgresql=str(found["server_version"]),
        size=f"{found['size_bytes'] / 1_000_000:.1f} MB",
        runs=str(found["runs"]),
        applied=", ".join(found["applied"]) or "nothing",
        pending=", ".join(found["pending"]) or "nothing",
    )
