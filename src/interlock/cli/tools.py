"""`interlock tools`: what can be called, those of MCP servers too. `interlock mcp`: ours, for other agents."""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.environment import read_settings, tools_here
from interlock.cli.offers import changes_of, changes_text
from interlock.cli.options import Json
from interlock.cli.outcome import example
from interlock.cli.text import one_line, visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.tools.mcp import Server
    from interlock.wire import Tool

app = typer.Typer(
    invoke_without_command=True,
    epilog=example(
        "INTERLOCK_TOOLS=shop.py interlock tools", "interlock tools add-mcp files -- npx -y @acme/files-mcp /srv/files"
    ),
)

Name = Annotated[str, typer.Argument(help="What the server is called here; its tools are NAME.tool.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Believe what the server says about its tools, that they only read, say.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Accept what changed without being asked.")]
_RESTART = "Restart `interlock up` and the workers to use them."


TOOLS: "show.Columns[Tool]" = {
    "name": lambda tool: visible(tool.name),
    "effect": lambda tool: "writes" if tool.writes else "reads",
    "risk": lambda tool: tool.risk,
    "idempotent": lambda tool: "yes" if tool.idempotent else "no",
    "description": lambda tool: one_line(tool.description),
}


@app.callback()
def list_tools(ctx: typer.Context, as_json: Json = False) -> None:
    """List the tools that a worker here would load: of INTERLOCK_TOOLS, and of the MCP servers that were added."""
    if ctx.invoked_subcommand is not None:
        return
    from interlock.wire import Page, Tool

    found = [Tool.model_validate(tool, from_attributes=True) for tool in tools_here().all()]
    if found or as_json:
        show.print_page(Page[Tool](items=found), TOOLS, as_json=as_json)
    else:
        show.console().print("none; name files of yours in INTERLOCK_TOOLS, or add a server with tools add-mcp")


