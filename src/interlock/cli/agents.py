"""`interlock agent`: check agents, publish them, look at what is published."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.faults import fail_on, print_faults, refuse_faults_in
from interlock.cli.outcome import example
from interlock.cli.text import read_text, visible

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import Agent

app = typer.Typer(
    no_args_is_help=True,
    help="Check agents, publish them, look at what is published. `interlock chat` talks to them.",
    epilog=example("interlock agent validate support.yaml", "interlock agent apply support.yaml"),
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="YAML files; - reads what is piped in.")]


@app.command(epilog=example("interlock agent apply agents/*.yaml"))
def apply(ctx: typer.Context, files: Files, as_json: Json = False) -> None:
    """Publish agents. The same content again stays the same version."""
    from interlock.wire import Agent, Page

    with connect(ctx) as client:
        published = [_publish(client, name) for name in files]
    show.print_page(Page[Agent](items=published), show.AGENTS, as_json=as_json)


@app.command(epilog=example("interlock agent validate support.yaml"))
def validate(files: Files, as_json: Json = False) -> None:
    """Check agents without a server; every mistake is a line file:line: path: message."""
    faults: list[dict[str, Any]] = []
    for name in files:
        faults += _check(name, quiet=as_json)
    if as_json:
        show.print_json({"ok": not faults, "faults": faults})
    else:
        print_faults(faults)
    fail_on(faults)


@app.command("list", epilog=example("interlock agent list"))
def list_agents(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the last list ended.")] = None,
    as_json: Json = False,
) -> None:
    """List published agents with their newest version."""
    with connect(ctx) as client:
        page = client.agents(limit=limit, cursor=cursor)
    show.print_page(page, show.AGENTS, as_json=as_json)


@app.command("show", epilog=example("interlock agent show support --version 2"))
def show_agent(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The agent's name.")],
    version: Annotated[int | None, typer.Option(min=1, help="Another version than the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Show a published agent and its source."""
    with connect(ctx) as client:
        agent = client.agent(name, version)
    show.print_view(agent, lambda: _page(agent), as_json=as_json)


@app.command("sessions", epilog=example("interlock agent sessions"))
def list_sessions(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Where the last list ended.")] = None,
    as_json: Json = False,
) -> None:
    """List conversations, newest first; `interlock chat --session` takes one up again."""
    with connect(ctx) as client:
        page = client.sessions(limit=limit, cursor=cursor)
    show.print_page(page, show.SESSIONS, as_json=as_json)


def _publish(client: "Client", name: str) -> "Agent":
    from interlock.client import ApiError

    try:
        return client.apply_agent(read_text(name))
    except ApiError as error:
        refuse_faults_in(error, name)
        raise


def _check(name: str, *, quiet: bool) -> list[dict[str, Any]]:
    from interlock.definition import parse_agent
    from interlock.errors import DefinitionInvalid

    try:
        plan = parse_agent(read_text(name), file=name)
    except DefinitionInvalid as invalid:
        return [fault.as_dict() for fault in invalid.faults]
    if not quiet:
        assert plan.agent is not None
        tools = ", ".join(plan.agent.tools) or "no tools"
        show.console().print(visible(f"{name}: {plan.name} is valid: {plan.agent.model} with {tools}"))
    return []


def _page(agent: "Agent") -> RenderableType:
    import yaml

    head = show.facts(
        agent=visible(agent.name),
        version=str(agent.version),
        model=visible(agent.model),
        digest=visible(agent.digest),
        created=show.moment(agent.created_at),
    )
    return Group(head, "", visible(yaml.safe_dump(agent.source, sort_keys=False, allow_unicode=True).rstrip()))
