"""`interlock tools`: what can be called, those of MCP servers too. `interlock mcp`: ours, for other agents."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.environment import read_settings, tools_here
from interlock.cli.options import Json
from interlock.cli.outcome import example
from interlock.cli.text import one_line, visible

if TYPE_CHECKING:
    from interlock.tools.mcp import Server

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
_RESTART = "Restart `interlock up` and the workers to use them."


@app.callback()
def list_tools(ctx: typer.Context, as_json: Json = False) -> None:
    """List the tools that a worker here would load: of INTERLOCK_TOOLS, and of the MCP servers that were added."""
    if ctx.invoked_subcommand is not None:
        return
    from interlock.wire import Page, Tool

    found = [Tool.model_validate(tool, from_attributes=True) for tool in tools_here().all()]
    show.print_page(Page[Tool](items=found), show.TOOLS, as_json=as_json)


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
    as_json: Json = False,
) -> None:
    """Make the tools of an MCP server tools here. What it offers now is what is accepted."""
    from interlock.tools.mcp import Server, check_server_name

    check_server_name(name)
    if bool(command) == bool(url):
        raise typer.BadParameter("give an address, or a command after --", param_hint="--url / COMMAND")
    if env and url:
        raise typer.BadParameter("an address is given no variables; its token is --token-env", param_hint="--env")
    if token_env and not url:
        raise typer.BadParameter("only an address has a token; a command gets it with --env", param_hint="--token-env")
    server = Server(name, tuple(command or ()), url, tuple(env or ()), trust, token_env=token_env)
    _accept(server, as_json=as_json)


@app.command("accept-mcp", epilog=example("interlock tools accept-mcp files"))
def accept_mcp(name: Name, as_json: Json = False) -> None:
    """Look at what a server offers now, see what changed, and accept it."""
    _accept(_known(name), as_json=as_json)


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
    from interlock.client import AsyncClient
    from interlock.client.mcp import serve

    with connect(ctx) as found:
        url, key = found.url, found.key
    asyncio.run(serve(AsyncClient(url, key)))


def _known(name: str) -> "Server":
    from interlock.settings import mcp_file
    from interlock.tools.mcp import read_servers

    servers = read_servers(mcp_file(read_settings()))
    if name not in servers:
        known = ", ".join(sorted(servers)) or "none"
        raise typer.BadParameter(f"no MCP server {name!r}; there are: {known}", param_hint="NAME")
    return servers[name]


def _accept(server: "Server", *, as_json: bool) -> None:
    from interlock.settings import mcp_file
    from interlock.tools.mcp import judged, offered, read_servers, tool_name, write_servers

    tools = asyncio.run(offered(server))
    path = mcp_file(read_settings())
    servers = read_servers(path)
    before = servers[server.name].tools if server.name in servers else {}
    write_servers(path, servers | {server.name: replace(server, tools=tools)})
    lines = []
    for tool, about in tools.items():
        writes, risk, _ = judged(about["hints"], trusted=server.trusted)
        known = before.get(tool)
        news = "new" if known is None else "" if known["digest"] == about["digest"] else "changed"
        lines.append(
            {
                "name": tool_name(server.name, tool), "effect": "writes" if writes else "reads", "risk": str(risk),
                "news": news, "description": about["description"],
            }
        )  # fmt: skip
    gone = [tool_name(server.name, tool) for tool in before if tool not in tools]
    if as_json:
        show.print_json({"tools": lines, "gone": gone})
        return
    out = show.console()
    out.print(show.table(lines, {key: partial(_field, key) for key in lines[0]} if lines else {}))
    for name in gone:
        out.print(visible(f"{name} is gone"), style="yellow")
    out.print(visible(f"{len(tools)} tools of {server.name} are accepted. {_RESTART}"))


def _field(name: str, line: dict[str, str]) -> str:
    return one_line(line[name])
