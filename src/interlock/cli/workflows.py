"""`interlock workflow`: check definitions, publish them, look at what is published."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.faults import fail_on, print_faults, refuse_faults_in
from interlock.cli.outcome import example
from interlock.cli.text import read_text, visible

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.definition import Plan
    from interlock.wire import Workflow

app = typer.Typer(
    no_args_is_help=True,
    help="Check workflow definitions, publish them, look at what is published.",
    epilog=example("interlock workflow validate refund.yaml", "interlock workflow apply refund.yaml"),
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="YAML files; - reads what is piped in.")]


@app.command(epilog=example("interlock workflow apply workflows/*.yaml"))
def apply(ctx: typer.Context, files: Files, as_json: Json = False) -> None:
    """Publish workflows. The same content again stays the same version."""
    from interlock.wire import Page, Workflow

    with connect(ctx) as client:
        published = [_publish(client, name) for name in files]
    show.print_page(Page[Workflow](items=published), show.WORKFLOWS, as_json=as_json)


@app.command(epilog=example("interlock workflow validate refund.yaml", "interlock workflow validate - < refund.yaml"))
def validate(files: Files, as_json: Json = False) -> None:
    """Check definitions without a server; every mistake is a line file:line: path: message."""
    faults: list[dict[str, Any]] = []
    for name in files:
        faults += _check(name, quiet=as_json)
    if as_json:
        show.print_json({"ok": not faults, "faults": faults})
    else:
        print_faults(faults)
    fail_on(faults)


@app.command("list", epilog=example("interlock workflow list"))
def list_workflows(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the last list ended.")] = None,
    as_json: Json = False,
) -> None:
    """List published workflows with their newest version."""
    with connect(ctx) as client:
        page = client.workflows(limit=limit, cursor=cursor)
    show.print_page(page, show.WORKFLOWS, as_json=as_json)


@app.command("show", epilog=example("interlock workflow show refund --version 2"))
def show_workflow(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The workflow's name.")],
    version: Annotated[int | None, typer.Option(min=1, help="Another version than the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Show a published workflow and its source."""
    with connect(ctx) as client:
        workflow = client.workflow(name, version)
    show.print_view(workflow, lambda: _page(workflow), as_json=as_json)


def _publish(client: "Client", name: str) -> "Workflow":
    from interlock.client import ApiError

    try:
        return client.apply_workflow(read_text(name))
    except ApiError as error:
        refuse_faults_in(error, name)
        raise


def _check(name: str, *, quiet: bool) -> list[dict[str, Any]]:
    from interlock.definition import parse
    from interlock.errors import DefinitionInvalid

    text = read_text(name)
    try:
        plan = parse(text, file=name)
    except DefinitionInvalid as invalid:
        return [fault.as_dict() for fault in invalid.faults]
    if not quiet:
        show.console().print(_summary(name, plan))
    return []


def _summary(name: str, plan: "Plan") -> str:
    steps = " → ".join(f"{step.key} ({step.tool or step.kind})" for step in plan.steps)
    return visible(f"{name}: {plan.name} is valid: {len(plan.steps)} steps: {steps}")


def _page(workflow: "Workflow") -> RenderableType:
    head = show.facts(
        workflow=visible(workflow.name),
        version=str(workflow.version),
        digest=visible(workflow.digest),
        created=show.moment(workflow.created_at),
    )
    if workflow.source is None:
        return head
    import yaml

    return Group(head, "", visible(yaml.safe_dump(workflow.source, sort_keys=False, allow_unicode=True).rstrip()))
