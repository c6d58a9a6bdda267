"""`interlock workflow`: check definitions, publish them, and show published ones."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.diagnostics import applied, check, warn_of_older
from interlock.cli.exit_codes import example
from interlock.cli.options import Against, AllowUnknownTools, Cursor, Files, Json, Limit, OneVersion, Version
from interlock.cli.parsing import visible

if TYPE_CHECKING:
    from interlock.definition import Plan
    from interlock.wire import Workflow

app = typer.Typer(
    no_args_is_help=True,
    help="Check workflow definitions, publish them, look at what is published.",
    epilog=example("interlock workflow validate refund.yaml", "interlock workflow apply refund.yaml"),
)


WORKFLOWS: "formatting.Columns[Workflow]" = {
    "name": lambda workflow: visible(workflow.name),
    "version": lambda workflow: str(workflow.version),
    "digest": lambda workflow: workflow.digest[:19],
    "created": lambda workflow: formatting.moment(workflow.created_at),
}


VERSIONS: "formatting.Columns[Workflow]" = {
    "version": lambda workflow: str(workflow.version),
    "digest": lambda workflow: workflow.digest[:19],
    "created": lambda workflow: formatting.moment(workflow.created_at),
    "by": lambda workflow: visible(workflow.created_by or ""),
}

Name = Annotated[str, typer.Argument(help="The workflow's name.")]


@app.command(epilog=example("interlock workflow apply workflows/*.yaml"))
def apply(
    ctx: typer.Context, files: Files, allow_unknown_tools: AllowUnknownTools = False, as_json: Json = False
) -> None:
    """Publish workflows. The same content again stays the same version."""
    from interlock.wire import Page, Workflow

    with connect(ctx) as client:
        publish = partial(client.apply_workflow, allow_unknown_tools=allow_unknown_tools)
        published = [applied(name, publish, as_json=as_json) for name in files]
        warn_of_older(published, client.workflow)
    formatting.print_page(Page[Workflow](items=published), WORKFLOWS, as_json=as_json)


@app.command(epilog=example("interlock workflow validate refund.yaml", "interlock workflow validate - < refund.yaml"))
def validate(files: Files, as_json: Json = False) -> None:
    """Check definitions without a server; every mistake is a line file:line: path: message.

    Tools and their arguments are checked against those that INTERLOCK_TOOLS names.
    """
    from interlock.definition import parse

    check(files, parse, _summary, as_json=as_json)


@app.command("list", epilog=example("interlock workflow list"))
def list_workflows(ctx: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List published workflows with their newest version."""
    with connect(ctx) as client:
        page = client.workflows(limit=limit, cursor=cursor)
    formatting.print_page(page, WORKFLOWS, as_json=as_json)


@app.command("show", epilog=example("interlock workflow show refund --version 2"))
def show_workflow(
    ctx: typer.Context,
    name: Name,
    version: Version = None,
    as_json: Json = False,
) -> None:
    """Show a published workflow and its source."""
    with connect(ctx) as client:
        workflow = client.workflow(name, version)
    formatting.print_view(workflow, lambda: _page(workflow), as_json=as_json)


@app.command(epilog=example("interlock workflow versions refund"))
def versions(ctx: typer.Context, name: Name, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False) -> None:
    """List the versions of a workflow or agent, newest first. New runs start with the newest."""
    with connect(ctx) as client:
        page = client.workflow_versions(name, limit=limit, cursor=cursor)
    formatting.print_page(page, VERSIONS, as_json=as_json)


@app.command(epilog=example("interlock workflow diff refund 3", "interlock workflow diff refund 3 --against 1"))
def diff(ctx: typer.Context, name: Name, version: OneVersion, against: Against = None, as_json: Json = False) -> None:
    """Compare a version with the one before it, or with another one."""
    with connect(ctx) as client:
        found = client.compare_workflow(name, version, against)
    formatting.print_view(found, lambda: formatting.difference(found), as_json=as_json)


@app.command(epilog=example("interlock workflow rollback refund 2"))
def rollback(ctx: typer.Context, name: Name, version: OneVersion, as_json: Json = False) -> None:
    """Publish the content of an earlier version as a new one. Runs that already started keep their version."""
    with connect(ctx) as client:
        published = client.roll_back_workflow(name, version)
    said = (
        f"Version {published.version} of {visible(name)} has the content of version {version}. New runs start with it."
    )
    formatting.print_view(published, lambda: said, as_json=as_json)


def _summary(plan: "Plan") -> str:
    steps = " → ".join(f"{step.key} ({step.tool or step.kind})" for step in plan.steps)
    count = "1 step" if len(plan.steps) == 1 else f"{len(plan.steps)} steps"
    return f"{plan.name} is valid: {count}: {steps}"


def _page(workflow: "Workflow") -> RenderableType:
    head = formatting.facts(
        workflow=visible(workflow.name),
        version=str(workflow.version),
        digest=visible(workflow.digest),
        created=formatting.moment(workflow.created_at),
    )
    return formatting.with_source(head, workflow.source)
