"""`interlock grant`: approvals given in advance."""

from typing import Annotated

import typer

from interlock.cli import decisions, show
from interlock.cli.connection import connect
from interlock.cli.options import Json
from interlock.cli.outcome import example
from interlock.cli.text import parse_params, parse_seconds
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
        'interlock grant give shop.tag --tier med --for 30m --reason "cleaning up tonight"',
    )
)
def give(
    ctx: typer.Context,
    tool: Annotated[str, typer.Argument(help="The tool's name.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument that must be this; those not named are free."),
    ] = None,
    tier: Annotated[Tier, typer.Option(help="The most it answers for: low or med, never high.")] = Tier.LOW,
    lasts: Annotated[str, typer.Option("--for", metavar="DURATION", help="How long, at most 7d.")] = "1h",
    reason: Annotated[str | None, typer.Option(help="Why; it is kept with the grant.")] = None,
    as_json: Json = False,
) -> None:
    """Approve in advance what policy would ask about. It never answers for high, for two people, or for yourself."""
    if tier is Tier.HIGH:
        raise typer.BadParameter("high is decided by people, each time; give low or med", param_hint="--tier")
    seconds = parse_seconds(lasts, "--for")
    if seconds > _LONGEST_SECONDS:
        raise typer.BadParameter("a grant lasts at most 7d", param_hint="--for")
    arguments = parse_params(arg or (), "--arg")
    with connect(ctx) as client:
        grant = client.give_grant(tool, arguments, tier=tier, expires_in=seconds, reason=reason)
    show.print_view(grant, lambda: show.table([grant], decisions.GRANTS), as_json=as_json)


@app.command("list", epilog=example("interlock grant list", "interlock grant list --all"))
def list_grants(
    ctx: typer.Context,
    all: Annotated[bool, typer.Option("--all", help="Those that are over too.")] = False,
    as_json: Json = False,
) -> None:
    """List the grants in force, and how often each was used."""
    with connect(ctx) as client:
        page = client.grants(all=all)
    show.print_page(page, decisions.GRANTS, as_json=as_json)


@app.command(epilog=example("interlock grant revoke 01990000-0000-7000-8000-000000000000"))
def revoke(
    ctx: typer.Context,
    grant_id: Annotated[str, typer.Argument(metavar="GRANT", help="The grant's id.")],
    as_json: Json = False,
) -> None:
    """End a grant, at once: people are asked again."""
    with connect(ctx) as client:
        grant = client.revoke_grant(grant_id)
    show.print_view(grant, lambda: f"revoked {grant.id}, used {show.times(grant.uses)}", as_json=as_json)
