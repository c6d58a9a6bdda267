"""`interlock evidence`: what happened in a run and who allowed it, in a file that can be checked without a server."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.listing import Listing
from interlock.cli.options import Json
from interlock.cli.parsing import visible

if TYPE_CHECKING:
    from interlock.audit.evidence import EvidenceSection, OpenedEnvelope
    from interlock.client import Client

app = typer.Typer(
    no_args_is_help=True,
    help="Get a run's signed evidence, and check it offline.",
    epilog=example(
        "interlock evidence get 01990000-0000-7000-8000-000000000000 -o run.json",
        "interlock evidence verify run.json --key interlock-keys.pem",
    ),
)

File = Annotated[str, typer.Argument(metavar="FILE", help="Evidence as `get` wrote it; - reads what is piped in.")]
Key = Annotated[
    Path | None, typer.Option("--key", metavar="PEM", help="The public keys you trust (`interlock audit keys`).")
]
_PAUSE_SECONDS = 0.5


@app.command(epilog=example("interlock evidence get 01990000-0000-7000-8000-000000000000 -o run.json"))
def get(
    ctx: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it here; else to stdout.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a run that has just ended.")] = 10,
) -> None:
    """Get the evidence of a run that ended, byte for byte as it was stored."""
    with connect(ctx) as client, Console(stderr=True).status("waiting for the evidence …"):
        envelope = _when_made(client, run_id, wait)
    if output is None:
        sys.stdout.buffer.write(envelope)
        sys.stdout.flush()
    else:
        output.write_bytes(envelope)
        formatting.console().print(f"{visible(str(output))}, {len(envelope):,} bytes")


def _when_made(client: "Client", run_id: str, wait: float) -> bytes:
    from interlock.client import ApiError

    deadline = time.monotonic() + wait
    while True:
        try:
            return client.evidence(run_id)
        except ApiError as error:
            if error.code != "EVIDENCE_NOT_READY" or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


@app.command(epilog=example("interlock evidence verify run.json --key interlock-keys.pem"))
def verify(file: File, key: Key = None, as_json: Json = False) -> None:
    """Check that no byte was changed since it was signed. Needs no server and no database."""
    from interlock.audit.evidence import EvidenceInvalid

    try:
        opened = _open(file, key)
    except EvidenceInvalid as fault:
        if not as_json:
            raise
        formatting.print_json({"ok": False, "code": fault.code, "detail": fault.detail})
        raise typer.Exit(1) from None
    run_id = opened.statement["predicate"]["run"]["id"]
    if as_json:
        about = {"run_id": run_id, "key_id": opened.key.key_id, "trust": opened.trust, "sha256": opened.sha256}
        formatting.print_json({"ok": True, **about})
    else:
        formatting.console().print(f"run {visible(run_id)}: {opened}")


@app.command("show", epilog=example("interlock evidence show run.json"))
def show_evidence(file: File, key: Key = None, as_json: Json = False) -> None:
    """Show the content of an evidence file, if no byte was changed."""
    opened = _open(file, key)
    if as_json:
        formatting.print_json(opened.statement)
    else:
        formatting.console().print(_page(opened))


def _open(file: str, key: Path | None) -> "OpenedEnvelope":
    from interlock.audit.evidence import open_envelope
    from interlock.audit.keys import Keyring

    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    return open_envelope(data, Keyring.from_pem(key.read_bytes()) if key is not None else None)


def _page(opened: "OpenedEnvelope") -> RenderableType:
    from interlock.audit.evidence import describe

    parts: list[RenderableType] = [str(opened)]
    for section in describe(opened.statement):
        parts += ["", section.title, _table(section)]
    return Group(*parts)


def _table(section: "EvidenceSection") -> RenderableType:
    rows = [[visible(value) for value in row] for row in section.rows]
    if section.columns:
        return Padding(Listing(section.columns, rows), (0, 0, 0, 2))
    return formatting.block(dict(rows))
