"""`interlock secret`: values that tools get and nobody sees."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.environment import read_settings
from interlock.cli.options import Cursor, Json, Limit
from interlock.cli.outcome import example
from interlock.cli.text import visible

if TYPE_CHECKING:
    from interlock.wire import StoredSecret

app = typer.Typer(
    no_args_is_help=True,
    help="Secrets: values that tools get and nobody sees.",
    epilog=example("interlock secret set stripe_key"),
)

Name = Annotated[str, typer.Argument(help="Lower-case letters, digits and underscores.")]


SECRETS: "show.Columns[StoredSecret]" = {
    "name": lambda secret: visible(secret.name),
    "version": lambda secret: str(secret.version),
    "set": lambda secret: show.moment(secret.created_at),
    "by": lambda secret: visible(secret.created_by),
}


@app.command(
    "set",
    epilog=example(
        "interlock secret set stripe_key", "pass show stripe | interlock secret set stripe_key --value-stdin"
    ),
)
def set_secret(
    ctx: typer.Context,
    name: Name,
    value_stdin: Annotated[bool, typer.Option("--value-stdin", help="Read the value from what is piped in.")] = False,
    as_json: Json = False,
) -> None:
    """Set a secret, for ${secrets.NAME} in the input of a tool. Asked for or piped in, and never shown."""
    # Not as an argument: those stand in the shell's history and in the list of processes.
    # Without a terminal nobody can be asked without being overheard, and what is piped in is what is meant.
    is_piped = value_stdin or not sys.stdin.isatty()
    value = _piped() if is_piped else typer.prompt("Value", hide_input=True, err=True)
    with connect(ctx) as client:
        secret = client.set_secret(name, value)
    show.print_view(secret, lambda: f"set {secret.name}, version {secret.version}", as_json=as_json)


def _piped() -> str:
    """Without the line's end that echo and files put behind it."""
    value = sys.stdin.read()
    return value.removesuffix("\n").removesuffix("\r") if value.count("\n") == 1 else value


@app.command("list", epilog=example("interlock secret list"))
def list_secrets(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List the names of the secrets, with their versions."""
    with connect(ctx) as client:
        page = client.secrets(limit=limit, cursor=cursor)
    show.print_page(page, SECRETS, as_json=as_json)


@app.command(epilog=example("interlock secret delete stripe_key"))
def delete(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Forget a secret. Steps that ask for it fail from then on."""
    with connect(ctx) as client:
        secret = client.delete_secret(name)
    show.print_view(secret, lambda: f"deleted {secret.name}", as_json=as_json)


@app.command("rotate-key", epilog=example("interlock secret rotate-key"))
def rotate_key(as_json: Json = False) -> None:
    """Encrypt all secrets with a new key, webhooks' too, on the machine whose data directory has it.

    Running processes take it up by themselves; the old keys are kept. If the key stands in INTERLOCK_SECRETS_KEY, put
    a new one before it everywhere first: then all secrets are encrypted with that one.
    """
    settings = read_settings()
    from interlock import main

    count = main.rotate_secrets_key(settings)
    if as_json:
        show.print_json({"secrets": count})
    else:
        show.console().print(f"{count} secret{'' if count == 1 else 's'} encrypted with the new key")
