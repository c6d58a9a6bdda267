"""`interlock secret`: values that tools receive and no command shows."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.environment import read_settings
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Json, Limit
from interlock.cli.parsing import visible

if TYPE_CHECKING:
    from interlock.wire import StoredSecret

app = typer.Typer(
    no_args_is_help=True,
    help="Secrets: values that tools get and nobody sees.",
    epilog=example("interlock secret set stripe_key --tool 'shop.*'"),
)

Name = Annotated[str, typer.Argument(help="Lower-case letters, digits and underscores.")]


SECRETS: "formatting.Columns[StoredSecret]" = {
    "name": lambda secret: visible(secret.name),
    "version": lambda secret: str(secret.version),
    "tools": lambda secret: visible(", ".join(secret.tools)) or "none",
    "workspaces": lambda secret: "all" if secret.workspaces is None else visible(", ".join(secret.workspaces)),
    "set": lambda secret: formatting.moment(secret.created_at),
    "by": lambda secret: visible(secret.created_by),
}


@app.command(
    "set",
    epilog=example(
        "interlock secret set stripe_key --tool 'shop.*'",
        "pass show stripe | interlock secret set stripe_key --tool shop.refund --value-stdin",
    ),
)
def set_secret(
    ctx: typer.Context,
    name: Name,
    tool: Annotated[
        list[str] | None,
        typer.Option(help="A tool that may be given the value, or a pattern like 'shop.*'; repeat it."),
    ] = None,
    no_tool: Annotated[bool, typer.Option("--no-tool", help="No tool may: only triggers use it.")] = False,
    workspace: Annotated[
        list[str] | None, typer.Option(help="A workspace that may use it, instead of all of the tenant; repeat it.")
    ] = None,
    value_stdin: Annotated[bool, typer.Option("--value-stdin", help="Read the value from what is piped in.")] = False,
    as_json: Json = False,
) -> None:
    """Set a secret, for ${secrets.NAME} in the input of the tools that you name. Its value is never shown."""
    if bool(tool) == no_tool:
        raise typer.BadParameter(
            "name each tool that may be given the value, or say --no-tool for one that only triggers use",
            param_hint="--tool",
        )
    # Not an argument, because arguments appear in the shell's history and in the process list. Without a terminal, a
    # prompt could not hide the input, so the value is read from stdin.
    is_piped = value_stdin or not sys.stdin.isatty()
    value = _piped() if is_piped else typer.prompt("Value", hide_input=True, err=True)
    with connect(ctx) as client:
        secret = client.set_secret(name, value, tools=tool or [], workspaces=workspace)
    formatting.print_view(secret, lambda: f"set {secret.name}, version {secret.version}", as_json=as_json)


def _piped() -> str:
    """Return stdin without the line ending that echo and files append."""
    value = sys.stdin.read()
    return value.removesuffix("\n").removesuffix("\r") if value.count("\n") == 1 else value


@app.command("list", epilog=example("interlock secret list"))
def list_secrets(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List the names of the secrets, with their versions."""
    with connect(ctx) as client:
        page = client.secrets(limit=limit, cursor=cursor)
    formatting.print_page(page, SECRETS, as_json=as_json)


@app.command(epilog=example("interlock secret delete stripe_key"))
def delete(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Delete a secret. Steps that refer to it fail from then on."""
    with connect(ctx) as client:
        secret = client.delete_secret(name)
    formatting.print_view(secret, lambda: f"deleted {secret.name}", as_json=as_json)


@app.command("rotate-key", epilog=example("interlock secret rotate-key"))
def rotate_key(as_json: Json = False) -> None:
    """Encrypt all secrets, including those of webhooks, with a new key. Run it where the data directory is.

    Running processes load the new key by themselves; the old keys are kept. If INTERLOCK_SECRETS_KEY has the key, put a
    new one before it everywhere first: then all secrets are encrypted with that one.
    """
    settings = read_settings()
    from interlock import main

    count = main.rotate_secrets_key(settings)
    if as_json:
        formatting.print_json({"secrets": count})
    else:
        formatting.console().print(f"{count} secret{'' if count == 1 else 's'} encrypted with the new key")
