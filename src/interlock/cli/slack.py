"""`interlock slack`: linked Slack users, teams, and the channel for approvals."""

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Json
from interlock.cli.parsing import visible

if TYPE_CHECKING:
    from interlock.wire import SlackTeam, SlackUser

app = typer.Typer(
    no_args_is_help=True,
    help="Slack: who its users are here, and which channel is told.",
    epilog=example("interlock slack link", "interlock slack users"),
)

Team = Annotated[str, typer.Argument(help="The id of the Slack workspace, like T012345.")]
User = Annotated[str, typer.Argument(help="The id of the Slack user, like U012345.")]

TEAMS: "formatting.Columns[SlackTeam]" = {
    "team": lambda team: visible(team.team_id),
    "status": lambda team: "shared" if team.is_member else "offered",
    "tenants": lambda team: visible(", ".join(team.tenants)),
}

USERS: "formatting.Columns[SlackUser]" = {
    "team": lambda user: visible(user.team_id),
    "user": lambda user: visible(user.user_id),
    "acts as": lambda user: visible(user.name),
    "role": lambda user: user.role,
    "key": lambda user: user.key_id,
    "since": lambda user: formatting.moment(user.created_at),
    "revoked": lambda user: formatting.moment(user.revoked_at),
}


@app.command(epilog=example("interlock slack link", "interlock --key KEY slack link"))
def link(ctx: typer.Context, as_json: Json = False) -> None:
    """Link your key with your Slack user: print a code that you send from Slack."""
    with connect(ctx) as client:
        made = client.slack_link_code()
    said = f"Within ten minutes, send this from Slack:\n\n  /interlock link {visible(made.code)}\n"
    formatting.print_view(made, lambda: said, as_json=as_json)


@app.command(epilog=example("interlock slack unlink T012345 U012345"))
def unlink(ctx: typer.Context, team: Team, user: User, as_json: Json = False) -> None:
    """Unlink a Slack user. Interlock then rejects the user's buttons and commands; the key stays valid."""
    with connect(ctx) as client:
        linked = client.unlink_slack_user(team, user)
    formatting.print_view(
        linked, lambda: f"unlinked {visible(user)}, who acted as {visible(linked.name)}", as_json=as_json
    )


@app.command(epilog=example("interlock slack users"))
def users(ctx: typer.Context, as_json: Json = False) -> None:
    """List the linked Slack users, and the keys that they act with."""
    with connect(ctx) as client:
        page = client.slack_users()
    formatting.print_page(page, USERS, as_json=as_json)


@app.command(epilog=example("interlock slack teams"))
def teams(ctx: typer.Context, as_json: Json = False) -> None:
    """List the Slack teams that your tenant shares with others, and those that were offered to it."""
    with connect(ctx) as client:
        page = client.slack_teams()
    formatting.print_page(page, TEAMS, as_json=as_json)


@app.command(epilog=example("interlock slack share T012345 acme"))
def share(
    ctx: typer.Context,
    team: Team,
    tenant: Annotated[str, typer.Argument(help="The name of the other tenant.")],
    as_json: Json = False,
) -> None:
    """Offer a Slack team of your tenant to another tenant. Its users can act from there once its admin has joined."""
    with connect(ctx) as client:
        shared = client.offer_slack_team(team, tenant)
    said = f"Offered {visible(team)} to tenant {visible(tenant)}. Its admin accepts with: interlock slack join {team}"
    formatting.print_view(shared, lambda: said, as_json=as_json)


@app.command(epilog=example("interlock slack join T012345"))
def join(ctx: typer.Context, team: Team, as_json: Json = False) -> None:
    """Accept a Slack team that another tenant offered to yours."""
    with connect(ctx) as client:
        joined = client.accept_slack_team(team)
    formatting.print_view(joined, lambda: f"People of your tenant can act from {visible(team)} now.", as_json=as_json)


@app.command(epilog=example("interlock slack leave T012345"))
def leave(ctx: typer.Context, team: Team, as_json: Json = False) -> None:
    """Leave a shared Slack team, or decline an offer."""
    with connect(ctx) as client:
        left = client.leave_slack_team(team)
    formatting.print_view(
        left, lambda: f"People of your tenant cannot act from {visible(team)} any more.", as_json=as_json
    )


@app.command(
    epilog=example("interlock slack channel C0123456789 --tenant acme", "interlock slack channel none --tenant acme")
)
def channel(
    ctx: typer.Context,
    channel: Annotated[str, typer.Argument(help="The channel's id, or none.")],
    tenant: Annotated[str | None, typer.Option(help="Whose approvals; else tenant default's.")] = None,
    as_json: Json = False,
) -> None:
    """Post a tenant's approvals to this channel. Only admins of the tenant `default` may."""
    with connect(ctx) as client:
        chosen = client.use_slack_channel(None if channel == "none" else channel, tenant=tenant)
    said = f"approvals of {visible(chosen.tenant)} go to {visible(chosen.channel or 'no channel')}"
    formatting.print_view(chosen, lambda: said, as_json=as_json)
