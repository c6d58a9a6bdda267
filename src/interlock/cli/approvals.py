"""`interlock approval`: what waits for a person, and the decision."""

from typing import Annotated

import typer

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.outcome import example
from interlock.lifecycle import ApprovalState

app = typer.Typer(
    no_args_is_help=True, help="See what waits for a person, and decide.", epilog=example("interlock approval list")
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ApprovalId = Annotated[str, typer.Argument(metavar="APPROVAL", help="The approval's id.")]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept with the decision.")]
Digest = Annotated[str | None, typer.Option(help="Decide only if the action is still the one with this digest.")]


@app.command("list", epilog=example("interlock approval list", "interlock approval list --status expired"))
def list_approvals(
    ctx: typer.Context,
    status: Annotated[ApprovalState, typer.Option(help="Only approvals in this state.")] = ApprovalState.REQUESTED,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the last list ended.")] = None,
    as_json: Json = False,
) -> None:
    """List approvals; unless told otherwise, those that wait for a decision."""
    with connect(ctx) as client:
        page = client.approvals(status=status, limit=limit, cursor=cursor)
    show.print_page(page, show.APPROVALS, as_json=as_json)


@app.command("show", epilog=example("interlock approval show 01990000-0000-7000-8000-000000000000"))
def show_approval(ctx: typer.Context, approval_id: ApprovalId, as_json: Json = False) -> None:
    """Show the exact action an approval is about, why it is asked, and who voted."""
    with connect(ctx) as client:
        approval = client.approval(approval_id)
    show.print_view(approval, lambda: show.approval_page(approval), as_json=as_json)


@app.command(epilog=example('interlock approval approve 01990000-0000-7000-8000-000000000000 --reason "checked"'))
def approve(
    ctx: typer.Context, approval_id: ApprovalId, reason: Reason = None, digest: Digest = None, as_json: Json = False
) -> None:
    """Vote yes. A two-person approval needs a second person's yes."""
    with connect(ctx) as client:
        approval = client.approve_approval(approval_id, reason=reason, digest=digest)
    show.print_view(approval, lambda: show.approval_page(approval), as_json=as_json)


@app.command(epilog=example('interlock approval reject 01990000-0000-7000-8000-000000000000 --reason "wrong amount"'))
def reject(
    ctx: typer.Context, approval_id: ApprovalId, reason: Reason = None, digest: Digest = None, as_json: Json = False
) -> None:
    """Vote no. One no is enough."""
    with connect(ctx) as client:
        approval = client.reject_approval(approval_id, reason=reason, digest=digest)
    show.print_view(approval, lambda: show.approval_page(approval), as_json=as_json)
