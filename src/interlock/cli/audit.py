"""`interlock audit`: the chain that shows whether the journal was changed afterwards."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.environment import read_settings
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Json, Limit

if TYPE_CHECKING:
    from interlock.wire import AuditEntry, AuditVerdict

app = typer.Typer(
    no_args_is_help=True,
    help="Check that nothing was changed, removed or put in afterwards.",
    epilog=example("interlock audit verify"),
)


ENTRIES: "formatting.Columns[AuditEntry]" = {
    "position": lambda entry: str(entry.position),
    "at": lambda entry: formatting.moment(entry.at),
    "run": lambda entry: entry.run_id,
    "seq": lambda entry: str(entry.seq),
    "what": lambda entry: formatting.cell(_what(entry)),
    "by": lambda entry: formatting.cell(formatting.who(entry.data.get("actor") or "")),
}


def _what(entry: "AuditEntry") -> str:
    """Return the entry as `step transition refund → succeeded`, like the console."""
    said = [entry.type.replace("_", " "), entry.data.get("step_key")]
    moved = f"→ {entry.data['to_state']}" if entry.data.get("to_state") else None
    return " ".join(str(part) for part in (*said, moved) if part)


@app.command(epilog=example("interlock audit verify", "interlock audit verify --with kept/evidence-1.json --json"))
def verify(
    ctx: typer.Context,
    kept: Annotated[
        list[Path] | None,
        typer.Option(
            "--with", metavar="FILE", help="Evidence kept elsewhere: the chain must still hold its checkpoints."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the whole chain against the journal. Exits with 1 if they differ, and says where."""
    checkpoints = [checkpoint for file in kept or () for checkpoint in _checkpoints_in(file)]
    with connect(ctx) as client, Console(stderr=True).status("checking the chain …"):
        verdict = client.verify_audit(checkpoints)
    if as_json:
        formatting.print_json(verdict)
        raise typer.Exit(0 if verdict.ok else 1)
    if verdict.broken_at is not None:
        raise typer.TyperException(f"the chain is broken at {verdict.broken_at}")
    formatting.console().print(_counts(verdict))


def _checkpoints_in(file: Path) -> list[dict[str, Any]]:
    from interlock.audit.evidence import open_envelope

    found: list[dict[str, Any]] = open_envelope(file.read_bytes()).statement["predicate"]["checkpoints"]
    return found


def _counts(verdict: "AuditVerdict") -> str:
    young = f"; {verdict.unsealed:,} more are not sealed yet" if verdict.unsealed else ""
    return f"nothing was changed: {verdict.events:,} entries, {verdict.checkpoints:,} checkpoints{young}"


@app.command("list", epilog=example("interlock audit list --after 1200", "interlock audit list --run 01990000-…"))
def list_entries(
    ctx: typer.Context,
    after: Annotated[int, typer.Option(min=0, help="The last position seen.")] = 0,
    run_id: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run's.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List sealed entries with their positions in the chain, oldest first."""
    with connect(ctx) as client:
        page = client.audit(after=after, run_id=run_id, limit=limit, cursor=cursor)
    formatting.print_page(page, ENTRIES, as_json=as_json)


@app.command(epilog=example("interlock audit keys > interlock-keys.pem"))
def keys(ctx: typer.Context, as_json: Json = False) -> None:
    """Print the public keys in PEM, to check evidence with: `interlock evidence verify --key`."""
    with connect(ctx) as client:
        page = client.signing_keys()
    if as_json:
        formatting.print_json(page)
    else:
        formatting.console().print("".join(key.pem for key in page.items), end="")


@app.command("rotate-key", epilog=example("interlock audit rotate-key"))
def rotate_key(as_json: Json = False) -> None:
    """Sign with a new key from now on. Run it on the machine that has the data directory.

    The old public key is kept.
    """
    settings = read_settings()
    from interlock.engine.access.key_store import Signing

    signing = Signing(settings)
    before, new = signing.key(), signing.rotate()
    if as_json:
        formatting.print_json({"key_id": new.key_id, "previous": before.key_id if before else None})
    else:
        instead = f" instead of {before.key_id}, which stays trusted" if before else ""
        formatting.console().print(f"signing with key {new.key_id} from now on{instead}")
