"""`interlock approval`: what waits for a person, and the decision."""

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import decisions, show
from interlock.cli.connection import connect
from interlock.cli.options import Cursor, Json, Limit
from interlock.cli.outcome import example
from interlock.cli.text import parse_object
from interlock.lifecycle import ApprovalState

if TYPE_CHECKING:
    from interlock.wire import Approval

app = typer.Typer(
    no_args_is_help=True, help="See what waits for a person, and decide.", epilog=example("interlock approval list")
)

ApprovalId = Annotated[str, typer.Argument(metavar="APPROVAL", help="The approval's id.")]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept with the decision.")]
Digest = Annotated[str | None, typer.Option(help="Decide only if the action is still the one with this digest.")]


@app.command("list", epilog=example("interlock approval list", "interlock approval list --status expired"))
def list_approvals(
    ctx: typer.Context,
    status: Annotated[ApprovalState, typer.Option(help="Only approvals in this state.")] = ApprovalState.REQUESTED,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List approvals; unless told otherwise, those that wait for a decision."""
    with connect(ctx) as client:
        page = client.approvals(status=status, limit=limit, cursor=cursor)
    show.print_page(page, decisions.APPROVALS, as_json=as_json)


@app.command("show", epilog=example("interlock approval show 01990000-0000-7000-8000-000000000000"))
def show_approval(ctx: typer.Context, approval_id: ApprovalId, as_json: Json = False) -> None:
    """Show the exact action an approval is about, why it is asked, who decides, and who voted."""
    with connect(ctx) as client:
        _print_approval(client.approval(approval_id), as_json=as_json)


@app.command(
    epilog=example(
        'interlock approval approve 01990000-0000-7000-8000-000000000000 --reason "checked"',
        """interlock approval approve 01990000-0000-7000-8000-000000000000 --patch '{"amount": 80}'""",
    )
)
def approve(
    ctx: typer.Context,
    approval_id: ApprovalId,
    reason: Reason = None,
    digest: Digest = None,
    patch: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE", help="Fields to change first; it is judged again and votes begin anew."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Vote yes. A two-person approval needs a second person's yes."""
    fields = parse_object(patch, "--patch") if patch is not None else None
    with connect(ctx) as client:
        approval = client.approve_approval(approval_id, reason=reason, digest=digest, patch=fields)
    _print_approval(approval, as_json=as_json)


@app.command(epilog=example('interlock approval reject 01990000-0000-7000-8000-000000000000 --reason "wrong amount"'))
def reject(
    ctx: typer.Context, approval_id: ApprovalId, reason: Reason = None, digest: Digest = None, as_json: Json = False
) -> None:
    """Vote no. One no is enough."""
    with connect(ctx) as client:
        approval = client.reject_approval(approval_id, reason=reason, digest=digest)
    _print_approval(approval, as_json=as_json)


@app.command(
    epilog=example(
        "interlock approval decide --reject 01990000-0000-7000-8000-000000000000 01990000-0000-7000-8000-000000000001"
    )
)
def decide(
    ctx: typer.Context,
    approval_ids: Annotated[list[str], typer.Argument(metavar="APPROVAL...", help="The approvals' ids.")],
    approves: Annotated[bool, typer.Option("--approve", help="Vote yes on each.")] = False,
    rejects: Annotated[bool, typer.Option("--reject", help="Vote no on each.")] = False,
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Vote the same on several approvals, with a line for each. Fails if one was refused; the others stand."""
    if approves == rejects:
        raise typer.BadParameter("give one of the two", param_hint="--approve / --reject")
    with connect(ctx) as client:
        page = client.decide_many(approval_ids, "approve" if approves else "reject", reason=reason)
    if as_json:
        show.print_json(page)
    for decided in () if as_json else page.items:
        show.console().print(decisions.decided_line(decided))
    refused = sum(not decided.ok for decided in page.items)
    if refused:
        raise typer.TyperException(f"{refused} of {len(page.items)} refused")


def _print_approval(approval: "Approval", *, as_json: bool) -> None:
    show.print_view(approval, lambda: decisions.approval_page(approval), as_json=as_json)
    if not as_json and (barred := decisions.barred_line(approval)):
        show.console().print(barred)
