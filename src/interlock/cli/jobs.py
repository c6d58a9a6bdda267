"""`interlock job`: submit batches of runs, watch them, stop them."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.tree import Tree

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Inputs, Json, Limit, Version
from interlock.cli.parsing import one_line, parse_inputs, parse_seconds, visible
from interlock.lifecycle import JobState

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import Job, JobHistoryEvent, JobTree

app = typer.Typer(
    no_args_is_help=True,
    help="Jobs: batches of runs with workers of their own.",
    epilog=example("interlock job submit resize --inputs @pictures.json --workers 4 --watch"),
)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
RequestId = Annotated[str | None, typer.Option(help="The same id again gives the same answer and changes nothing.")]

_ID = "01990000-0000-7000-8000-000000000000"


JOBS: "formatting.Columns[Job]" = {
    "id": lambda job: job.id,
    "task": lambda job: one_line(job.task_description)[:60],
    "workflow": lambda job: visible(job.workflow),
    "status": lambda job: formatting.word(job.status),
    "done": lambda job: f"{job.progress.done}/{job.progress.total}",
    "workers": lambda job: f"{len(job.workers)}/{job.worker_count}",
    "created": lambda job: formatting.moment(job.created_at),
    "took": lambda job: formatting.took(job.started_at, job.completed_at),
    "reason": lambda job: one_line(job.reason or ""),
}


@app.command(
    epilog=example(
        'interlock job submit resize --inputs \'[{"id": 1}, {"id": 2}]\'',
        'interlock job submit resize --inputs @pictures.json --workers 4 --task "thumbnails" --timeout 1h --watch',
    )
)
def submit(
    ctx: typer.Context,
    workflow: Annotated[str, typer.Argument(help="The workflow's name.")],
    inputs: Inputs = "[{}]",
    workers: Annotated[int, typer.Option(min=1, max=10, help="Workers that do nothing else meanwhile.")] = 1,
    task: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    version: Version = None,
    parent: Annotated[str | None, typer.Option(metavar="JOB", help="The job that waits for this one.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="It is canceled if it takes longer.")] = None,
    request_id: RequestId = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show how far it is until it ends.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a job: one run of a workflow for each input."""
    given = parse_inputs(inputs)
    with connect(ctx) as client:
        job = client.submit_job(
            task or f"{workflow} × {len(given)}", workflow, given, worker_count=workers, version=version,
            parent_job_id=parent, timeout_seconds=parse_seconds(timeout, "--timeout") if timeout else None,
            request_id=request_id,
        )  # fmt: skip
        if watch:
            job = _watch(client, job, as_json=as_json)
    if not (watch and as_json):
        formatting.print_view(job, lambda: _page(job), as_json=as_json)
    _fail_unless_well(job)


