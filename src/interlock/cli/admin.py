"""`interlock key`, `interlock tenant` and `interlock usage`: keys with their roles, and tenants with their caps."""

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.exit_codes import example
from interlock.cli.options import Cursor, Json, Limit
from interlock.cli.parsing import visible
from interlock.lifecycle import Term
from interlock.wire import Role

if TYPE_CHECKING:
    from interlock.wire import Key, Tenant, Usage

keys = typer.Typer(
    no_args_is_help=True,
    help="API keys: who may do what.",
    epilog=example("interlock key create ci --role operator"),
)
tenants = typer.Typer(
    no_args_is_help=True,
    help="Tenants: who shares this server.",
    epilog=example("interlock tenant create acme --max-concurrency 20"),
)

_ONCE = "Keep it now: it is not shown again."


KEYS: "formatting.Columns[Key]" = {
    "id": lambda key: key.id,
    "name": lambda key: visible(key.name),
    "role": lambda key: key.role,
    "groups": lambda key: visible(", ".join(key.groups)),
    "workspace": lambda key: visible(key.workspace_id or ""),
    "created": lambda key: formatting.moment(key.created_at),
    "revoked": lambda key: formatting.moment(key.revoked_at),
}

TENANTS: "formatting.Columns[Tenant]" = {
    "id": lambda tenant: tenant.id,
    "name": lambda tenant: visible(tenant.name),
    "caps": lambda tenant: _caps(tenant) or "none",
    "weight": lambda tenant: f"{tenant.weight:g}",
    "created": lambda tenant: formatting.moment(tenant.created_at),
}

USAGE: "formatting.Columns[Usage]" = {
    "tenant": lambda usage: visible(usage.tenant),
    "in flight": lambda usage: _of(usage.in_flight, usage.max_concurrency),
    "ready": lambda usage: f"{usage.ready}+" if usage.ready >= 10_000 else str(usage.ready),
    "runs this minute": lambda usage: _of(usage.runs_this_minute, usage.max_runs_per_min),
    "waiting": lambda usage: str(usage.runs_waiting),
    "writes per run": lambda usage: _of(None, usage.max_writes_per_run),
    "weight": lambda usage: f"{usage.weight:g}",
    "capped workflows": lambda usage: ", ".join(
        f"{visible(found.workflow)} {_of(found.in_flight, found.max_concurrency)}, {found.waiting} waiting"
        for found in usage.workflows
    ),
}


def _caps(tenant: "Tenant") -> str:
    found = {
        "runs in flight": tenant.max_concurrency,
        "runs per minute": tenant.max_runs_per_min,
        "writes per run": tenant.max_writes_per_run,
    }
    return ", ".join(f"{most} {what}" for what, most in found.items() if most is not None)


def _of(used: int | None, most: int | None) -> str:
    if used is None:
        return str(most) if most is not None else "any"
    return f"{used} of {most}" if most is not None else str(used)


def _explained(terms: type[Term]) -> str:
    return " ".join(f"{term}: {term.doc}" for term in terms)


