"""`interlock agent`: check agents, publish them, and show published ones."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.diagnostics import applied, check, warn_of_older
from interlock.cli.exit_codes import example
from interlock.cli.options import AllowUnknownTools, Cursor, Files, Json, Limit, Version
from interlock.cli.parsing import visible

if TYPE_CHECKING:
    from interlock.definition import Plan
    from interlock.wire import Agent, Session

app = typer.Typer(
    no_args_is_help=True,
    help="Check agents, publish them, look at what is published. `interlock chat` talks to them.",
    epilog=example("interlock agent validate support.yaml", "interlock agent apply support.yaml"),
)


AGENTS: "formatting.Columns[Agent]" = {
    "name": lambda agent: visible(agent.name),
    "version": lambda agent: str(agent.version),
    "model": lambda agent: visible(agent.model),
    "digest": lambda agent: agent.digest[:19],
    "created": lambda agent: formatting.moment(agent.created_at),
}

SESSIONS: "formatting.Columns[Session]" = {
    "id": lambda session: session.id,
    "agent": lambda session: visible(session.agent),
    "status": lambda session: Text(session.status, style="cyan" if session.status == "busy" else ""),
    "messages": lambda session: str(session.messages),
    "cost": lambda session: f"${session.cost_usd:.4f}" if session.cost_usd else "",
    "by": lambda session: visible(session.created_by),
    "created": lambda session: formatting.moment(session.created_at),
}


@app.command(epilog=example("interlock agent apply agents/*.yaml"))
def apply(
    ctx: typer.Context, files: Files, allow_unknown_tools: AllowUnknownTools = False, as_json: Json = False
) -> None:
    """Publish agents. The same content again stays the same version."""
    from interlock.wire import Agent, Page

    with connect(ctx) as client:
        publish = partial(client.apply_agent, allow_unknown_tools=allow_unknown_tools)
        published = [applied(name, publish, as_json=as_json) for name in files]
        warn_of_older(published, client.agent)
    formatting.print_page(Page[Agent](items=published), AGENTS, as_json=as_json)


@app.command(epilog=example("interlock agent validate support.yaml"))
def validate(files: Files, as_json: Json = False) -> None:
    """Check agents without a server; every mistake is a line file:line: path: message.

    Tools are checked against those that INTERLOCK_TOOLS names.
    """
    from interlock.definition import parse_agent

    check(files, parse_agent, _summary, as_json=as_json)


@app.command("list", epilog=example("interlock agent list"))
def list_agents(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List published agents with their newest version."""
    with connect(ctx) as client:
        page = client.agents(limit=limit, cursor=cursor)
    formatting.print_page(page, AGENTS, as_json=as_json)


@app.command("show", epilog=example("interlock agent show support --version 2"))
def show_agent(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The agent's name.")],
    version: Version = None,
    as_json: Json = False,
) -> None:
    """Show a published agent and its source."""
    with connect(ctx) as client:
        agent = client.agent(name, version)
    formatting.print_view(agent, lambda: _page(agent), as_json=as_json)


@app.command("sessions", epilog=example("interlock agent sessions"))
def list_sessions(ctx: typer.Context, limit: Limit = 20, cursor: Cursor = None, as_json: Json = False) -> None:
    """List conversations, newest first. `interlock chat --session` continues one."""
    with connect(ctx) as client:
        page = client.sessions(limit=limit, cursor=cursor)
    formatting.print_page(page, SESSIONS, as_json=as_json)


def _summary(plan: "Plan") -> str:
    assert plan.agent is not None
    return f"{plan.name} is valid: {plan.agent.model} with {', '.join(plan.agent.tools) or 'no tools'}"


def _page(agent: "Agent") -> RenderableType:
    head = formatting.facts(
        agent=visible(agent.name),
        version=str(agent.version),
        model=visible(agent.model),
        digest=visible(agent.digest),
        created=formatting.moment(agent.created_at),
    )
    return formatting.with_source(head, agent.source)
