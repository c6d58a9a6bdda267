"""`interlock grant`: standing approvals."""

from typing import Annotated

import typer

from interlock.cli import approval_views, formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import AllowUnknownTools, Json
from interlock.cli.parsing import parse_params, parse_seconds
from interlock.lifecycle import Tier

app = typer.Typer(
    no_args_is_help=True,
    help="Approve in advance: this tool, these arguments, for so long.",
    epilog=example("interlock grant give shop.refund --arg charge=ch_1 --for 1h"),
)

_LONGEST_SECONDS = 7 * 86400


@app.command(
    epilog=example(
        "interlock grant give shop.refund --arg charge=ch_1 --for 1h",
        'interlock grant give shop.tag --any-arguments --tier med --for 30m --reason "cleaning up tonight"',
    )
)
def give(
    ctx: typer.Context,
    tool: Annotated[str, typer.Argument(help="The tool's name.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument that must be this; those not named are free."),
    ] = None,
    any_arguments: Annotated[
        bool, typer.Option("--any-arguments", help="Cover every call of the tool, whatever its arguments.")
    ] = False,
    tier: Annotated[Tier, typer.Option(help="The most it answers for: low or med, never high.")] = Tier.LOW,
    lasts: Annotated[str, typer.Option("--for", metavar="DURATION", help="How long, at most 7d.")] = "1h",
    reason: Annotated[str | None, typer.Option(help="Why; it is kept with the grant.")] = None,
    allow_unknown_tools: AllowUnknownTools = False,
    as_json: Json = False,
) -> None:
    """Approve calls in advance. A grant never covers tier high, two-person approvals, or your own calls."""
    if tier is Tier.HIGH:
        raise typer.BadParameter("high is decided by people, each time; give low or med", param_hint="--tier")
    seconds = parse_seconds(lasts, "--for")
    if seconds > _LONGEST_SECONDS:
        raise typer.BadParameter("a grant lasts at most 7d", param_hint="--for")
    arguments = parse_params(arg or (), "--arg")
    if bool(arguments) == any_arguments:
        says = "give one of the two" if any_arguments else "name the arguments that it covers, or give --any-arguments"
        raise typer.BadParameter(says, param_hint="--arg / --any-arguments")
    with connect(ctx) as client:
        grant = client.give_grant(
            tool, arguments, any_arguments=any_arguments or None, tier=tier, expires_in=seconds, reason=reason,
            allow_unknown_tools=allow_unknown_tools,
        )  # fmt: skip
    formatting.print_view(grant, lambda: formatting.table([grant], approval_views.GRANTS), as_json=as_json)


@app.command("list", epilog=example("interlock grant list", "interlock grant list --all"))
def list_grants(
    ctx: typer.Context,
    all: Annotated[bool, typer.Option("--all", help="Those that are over too.")] = False,
    as_json: Json = False,
) -> None:
    """List the grants in force, and how often each was used."""
    with connect(ctx) as client:
        page = client.grants(all=all)
    formatting.print_page(page, approval_views.GRANTS, as_json=as_json)


@app.command(epilog=example("interlock grant revoke 01990000-0000-7000-8000-000000000000"))
def revoke(
    ctx: typer.Context,
    grant_id: Annotated[str, typer.Argument(metavar="GRANT", help="The grant's id.")],
    as_json: Json = False,
) -> None:
    """Revoke a grant at once. Later calls need approval again."""
    with connect(ctx) as client:
        grant = client.revoke_grant(grant_id)
    formatting.print_view(grant, lambda: f"revoked {grant.id}, used {formatting.times(grant.uses)}", as_json=as_json)