@keys.command(
    "create",
    epilog=example(
        "interlock key create ci --role operator", "interlock key create ann --role approver --group finance"
    ),
)
def create_key(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    role: Annotated[Role, typer.Option(help=_explained(Role))],
    workspace: Annotated[str | None, typer.Option(help="Only within this workspace.")] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="A group it belongs to, for rules that name who decides; can be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create an API key. Its secret is shown once."""
    with connect(ctx) as client:
        key = client.create_key(name, role, workspace_id=workspace, groups=group or ())
    page = formatting.facts(
        id=key.id,
        name=visible(key.name),
        role=key.role,
        groups=visible(", ".join(key.groups)),
        key=key.key,
        note=_ONCE,
    )
    formatting.print_view(key, lambda: page, as_json=as_json)


@keys.command("list", epilog=example("interlock key list"))
def list_keys(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List the API keys of this tenant, without their secrets."""
    with connect(ctx) as client:
        page = client.keys(limit=limit, cursor=cursor)
    formatting.print_page(page, KEYS, as_json=as_json)


@keys.command("revoke", epilog=example("interlock key revoke 01990000-0000-7000-8000-000000000000"))
def revoke_key(
    ctx: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, not its secret.")],
    as_json: Json = False,
) -> None:
    """Revoke a key, at once."""
    with connect(ctx) as client:
        client.revoke_key(key_id)
    if as_json:
        formatting.print_json({"id": key_id, "revoked": True})
    else:
        formatting.console().print(f"revoked {key_id}")


@tenants.command(
    "create",
    epilog=example(
        "interlock tenant create acme --max-concurrency 20 --weight 2",
        "interlock tenant create acme --max-runs-per-min 60 --max-writes-per-run 10",
    ),
)
def create_tenant(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, dots and dashes.")],
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="The most runs in flight.")] = None,
    max_runs_per_min: Annotated[
        int | None, typer.Option(min=1, help="The most runs that start in a minute; others wait.")
    ] = None,
    max_writes_per_run: Annotated[int | None, typer.Option(min=1, help="The most writes of one run.")] = None,
    weight: Annotated[float, typer.Option(help="Its share of busy workers, relative to others.")] = 1,
    as_json: Json = False,
) -> None:
    """Create a tenant with its first admin key. Only admins of the tenant `default` may."""
    with connect(ctx) as client:
        tenant = client.create_tenant(
            name,
            max_concurrency=max_concurrency,
            max_runs_per_min=max_runs_per_min,
            max_writes_per_run=max_writes_per_run,
            weight=weight,
        )
    page = formatting.facts(
        id=tenant.id,
        name=visible(tenant.name),
        caps=_caps(tenant),
        admin_key=tenant.key,
        note=_ONCE if tenant.key else None,
    )
    formatting.print_view(tenant, lambda: page, as_json=as_json)


@tenants.command("list", epilog=example("interlock tenant list"))
def list_tenants(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List the tenants."""
    with connect(ctx) as client:
        page = client.tenants(limit=limit, cursor=cursor)
    formatting.print_page(page, TENANTS, as_json=as_json)


def _cap(name: str, given: str) -> int | None:
    if given == "none":
        return None
    if not given.isdecimal() or int(given) < 1:
        option = f"--{name.replace('_', '-')}"
        raise typer.BadParameter(f"expected a whole number above zero, or none, not {given!r}", param_hint=option)
    return int(given)


Cap = Annotated[str | None, typer.Option(metavar="N|none", help="A new cap, or none.")]


@tenants.command(
    "update",
    epilog=example(
        "interlock tenant update acme --max-runs-per-min 120", "interlock tenant update acme --max-concurrency none"
    ),
)
def update_tenant(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The tenant's name.")],
    max_concurrency: Cap = None,
    max_runs_per_min: Cap = None,
    max_writes_per_run: Cap = None,
    weight: Annotated[float | None, typer.Option(help="Its share of busy workers, relative to others.")] = None,
    as_json: Json = False,
) -> None:
    """Change a tenant's caps and weight; omitted options keep their value. Only admins of the tenant `default` may."""
    caps = {
        "max_concurrency": max_concurrency,
        "max_runs_per_min": max_runs_per_min,
        "max_writes_per_run": max_writes_per_run,
    }
    changes: dict[str, int | float | None] = {cap: _cap(cap, given) for cap, given in caps.items() if given is not None}
    if weight is not None:
        changes["weight"] = weight
    if not changes:
        raise typer.BadParameter("say what to change, --max-concurrency 20 for one")
    with connect(ctx) as client:
        tenant = client.update_tenant(name, changes)
    formatting.print_view(tenant, lambda: formatting.table([tenant], TENANTS), as_json=as_json)


def register(app: typer.Typer) -> None:
    app.command(epilog=example("interlock usage", "interlock usage --json"))(usage)


def usage(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """Show the tenant's current usage of its caps; admins of the tenant `default` see every tenant."""
    with connect(ctx) as client:
        page = client.usage(limit=limit, cursor=cursor)
    formatting.print_page(page, USAGE, as_json=as_json)
