"""The command line: `interlock --help`.

Commands import what they need when they run, so that asking for help or a list does not load the engine.
"""

import signal
from typing import Annotated

import typer

from interlock.cli import (
    admin,
    agents,
    approvals,
    audit,
    chat,
    events,
    evidence,
    grants,
    jobs,
    policies,
    receipts,
    runs,
    schedules,
    secrets,
    serve,
    slack,
    tools,
    triggers,
    webhooks,
    workers,
    workflows,
)
from interlock.cli.connection import Flags
from interlock.cli.environment import refuse_unknown_variables
from interlock.cli.exit_codes import OneLine, example

app = typer.Typer(
    name="interlock",
    cls=OneLine,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Durable automations and agents that ask before they act.",
    epilog=example("interlock up", "interlock run start refund --param amount=120 --watch"),
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from interlock import __version__

    typer.echo(f"interlock {__version__}")
    raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    url: Annotated[str | None, typer.Option(envvar="INTERLOCK_URL", help="Where the server is.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="INTERLOCK_API_KEY", show_envvar=True, help="The API key to use.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    refuse_unknown_variables()
    ctx.obj = Flags(url, key)


serve.register(app)
app.add_typer(workflows.app, name="workflow")
app.add_typer(runs.app, name="run")
app.add_typer(jobs.app, name="job")
app.add_typer(workers.app, name="worker")
app.add_typer(agents.app, name="agent")
app.add_typer(tools.app, name="tools")
chat.register(app)
app.command("mcp", epilog=example("interlock mcp", "interlock --key KEY --url https://interlock.example mcp"))(
    tools.serve_mcp
)
app.add_typer(events.app, name="event")
app.add_typer(approvals.app, name="approval")
app.add_typer(triggers.app, name="trigger")
app.add_typer(schedules.app, name="schedule")
app.add_typer(policies.app, name="policy")
app.add_typer(receipts.app, name="receipt")
app.add_typer(grants.app, name="grant")
app.add_typer(audit.app, name="audit")
app.add_typer(evidence.app, name="evidence")
app.add_typer(secrets.app, name="secret")
app.add_typer(webhooks.app, name="webhook")
app.add_typer(slack.app, name="slack")
admin.register(app)
app.add_typer(admin.keys, name="key")
app.add_typer(admin.tenants, name="tenant")


def main() -> None:
    signal.signal(signal.SIGTERM, _end)
    app(prog_name="interlock")


def _end(number: int, _: object) -> None:
    """Exit as after Ctrl-C, so that cleanup runs; an embedded server stops with its last user."""
    raise SystemExit(128 + number)