@app.command("list", epilog=example("interlock job list --status pending"))
def list_jobs(
    ctx: typer.Context,
    status: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    parent: Annotated[str | None, typer.Option(metavar="JOB", help="Only children of this job.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connect(ctx) as client:
        page = client.jobs(status=status, parent_job_id=parent, limit=limit, cursor=cursor)
    formatting.print_page(page, JOBS, as_json=as_json)


@app.command("show", epilog=example(f"interlock job show {_ID}"))
def show_job(ctx: typer.Context, job_id: JobId, as_json: Json = False) -> None:
    """Show a job, its progress, and its history."""
    with connect(ctx) as client:
        job = client.job(job_id)
    formatting.print_view(
        job,
        lambda: Group(_page(job), "", formatting.table(job.state_history or [], formatting.HISTORY)),
        as_json=as_json,
    )


@app.command(epilog=example(f"interlock job tree {_ID}"))
def tree(ctx: typer.Context, job_id: JobId, as_json: Json = False) -> None:
    """Show a job and its descendants, as a tree."""
    with connect(ctx) as client:
        found = client.job_tree(job_id)
    formatting.print_view(found, lambda: _branches(found), as_json=as_json)


@app.command(epilog=example(f"interlock job watch {_ID}"))
def watch(ctx: typer.Context, job_id: JobId, as_json: Json = False) -> None:
    """Show the progress of a job until it ends. Fails if the job does."""
    with connect(ctx) as client:
        job = _watch(client, client.job(job_id), as_json=as_json)
    if not as_json:
        formatting.console().print(_page(job))
    _fail_unless_well(job)


@app.command(epilog=example(f'interlock job cancel {_ID} --reason "wrong pictures"'))
def cancel(
    ctx: typer.Context,
    job_id: JobId,
    reason: Annotated[str | None, typer.Option(help="Why; it is kept in its history.")] = None,
    request_id: RequestId = None,
    as_json: Json = False,
) -> None:
    """Stop a job and its descendants."""
    with connect(ctx) as client:
        job = client.cancel_job(job_id, reason=reason, request_id=request_id)
    formatting.print_view(job, lambda: _page(job), as_json=as_json)


# ---------------------------------------------------------------- showing


def _page(job: "Job") -> RenderableType:
    return formatting.facts(
        job=job.id,
        task=visible(job.task_description),
        workflow=visible(f"{job.workflow}@{job.workflow_version or '?'}"),
        status=formatting.word(job.status),
        reason=visible(job.reason or ""),
        progress=_line(job),
        see=f"interlock run list --job {job.id} --status failed" if job.progress.failed else None,
        workers=", ".join(visible(worker.name) for worker in job.workers) or f"none of {job.worker_count}",
        parent=job.parent_job_id,
        created=formatting.moment(job.created_at),
        took=formatting.took(job.started_at, job.completed_at),
    )


def _line(job: "Job") -> str:
    progress = job.progress
    parts = [f"{progress.done}/{progress.total}"]
    ended_badly = {"failed": progress.failed, "canceled": progress.canceled}
    parts += [f"{count} {how}" for how, count in ended_badly.items() if count]
    if progress.rate_per_second:
        parts.append(f"{progress.rate_per_second:.3g}/s")
    if progress.eta_seconds is not None and progress.done < progress.total:
        parts.append(f"{formatting.span(progress.eta_seconds)} left")
    return ", ".join(parts)


def _bar(job: "Job") -> RenderableType:
    row = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=job.progress.total, completed=job.progress.done, width=24)
    row.add_row(one_line(job.task_description)[:30], formatting.word(job.status), bar, _line(job))
    return row


def _branches(found: "JobTree", onto: Tree | None = None) -> Tree:
    label = Table.grid(padding=(0, 2, 0, 0))
    for no_wrap in (True, True, True, False):
        label.add_column(no_wrap=no_wrap, overflow="fold")
    label.add_row(found.id, formatting.word(found.status), _line(found), one_line(found.task_description)[:60])
    here = onto.add(label) if onto is not None else Tree(label)
    for child in found.children:
        _branches(child, here)
    return here


def _watch(client: "Client", job: "Job", *, as_json: bool) -> "Job":
    """Show a job until it ends, and return how it ended. Without a terminal: one line per event."""
    events = client.follow_job(job.id)
    out = formatting.console()
    if as_json:
        for event in events:
            formatting.print_json(event, indent=None)
    elif out.is_terminal:
        with Live(_bar(job), console=out, refresh_per_second=8) as live:
            for event in events:
                job = _moved(job, event)
                live.update(_bar(job))
    else:
        for event in events:
            job = _moved(job, event)
            out.print(f"{job.status} {_line(job)}")
    return client.job(job.id)


def _moved(job: "Job", event: "JobHistoryEvent") -> "Job":
    """Return the job updated by the event. Its speed is computed from its start."""
    said, changes = event.data, dict[str, Any]()
    if "to_state" in said:
        changes["status"] = JobState(said["to_state"])
    if said.get("to_state") == JobState.RUNNING:
        changes["started_at"] = event.at
    if "done" in said:
        changes["progress"] = job.progress.model_copy(update=_reckoned(said, job.started_at, event.at))
    return job.model_copy(update=changes)


def _reckoned(said: dict[str, Any], since: datetime | None, at: datetime) -> dict[str, Any]:
    done, total = said["done"], said["total"]
    seconds = (at - since).total_seconds() if since else 0.0
    rate = done / seconds if done and seconds > 0 else None
    failed = {"failed": done - said["succeeded"]} if "succeeded" in said else {}
    return {
        "done": done, "total": total, "rate_per_second": rate, "eta_seconds": (total - done) / rate if rate else None,
        **failed,
    }  # fmt: skip


def _fail_unless_well(job: "Job") -> None:
    if job.status in (JobState.FAILED, JobState.CANCELED):
        raise typer.TyperException(f"job {job.id} {job.status}: {job.reason or ''}")
