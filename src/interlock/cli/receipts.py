"""`interlock receipt`: effects on other systems, and undoing them."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interlock.cli import approval_views, formatting, run_view
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Json
from interlock.cli.parsing import parse_json

if TYPE_CHECKING:
    from interlock.wire import Receipt

app = typer.Typer(
    no_args_is_help=True,
    help="See what a run did to the outside world, settle what is in doubt, undo.",
    epilog=example("interlock receipt list 01990000-0000-7000-8000-000000000000"),
)

ReceiptId = Annotated[str, typer.Argument(metavar="RECEIPT", help="The receipt's id.")]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept.")]


@app.command("list", epilog=example("interlock receipt list 01990000-0000-7000-8000-000000000000"))
def list_receipts(
    ctx: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    as_json: Json = False,
) -> None:
    """List the effects of a run, and the result of each."""
    with connect(ctx) as client:
        page = client.receipts(run_id)
    formatting.print_page(page, approval_views.RECEIPTS, as_json=as_json)


@app.command("show", epilog=example("interlock receipt show 01990000-0000-7000-8000-000000000000"))
def show_receipt(ctx: typer.Context, receipt_id: ReceiptId, as_json: Json = False) -> None:
    """Show one effect: what is known of its request and its answer, and whether it can be undone."""
    with connect(ctx) as client:
        _print_receipt(client.receipt(receipt_id), as_json=as_json)


@app.command(
    epilog=example(
        """interlock receipt resolve 01990000-0000-7000-8000-000000000000 --happened --output '{"id": "re_1"}'""",
        'interlock receipt resolve 01990000-0000-7000-8000-000000000000 --did-not-happen --reason "not in the ledger"',
    )
)
def resolve(
    ctx: typer.Context,
    receipt_id: ReceiptId,
    happened: Annotated[bool, typer.Option("--happened", help="It took place: the run goes on.")] = False,
    did_not_happen: Annotated[
        bool, typer.Option("--did-not-happen", help="It did not take place: the run does it again.")
    ] = False,
    fail: Annotated[bool, typer.Option("--fail", help="Whatever took place, the run shall fail.")] = False,
    output: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="With --happened: what the tool would have returned.")
    ] = None,
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Resolve an effect in doubt.

    Check the other system first: after --did-not-happen the effect is attempted again.
    """
    outcome = _the_one_outcome(happened=happened, did_not_happen=did_not_happen, fail=fail)
    if output is not None and not happened:
        raise typer.BadParameter("only what happened has an output", param_hint="--output")
    value = parse_json(output, "--output") if output is not None else None
    with connect(ctx) as client:
        receipt = client.resolve_receipt(receipt_id, outcome, output=value, reason=reason)
    _print_receipt(receipt, as_json=as_json)


@app.command(
    epilog=example('interlock receipt reverse 01990000-0000-7000-8000-000000000000 --reason "charged the wrong card"')
)
def reverse(ctx: typer.Context, receipt_id: ReceiptId, reason: Reason = None, as_json: Json = False) -> None:
    """Undo an effect, at most once, with a new run. Policy may require approval of that run."""
    with connect(ctx) as client:
        run = client.reverse_receipt(receipt_id, reason=reason)
    formatting.print_view(run, lambda: run_view.run_page(run), as_json=as_json)


def _the_one_outcome(
    *, happened: bool, did_not_happen: bool, fail: bool
) -> Literal["happened", "did_not_happen", "fail"]:
    match happened, did_not_happen, fail:
        case True, False, False:
            return "happened"
        case False, True, False:
            return "did_not_happen"
        case False, False, True:
            return "fail"
    raise typer.BadParameter("give one of the three", param_hint="--happened / --did-not-happen / --fail")


def _print_receipt(receipt: "Receipt", *, as_json: bool) -> None:
    formatting.print_view(receipt, lambda: approval_views.receipt_page(receipt), as_json=as_json)
