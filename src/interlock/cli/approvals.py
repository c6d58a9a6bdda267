"""`interlock approval`: list approvals and decide them."""

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import approval_views, formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Digest, Json, Limit
from interlock.cli.parsing import parse_object
from interlock.lifecycle import ApprovalState

if TYPE_CHECKING:
    from interlock.wire import Approval

app = typer.Typer(
    no_args_is_help=True, help="See what waits for a person, and decide.", epilog=example("interlock approval list")
)

ApprovalId = Annotated[str, typer.Argument(metavar="APPROVAL", help="The approval's id.")]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept with the decision.")]


@app.command(
    "list",
    epilog=example(
        "interlock approval list",
        "interlock approval list --run 01990000-0000-7000-8000-000000000000",
        "interlock approval list --status expired",
    ),
)
def list_approvals(
    ctx: typer.Context,
    status: Annotated[ApprovalState, typer.Option(help="Only approvals in this state.")] = ApprovalState.REQUESTED,
    run_id: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only approvals of this run.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List approvals; by default, those that wait for a decision."""
    with connect(ctx) as client:
        page = client.approvals(status=status, run_id=run_id, limit=limit, cursor=cursor)
    formatting.print_page(page, approval_views.APPROVALS, as_json=as_json)


@app.command("show", epilog=example("interlock approval show 01990000-0000-7000-8000-000000000000"))
def show_approval(ctx: typer.Context, approval_id: ApprovalId, as_json: Json = False) -> None:
    """Show an approval: the exact action, why approval is needed, who decides, and who voted."""
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
    _print_approval(approval, as_json=as_json, changed=fields is not None)


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
        "interlock approval decide --reject 01990000-0000-7000-8000-000000000000 01990000-0000-7000-8000-000000000001",
        "interlock approval decide --approve 01990000-0000-7000-8000-000000000000:DIGEST",
    )
)
def decide(
    ctx: typer.Context,
    approvals: Annotated[
        list[str],
        typer.Argument(metavar="APPROVAL[:DIGEST]...", help="The approvals' ids; with a digest: only that action."),
    ],
    approves: Annotated[bool, typer.Option("--approve", help="Vote yes on each.")] = False,
    rejects: Annotated[bool, typer.Option("--reject", help="Vote no on each.")] = False,
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Vote the same on several approvals, with a line for each. Fails if one was refused; the others stand."""
    if approves == rejects:
        raise typer.BadParameter("give one of the two", param_hint="--approve / --reject")
    named = {approval_id: digest for approval_id, _, digest in (each.partition(":") for each in approvals)}
    digests = {approval_id: digest for approval_id, digest in named.items() if digest}
    with connect(ctx) as client:
        page = client.decide_many([*named], "approve" if approves else "reject", reason=reason, digests=digests)
    if as_json:
        formatting.print_json(page)
    for decided in () if as_json else page.items:
        formatting.console().print(approval_views.decided_line(decided))
    refused = sum(not decided.ok for decided in page.items)
    if refused:
        raise typer.TyperException(f"{refused} of {len(page.items)} refused")


def _print_approval(approval: "Approval", *, as_json: bool, changed: bool = False) -> None:
    formatting.print_view(approval, lambda: approval_views.approval_page(approval), as_json=as_json)
    line = approval_views.CHANGED if changed else approval_views.barred_line(approval)
    if line is not None and not as_json:
        formatting.console().print(line)
