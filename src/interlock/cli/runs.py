"""`interlock run`: start, show, decide and stop runs."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import approval_views, formatting, run_view
from interlock.cli.batch import batch
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Digest, Json, Limit, Version
from interlock.cli.parsing import parse_input, parse_seconds, visible
from interlock.lifecycle import RUN, ApprovalState, RunState

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import Approval, Event, Run

app = typer.Typer(
    no_args_is_help=True,
    help="Start runs, look at them, decide about them, stop them.",
    epilog=example("interlock run list --status failed"),
)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept with the decision.")]

RUNS: "formatting.Columns[Run]" = {
    "id": lambda run: run.id,
    "workflow": lambda run: visible(f"{run.workflow}@{run.workflow_version}"),
    "status": lambda run: formatting.word(run.status),
    "reason": lambda run: run.reason or visible(run.waiting_for or ""),
    "created": lambda run: formatting.moment(run.created_at),
    "took": lambda run: formatting.took(run.created_at, run.completed_at),
}


# How long one request waits on the server; the command then asks again.
_WAIT_SECONDS = 30.0
# If a server answers at once without waiting, the command must not ask it continuously.
_POLL_SECONDS = 0.5


@app.command(
    epilog=example(
        "interlock run start refund --param charge=ch_1 --param amount=120",
        "interlock run start refund --input @refund.json --deadline 1h --watch",
    )
)
def start(
    ctx: typer.Context,
    workflow: Annotated[str, typer.Argument(help="The workflow's name.")],
    input: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="The input, a JSON object.")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="One field of the input.")] = None,
    version: Version = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it ended or needs a person.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show its steps until it ended.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key again answers the same run.")] = None,
    deadline: Annotated[str | None, typer.Option(metavar="DURATION", help="It fails if it takes longer.")] = None,
    as_json: Json = False,
) -> None:
    """Start a run of a workflow."""
    from interlock.wire import NewTrigger

    values = parse_input(input, param or ())
    with connect(ctx) as client:
        run = client.start(
            workflow,
            values,
            version=version,
            trigger=NewTrigger(source="cli"),
            deadline_seconds=parse_seconds(deadline) if deadline else None,
            idempotency_key=idempotency_key,
            wait=_WAIT_SECONDS if wait and not watch else None,
        )
        if watch:
            _watch_to_the_end(client, run, as_json=as_json)
            return
        run = _wait_for(client, run) if wait else run
    _print_run(run, as_json=as_json)
    if wait:
        _fail_unless_well(run)


app.command(
    epilog=example(
        "interlock run batch refund --inputs @charges.json",
        "interlock run batch refund --inputs @charges.json --idempotency-key refunds-of-may",
    )
)(batch)


@app.command(
    "list",
    epilog=example(
        "interlock run list --status waiting_approval --limit 20",
        "interlock run list --job 01990000-0000-7000-8000-000000000000 --status failed",
    ),
)
def list_runs(
    ctx: typer.Context,
    status: Annotated[RunState | None, typer.Option(help="Only runs in this state.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Only runs of this workflow.")] = None,
    parent: Annotated[str | None, typer.Option(metavar="RUN", help="Only runs that this run started.")] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="Only runs of this job.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    with connect(ctx) as client:
        page = client.runs(status=status, workflow=workflow, parent=parent, job=job, limit=limit, cursor=cursor)
    formatting.print_page(page, RUNS, as_json=as_json)


@app.command("show", epilog=example("interlock run show 01990000-0000-7000-8000-000000000000"))
def show_run(ctx: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Show a run and its steps."""
    with connect(ctx) as client:
        _print_run(client.run(run_id), as_json=as_json)


