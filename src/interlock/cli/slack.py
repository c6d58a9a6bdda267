"""`interlock slack`: who Slack's users are here, and which channel is told."""

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.options import Json
from interlock.cli.outcome import example
from interlock.cli.text import visible

if TYPE_CHECKING:
    from interlock.wire import SlackUser

app = typer.Typer(
    no_args_is_help=True,
    help="Slack: who its users are here, and which channel is told.",
    epilog=example("interlock slack link T012345 U012345 01990000-0000-7000-8000-000000000000"),
)

Team = Annotated[str, typer.Argument(help="The id of the Slack workspace, like T012345.")]
User = Annotated[str, typer.Argument(help="The id of the Slack user, like U012345.")]

USERS: "show.Columns[SlackUser]" = {
    "team": lambda user: visible(user.team_id),
    "user": lambda user: visible(user.user_id),
    "acts as": lambda user: visible(user.name),
    "role": lambda user: user.role,
    "key": lambda user: user.key_id,
    "since": lambda user: show.moment(user.created_at),
    "revoked": lambda user: show.moment(user.revoked_at),
}


@app.command(epilog=example("interlock slack link T012345 U012345 01990000-0000-7000-8000-000000000000"))
def link(
    ctx: typer.Context,
    team: Team,
    user: User,
    key: Annotated[str, typer.Argument(help="The id of the key they act with, not its secret: interlock key list.")],
    as_json: Json = False,
) -> None:
    """Say with whose key a Slack user acts: its role, its groups. Saying it again replaces it."""
    with connect(ctx) as client:
        linked = client.link_slack_user(team, user, key)
    show.print_view(linked, lambda: show.table([linked], USERS), as_json=as_json)


@app.command(epilog=example("interlock slack unlink T012345 U012345"))
def unlink(ctx: typer.Context, team: Team, user: User, as_json: Json = False) -> None:
    """Forget who a Slack user is. Their buttons and commands are refused from then on; the key stays."""
    with connect(ctx) as client:
        linked = client.unlink_slack_user(team, user)
    show.print_view(linked, lambda: f"unlinked {visible(user)}, who acted as {visible(linked.name)}", as_json=as_json)


@app.command(epilog=example("interlock slack users"))
def users(ctx: typer.Context, as_json: Json = False) -> None:
    """List the Slack users that are known here, and whose keys they act with."""
    with connect(ctx) as client:
        page = client.slack_users()
    show.print_page(page, USERS, as_json=as_json)


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
    show.print_view(chosen, lambda: said, as_json=as_json)
