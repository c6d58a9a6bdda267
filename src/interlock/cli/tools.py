"""`interlock tools`: the available tools, including those of MCP servers.

`interlock mcp`: serve our tools to agents.
"""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.environment import read_settings, tools_here
from interlock.cli.exit_codes import example
from interlock.cli.mcp_diff import changes_of, changes_text
from interlock.cli.options import Json
from interlock.cli.parsing import one_line, visible

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


TOOLS: "formatting.Columns[Tool]" = {
    "name": lambda tool: visible(tool.name),
    "effect": lambda tool: "writes" if tool.writes else "reads",
    "risk": lambda tool: tool.risk,
    "idempotent": lambda tool: "yes" if tool.idempotent else "no",
    "description": lambda tool: one_line(tool.description),
}


@app.callback()
def list_tools(ctx: typer.Context, as_json: Json = False) -> None:
    """List the tools that a worker here would load: those of INTERLOCK_TOOLS and of the added MCP servers."""
    if ctx.invoked_subcommand is not None:
        return
    from interlock.wire import Page, Tool

    found = [Tool.model_validate(tool, from_attributes=True) for tool in tools_here().all()]
    if found or as_json:
        formatting.print_page(Page[Tool](items=found), TOOLS, as_json=as_json)
    else:
        formatting.console().print("none; name files of yours in INTERLOCK_TOOLS, or add a server with tools add-mcp")


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
    connect_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, help="How long the server may take to start and to list its tools."),
    ] = 30,
    on_error: Annotated[
        Literal["failed", "in_doubt"],
        typer.Option(
            metavar="failed|in_doubt",
            help="What an error of the server means for a write: not done, or a person has to find out.",
        ),
    ] = "in_doubt",
    tenant: Annotated[
        list[str] | None, typer.Option(help="A tenant that has the tools, instead of `default`; repeatable.")
    ] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Every tenant has the tools.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Add an MCP server and accept the tools that it offers now.

    The server acts with the rights of this installation, so only tenant `default` has its tools by default.

    An existing server of the same name is replaced. If its tools differ from the accepted ones, the command asks.
    """
    from interlock.tools.mcp import DEFAULT_TENANT, OnError, Server, check_server_name

    check_server_name(name)
    if all_tenants and tenant:
        raise typer.BadParameter("name tenants, or say --all-tenants", param_hint="--tenant")
    if bool(command) == bool(url):
        raise typer.BadParameter("give an address, or a command after --", param_hint="--url / COMMAND")
    if env and url:
        raise typer.BadParameter("an address is given no variables; its token is --token-env", param_hint="--env")
    if token_env and not url:
        raise typer.BadParameter("only an address has a token; a command gets it with --env", param_hint="--token-env")
    server = Server(
        name, tuple(command or ()), url, tuple(env or ()), trust, token_env=token_env, timeout_seconds=timeout,
        connect_seconds=connect_timeout, on_error=OnError(on_error),
        tenants=() if all_tenants else tuple(tenant or (DEFAULT_TENANT,)),
    )  # fmt: skip
    _accept(server, yes=yes, as_json=as_json)


@app.command(
    "accept-mcp", epilog=example("interlock tools accept-mcp files", "interlock tools accept-mcp files --yes --json")
)
def accept_mcp(name: Name, yes: Yes = False, as_json: Json = False) -> None:
    """Show what changed in a server's tools, and ask whether to accept it. Without a terminal it needs --yes."""
    _accept(_known(name), yes=yes, as_json=as_json)


@app.command("remove-mcp", epilog=example("interlock tools remove-mcp files"))
def remove_mcp(name: Name) -> None:
    """Remove an MCP server and its tools."""
    from interlock.settings import mcp_file
    from interlock.tools.mcp import read_servers, write_servers

    _known(name)
    path = mcp_file(read_settings())
    write_servers(path, {other: server for other, server in read_servers(path).items() if other != name})
    formatting.console().print(visible(f"{name} is forgotten. {_RESTART}"))


def serve_mcp(ctx: typer.Context) -> None:
    """Serve MCP on stdin and stdout: other agents call the tools here through the gate.

    No tool can approve anything.
    """
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
        formatting.print_json({"tools": lines, "gone": gone, "accepted": accepted})
    else:
        _print_offer(lines, gone, in_full=is_asked)
        accepted = accepted or (_can_ask() and typer.confirm("Accept?", default=None))
    if not accepted:
        raise typer.TyperException(_not_accepted(server.name, as_json=as_json))
    # Store exactly what was shown, even if this server has changed since; other servers keep their current entry in the
    # file.
    write_servers(path, read_servers(path) | {server.name: replace(server, tools=tools)})
    if not as_json:
        formatting.console().print(visible(f"{len(tools)} tools of {server.name} are accepted. {_RESTART}"))


def _can_ask() -> bool:
    """Return whether a person at a terminal sees the output and can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _not_accepted(name: str, *, as_json: bool) -> str:
    if _can_ask() and not as_json:
        return f"Nothing was accepted. The changed tools of {name} stay unused."
    return "Nothing was accepted. Without a terminal or with --json, read the changes and give --yes."


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
    """Print what a server offers: for a known server all changes, for a new one an overview."""
    out = formatting.console()
    columns = ("name", "effect", "risk", "news", "description")
    out.print(formatting.table(lines, {key: partial(_field, key) for key in columns} if lines else {}))
    for line in lines if in_full else ():
        if line["news"]:
            out.print(changes_text(line["name"], line["news"], line["changes"]))
    for name in gone:
        out.print(visible(f"{name} is gone"), style="yellow")


def _field(name: str, line: dict[str, Any]) -> str:
    return one_line(line[name])
