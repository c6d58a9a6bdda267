"""`interlock workflow`: check definitions, publish them, look at what is published."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from interlock.cli import show
from interlock.cli.connection import connect
from interlock.cli.faults import applied, check, warn_of_older
from interlock.cli.options import Cursor, Files, Json, Limit, Version
from interlock.cli.outcome import example
from interlock.cli.text import visible

if TYPE_CHECKING:
    from interlock.definition import Plan
    from interlock.wire import Workflow

app = typer.Typer(
    no_args_is_help=True,
    help="Check workflow definitions, publish them, look at what is published.",
    epilog=example("interlock workflow validate refund.yaml", "interlock workflow apply refund.yaml"),
)


WORKFLOWS: "show.Columns[Workflow]" = {
    "name": lambda workflow: visible(workflow.name),
    "version": lambda workflow: str(workflow.version),
    "digest": lambda workflow: workflow.digest[:19],
    "created": lambda workflow: show.moment(workflow.created_at),
}


@app.command(epilog=example("interlock workflow apply workflows/*.yaml"))
def apply(ctx: typer.Context, files: Files, as_json: Json = False) -> None:
    """Publish workflows. The same content again stays the same version."""
    from interlock.wire import Page, Workflow

    with connect(ctx) as client:
        published = [applied(name, client.apply_workflow, as_json=as_json) for name in files]
        warn_of_older(published, client.workflow)
    show.print_page(Page[Workflow](items=published), WORKFLOWS, as_json=as_json)


@app.command(epilog=example("interlock workflow validate refund.yaml", "interlock workflow validate - < refund.yaml"))
def validate(files: Files, as_json: Json = False) -> None:
    """Check definitions without a server; every mistake is a line file:line: path: message."""
    from interlock.definition import parse

    check(files, parse, _summary, as_json=as_json)


@app.command("list", epilog=example("interlock workflow list"))
def list_workflows(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List published workflows with their newest version."""
    with connect(ctx) as client:
        page = client.workflows(limit=limit, cursor=cursor)
    show.print_page(page, WORKFLOWS, as_json=as_json)


@app.command("show", epilog=example("interlock workflow show refund --version 2"))
def show_workflow(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The workflow's name.")],
    version: Version = None,
    as_json: Json = False,
) -> None:
    """Show a published workflow and its source."""
    with connect(ctx) as client:
        workflow = client.workflow(name, version)
    show.print_view(workflow, lambda: _page(workflow), as_json=as_json)


def _summary(plan: "Plan") -> str:
    steps = " → ".join(f"{step.key} ({step.tool or step.kind})" for step in plan.steps)
    count = "1 step" if len(plan.steps) == 1 else f"{len(plan.steps)} steps"
    return f"{plan.name} is valid: {count}: {steps}"


def _page(workflow: "Workflow") -> RenderableType:
    head = show.facts(
        workflow=visible(workflow.name),
        version=str(workflow.version),
        digest=visible(workflow.digest),
        created=show.moment(workflow.created_at),
    )
    return show.with_source(head, workflow.source)
