"""`interlock worker`: run a worker, and manage the existing ones."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.environment import read_settings
from interlock.cli.exit_codes import example
from interlock.cli.options import Json
from interlock.cli.parsing import one_line, visible
from interlock.cli.serve import Concurrency, Labels, Tenants, serving
from interlock.ids import WorkerId

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import JobHistoryEvent, WorkerView

app = typer.Typer(
    invoke_without_command=True,
    help="Be a worker, or see to those that are there. Without a command it starts one worker process against the same"
    " database, on this machine or another.",
    epilog=example("interlock worker --concurrency 200", "interlock worker --label gpu", "interlock worker list"),
)

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id.")]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept in its history.")]
RequestId = Annotated[str | None, typer.Option(help="The same id again gives the same answer and changes nothing.")]

_ID = "01990000-0000-7000-8000-000000000000"
_FOLLOW_SECONDS = 0.3


WORKERS: "formatting.Columns[WorkerView]" = {
    "id": lambda worker: worker.id,
    "name": lambda worker: visible(worker.name),
    "status": lambda worker: formatting.word(worker.status),
    "host": lambda worker: visible(worker.host or ""),
    "pid": lambda worker: str(worker.pid or ""),
    "runs": lambda worker: f"{worker.holds}/{worker.capacity}",
    "labels": lambda worker: visible(", ".join(worker.labels)),
    "job": lambda worker: worker.job_id or "",
    "reason": lambda worker: one_line(worker.reason or ""),
}


@app.callback()
def worker(
    ctx: typer.Context,
    concurrency: Concurrency = None,
    label: Labels = None,
    tenant: Tenants = None,
    adopt: Annotated[str | None, typer.Option(hidden=True)] = None,
    after_loss: Annotated[bool, typer.Option("--after-loss", hidden=True)] = False,
    pulse: Annotated[int | None, typer.Option("--pulse", hidden=True)] = None,
) -> None:
    if ctx.invoked_subcommand is not None:
        return
    settings = read_settings()
    from uuid import UUID

    from interlock import main

    serve, place = serving(concurrency, label, tenant), WorkerId(UUID(adopt)) if adopt else None
    main.work(settings, serve, place, after_loss=after_loss, pulse=pulse)


@app.command("list", epilog=example("interlock worker list", "interlock worker list --all --json"))
def list_workers(
    ctx: typer.Context,
    all: Annotated[bool, typer.Option("--all", help="Also those that left long ago.")] = False,
    as_json: Json = False,
) -> None:
    """List the current workers, and those that left within the last hour."""
    with connect(ctx) as client:
        page = client.workers(all=all)
    formatting.print_page(page, WORKERS, as_json=as_json)


@app.command("show", epilog=example(f"interlock worker show {_ID}"))
def show_worker(ctx: typer.Context, worker_id: WorkerArgument, as_json: Json = False) -> None:
    """Show a worker and its history."""
    with connect(ctx) as client:
        found = client.worker(worker_id)
        reserved = _reservations(client, worker_id)
    if as_json:
        formatting.print_json(found)
        return
    out = formatting.console()
    out.print(
        formatting.facts(
            worker=found.id, name=visible(found.name), status=formatting.word(found.status),
            reason=visible(found.reason or ""),
            host=visible(found.host or ""), pid=str(found.pid or ""), runs=f"{found.holds}/{found.capacity}",
            labels=visible(", ".join(found.labels)), job=found.job_id, heartbeat=formatting.moment(found.heartbeat_at),
        )
    )  # fmt: skip
    out.print("", formatting.table(found.state_history or [], formatting.HISTORY), sep="\n")
    for event in reserved:
        what = "reserved for" if event.type == "worker_reserved" else "released from"
        out.print(f"{formatting.moment(event.at)}  {what} job {event.data.get('job_id')}", style="dim")


def _reservations(client: "Client", worker_id: str) -> "list[JobHistoryEvent]":
    """Return the jobs that the worker was reserved for, or none if the caller may not see them."""
    from interlock.client import ApiError

    try:
        return [event for event in client.worker_events(worker_id).items if "job_id" in event.data]
    except ApiError:
        return []


@app.command(epilog=example("interlock worker create --label gpu --start"))
def create(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Option(help="What it is called.")] = None,
    concurrency: Concurrency = None,
    label: Labels = None,
    tenant: Tenants = None,
    workspace: Annotated[str | None, typer.Option(help="The workspace it is noted under.")] = None,
    host: Annotated[str | None, typer.Option(help="Only on this host.")] = None,
    start: Annotated[bool, typer.Option("--start", help="Start its process at once.")] = False,
    as_json: Json = False,
) -> None:
    """Create a worker. Its process is started on a host with a supervisor."""
    with connect(ctx) as client:
        made = client.create_worker(
            name=name, workspace_id=workspace, host=host, labels=label or ("default",), tenants=tenant,
            concurrency=concurrency,
        )  # fmt: skip
        _print_worker(client.start_worker(made.id) if start else made, as_json=as_json)


def _print_worker(worker: "WorkerView", *, as_json: bool) -> None:
    formatting.print_view(worker, lambda: formatting.table([worker], WORKERS), as_json=as_json)


@app.command(epilog=example(f"interlock worker start {_ID}"))
def start(ctx: typer.Context, worker_id: WorkerArgument, request_id: RequestId = None, as_json: Json = False) -> None:
    """Start the process of a worker that was created."""
    with connect(ctx) as client:
        _print_worker(client.start_worker(worker_id, request_id=request_id), as_json=as_json)


@app.command(epilog=example(f'interlock worker pause {_ID} --reason "memory test"'))
def pause(
    ctx: typer.Context,
    worker_id: WorkerArgument,
    reason: Reason = None,
    request_id: RequestId = None,
    as_json: Json = False,
) -> None:
    """Pause a worker. It finishes its current steps and takes no more."""
    with connect(ctx) as client:
        _print_worker(client.pause_worker(worker_id, reason=reason, request_id=request_id), as_json=as_json)


@app.command(epilog=example(f"interlock worker resume {_ID}"))
def resume(
    ctx: typer.Context,
    worker_id: WorkerArgument,
    reason: Reason = None,
    request_id: RequestId = None,
    as_json: Json = False,
) -> None:
    """Resume a paused worker."""
    with connect(ctx) as client:
        _print_worker(client.resume_worker(worker_id, reason=reason, request_id=request_id), as_json=as_json)


@app.command(epilog=example(f'interlock worker terminate {_ID} --reason "stuck"'))
def terminate(
    ctx: typer.Context,
    worker_id: WorkerArgument,
    reason: Reason = None,
    request_id: RequestId = None,
    as_json: Json = False,
) -> None:
    """Terminate a worker at once. Other workers take its runs."""
    with connect(ctx) as client:
        _print_worker(client.terminate_worker(worker_id, reason=reason, request_id=request_id), as_json=as_json)


@app.command(epilog=example(f"interlock worker logs {_ID} --follow"))
def logs(
    ctx: typer.Context,
    worker_id: WorkerArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it writes.")] = False,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 200,
) -> None:
    """Print the log of a supervised worker on this machine; for other workers, print its location."""
    out = formatting.console()
    with _log_of(ctx, worker_id).open(errors="replace") as file:
        for line in file.readlines()[-lines:]:
            out.print(visible(line.rstrip("\n")))
        while follow:
            if line := file.readline():
                out.print(visible(line.rstrip("\n")))
            else:
                time.sleep(_FOLLOW_SECONDS)
                if os.fstat(file.fileno()).st_size < file.tell():
                    file.seek(0)  # the log was truncated because it had grown too long


def _log_of(ctx: typer.Context, worker_id: str) -> Path:
    """Return the log in our own data directory, which needs no server, or the path that the server reports."""
    from interlock.settings import worker_log

    ours = worker_log(read_settings(), worker_id)
    if ours.exists():
        return ours
    with connect(ctx) as client:
        found = client.worker(worker_id)
    host = found.host or "its host"
    if found.log is None and found.pid is None:
        raise typer.TyperException(f"worker {found.name} has no log yet: its process was not started")
    if found.log is None:
        raise typer.TyperException(
            f"worker {found.name} was started by hand on {host}, process {found.pid}: its log is what it prints there"
        )
    if not (there := Path(found.log)).exists():
        raise typer.TyperException(
            f"the log of worker {found.name} is not on this machine: it is on {host}, in {there}"
        )
    return there