@app.command("watch", epilog=example("interlock run watch 01990000-0000-7000-8000-000000000000"))
def watch_run(ctx: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Show a run's steps as they happen, until it ends. Fails if the run does."""
    with connect(ctx) as client:
        _watch_to_the_end(client, client.run(run_id), as_json=as_json)


@app.command(epilog=example('interlock run approve 01990000-0000-7000-8000-000000000000 --reason "checked the charge"'))
def approve(
    ctx: typer.Context, run_id: RunId, reason: Reason = None, digest: Digest = None, as_json: Json = False
) -> None:
    """Approve everything a run waits for, or with --digest that one action. Fails if the run waits for no approval."""
    with connect(ctx) as client:
        run = client.approve(run_id, reason=reason, digest=digest)
        waits = run.status is RunState.WAITING_APPROVAL and not as_json
        voted = waits and any(approval.voted for approval in _open_approvals(client, run_id))
    _print_run(run, as_json=as_json)
    if voted:
        formatting.console().print(approval_views.voted_line())


@app.command(epilog=example('interlock run reject 01990000-0000-7000-8000-000000000000 --reason "wrong amount"'))
def reject(ctx: typer.Context, run_id: RunId, reason: Reason = None, as_json: Json = False) -> None:
    """Reject what a run waits for."""
    with connect(ctx) as client:
        waiting = _open_approvals(client, run_id)
        if not waiting:
            raise typer.TyperException(f"run {run_id} waits for nobody; it is {client.run(run_id).status}")
        _reject_all(client, waiting, reason)
        _print_run(client.run(run_id), as_json=as_json)


@app.command(epilog=example('interlock run cancel 01990000-0000-7000-8000-000000000000 --reason "not needed any more"'))
def cancel(ctx: typer.Context, run_id: RunId, reason: Reason = None, as_json: Json = False) -> None:
    """Stop a run."""
    with connect(ctx) as client:
        _print_run(client.cancel(run_id, reason=reason), as_json=as_json)


@app.command(epilog=example("interlock run retry 01990000-0000-7000-8000-000000000000"))
def retry(ctx: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Start a new run that continues a failed one."""
    with connect(ctx) as client:
        _print_run(client.retry(run_id), as_json=as_json)


@app.command(epilog=example("interlock run events 01990000-0000-7000-8000-000000000000 --follow"))
def events(
    ctx: typer.Context,
    run_id: RunId,
    after: Annotated[int, typer.Option(min=0, help="Only events after this number.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    as_json: Json = False,
) -> None:
    """Print a run's journal, one line per event. With --follow --json: one JSON object per line."""
    from interlock.wire import Event, Page

    out = formatting.console()
    with connect(ctx) as client:
        if not follow:
            found = _all_events(client, run_id, after)
            if as_json:
                formatting.print_json(Page[Event](items=found))
            for event in () if as_json else found:
                run_view.print_event(out, event)
            return
        for event in client.follow(run_id, after):
            if as_json:
                formatting.print_json(event, indent=None)
            else:
                run_view.print_event(out, event)


def _print_run(run: "Run", *, as_json: bool) -> None:
    formatting.print_view(run, lambda: run_view.run_page(run), as_json=as_json)


def _watch_to_the_end(client: "Client", run: "Run", *, as_json: bool) -> None:
    from interlock.cli.watch import watch

    run = watch(client, run, as_json=as_json)
    if not as_json:  # the steps were shown live
        _print_run(run.model_copy(update={"steps": []}), as_json=False)
    _fail_unless_well(run)


def _wait_for(client: "Client", run: "Run") -> "Run":
    """Wait until the run has ended or needs a person, and return it."""
    while run.status not in RUN.terminal and run.status is not RunState.WAITING_APPROVAL:
        asked = time.monotonic()
        run = client.run(run.id, wait=_WAIT_SECONDS)
        time.sleep(max(0.0, _POLL_SECONDS - (time.monotonic() - asked)))
    return run


def _fail_unless_well(run: "Run") -> None:
    if run.status in RUN.terminal and run.status is not RunState.SUCCEEDED:
        why = ": ".join(filter(None, (run.reason, formatting.brief(run.error))))
        raise typer.TyperException(f"run {run.id} {run.status}: {why}")


def _all_events(client: "Client", run_id: str, after: int) -> "list[Event]":
    page = client.events(run_id, after=after)
    found = list(page.items)
    while page.next_cursor and page.items:
        page = client.events(run_id, after=found[-1].seq)
        found += page.items
    return found


def _open_approvals(client: "Client", run_id: str) -> "list[Approval]":
    page = client.approvals(status=ApprovalState.REQUESTED, run_id=run_id)
    found = list(page.items)
    while page.next_cursor:
        page = client.approvals(status=ApprovalState.REQUESTED, run_id=run_id, cursor=page.next_cursor)
        found += page.items
    # Checked again here: a rejection must never reach another run's approval.
    return [approval for approval in found if approval.run_id == run_id]


def _reject_all(client: "Client", approvals: "list[Approval]", reason: str | None) -> None:
    """Reject all approvals.

    The first rejection may end the run and close the others, so a later 409 is not an error.
    """
    from interlock.client import ApiError

    for number, approval in enumerate(approvals):
        try:
            client.reject_approval(approval.id, reason=reason, digest=approval.action.digest)
        except ApiError as error:
            if number == 0 or error.status != 409:
                raise