@app.command(
    "add-mcp",
    epilog=example(
        "interlock tools add-mcp files -- npx -y @acme/files-mcp /srv/files",
        "interlock tools add-mcp tickets --url https://tickets.example/mcp --token-env TICKETS_TOKEN --trust",
    ),
)
def add_mcp(
    name: Name,
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="What starts it.")] = None,
    url: Annotated[str | None, typer.Option(help="Where it is, if it speaks streamable HTTP.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="VARIABLE", help="A variable that the command is given; repeatable.")
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The variable with the token that the address asks for.")
    ] = None,
    trust: Trust = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="How long a call may take.")] = 300,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make the tools of an MCP server tools here. What it offers now is what is accepted.

    A name that is taken is replaced; if its tools differ from those that were accepted, you are asked.
    """
    from interlock.tools.mcp import Server, check_server_name

    check_server_name(name)
    if bool(command) == bool(url):
        raise typer.BadParameter("give an address, or a command after --", param_hint="--url / COMMAND")
    if env and url:
        raise typer.BadParameter("an address is given no variables; its token is --token-env", param_hint="--env")
    if token_env and not url:
        raise typer.BadParameter("only an address has a token; a command gets it with --env", param_hint="--token-env")
    server = Server(
        name, tuple(command or ()), url, tuple(env or ()), trust, token_env=token_env, timeout_seconds=timeout
    )
    _accept(server, yes=yes, as_json=as_json)


@app.command(
    "accept-mcp", epilog=example("interlock tools accept-mcp files", "interlock tools accept-mcp files --yes --json")
)
def accept_mcp(name: Name, yes: Yes = False, as_json: Json = False) -> None:
    """See what changed in what a server offers, and accept it or not. Without a terminal it needs --yes."""
    _accept(_known(name), yes=yes, as_json=as_json)


@app.command("remove-mcp", epilog=example("interlock tools remove-mcp files"))
def remove_mcp(name: Name) -> None:
    """Forget an MCP server and its tools."""
    from interlock.settings import mcp_file
    from interlock.tools.mcp import read_servers, write_servers

    _known(name)
    path = mcp_file(read_settings())
    write_servers(path, {other: server for other, server in read_servers(path).items() if other != name})
    show.console().print(visible(f"{name} is forgotten. {_RESTART}"))


def serve_mcp(ctx: typer.Context) -> None:
    """Be an MCP server on stdin and stdout: other agents get the tools here, through the gate. Nothing approves."""
    from interlock import __version__
    from interlock.client import AsyncClient
    from interlock.client.mcp import serve

    with connect(ctx) as found:
        url, key = found.url, found.key
    asyncio.run(serve(AsyncClient(url, key), __version__))


def _known(name: str) -> "Server":
    from interlock.settings import mcp_file
    from interlock.tools.mcp import read_servers

    servers = read_servers(mcp_file(read_settings()))
    if name not in servers:
        known = ", ".join(sorted(servers)) or "none"
        raise typer.BadParameter(f"no MCP server {name!r}; there are: {known}", param_hint="NAME")
    return servers[name]


def _accept(server: "Server", *, yes: bool, as_json: bool) -> None:
    from interlock.settings import mcp_file
    from interlock.tools.mcp import offered, read_servers, tool_name, write_servers

    tools = asyncio.run(offered(server))
    path = mcp_file(read_settings())
    known = read_servers(path).get(server.name)
    before = known.tools if known else {}
    lines = [_line(server, tool, about, before.get(tool)) for tool, about in tools.items()]
    gone = [tool_name(server.name, tool) for tool in before if tool not in tools]
    is_asked = known is not None and bool(gone or any(line["news"] for line in lines))
    accepted = yes or not is_asked
    if as_json:
        show.print_json({"tools": lines, "gone": gone, "accepted": accepted})
    else:
        _print_offer(lines, gone, in_full=is_asked)
        accepted = accepted or (_can_ask() and typer.confirm("Accept?", default=None))
    if not accepted:
        raise typer.TyperException(_not_accepted(server.name, as_json=as_json))
    # What was shown is what is kept, whatever the server says by now; other servers are as they are by now.
    write_servers(path, read_servers(path) | {server.name: replace(server, tools=tools)})
    if not as_json:
        show.console().print(visible(f"{len(tools)} tools of {server.name} are accepted. {_RESTART}"))


def _can_ask() -> bool:
    """Whether somebody sees what is shown and can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _not_accepted(name: str, *, as_json: bool) -> str:
    if _can_ask() and not as_json:
        return f"nothing is accepted; what changed in {name} stays unused"
    return "nothing is accepted: nobody can be asked without a terminal or with --json; look at it, then give --yes"


def _line(
    server: "Server", tool: str, about: "Mapping[str, Any]", accepted: "Mapping[str, Any] | None"
) -> dict[str, Any]:
    from interlock.tools.mcp import judged, tool_name

    writes, risk, _ = judged(about["hints"], trusted=server.trusted)
    changes = changes_of(accepted, about)
    return {
        "name": tool_name(server.name, tool), "effect": "writes" if writes else "reads", "risk": str(risk),
        "news": "new" if accepted is None else "changed" if changes else "", "description": about["description"],
        "changes": changes,
    }  # fmt: skip


def _print_offer(lines: list[dict[str, Any]], gone: list[str], *, in_full: bool) -> None:
    """A server that was known before: what changed, whole. One that is new: what it has, at a glance."""
    out = show.console()
    columns = ("name", "effect", "risk", "news", "description")
    out.print(show.table(lines, {key: partial(_field, key) for key in columns} if lines else {}))
    for line in lines if in_full else ():
        if line["news"]:
            out.print(changes_text(line["name"], line["news"], line["changes"]))
    for name in gone:
        out.print(visible(f"{name} is gone"), style="yellow")


def _field(name: str, line: dict[str, Any]) -> str:
    return one_line(line[name])
