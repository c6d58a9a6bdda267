"""`interlock policy`: publish, test and compare policies."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from interlock.cli import approval_views, formatting
from interlock.cli.connection import connect
from interlock.cli.diagnostics import Faults, fail_on, print_faults, refuse_faults_in
from interlock.cli.environment import tools_here
from interlock.cli.exit_codes import example
from interlock.cli.options import Against, Cursor, Json, OneVersion
from interlock.cli.options import Limit as PageLimit
from interlock.cli.parsing import one_line, parse_input, read_text, visible
from interlock.wire import Role

if TYPE_CHECKING:
    from interlock.policy.policy import CaseResult
    from interlock.wire import Backtested, Policy

app = typer.Typer(
    no_args_is_help=True,
    help="What may be done without asking, and what people decide.",
    epilog=example("interlock policy test shop.cedar", "interlock policy apply shop.cedar --backtest"),
)

PolicyFile = Annotated[str, typer.Argument(metavar="FILE", help="A policy in Cedar; - reads what is piped in.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many recorded decisions, newest first.")]


@app.command(epilog=example("interlock policy apply shop.cedar", "interlock policy apply shop.cedar --backtest"))
def apply(
    ctx: typer.Context,
    file: PolicyFile,
    backtest: Annotated[
        bool, typer.Option("--backtest", help="Show first what would have been decided differently, and ask.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Put a policy in force. It is checked against the server's tools first; every mistake is a line.

    If it lets more pass than the policy in force, the command shows examples and asks. Scripts give --yes.
    """
    can_ask = not as_json and file != "-"
    if backtest and not yes and not can_ask:
        raise typer.BadParameter(
            "With --json or a piped policy nobody can be asked. Give --yes.", param_hint="--backtest"
        )
    text = read_text(file)
    with connect(ctx) as client, _faults_of(file, as_json=as_json):
        tried = client.backtest_policy(text) if backtest or not yes else None
        if tried is not None and backtest and not as_json:
            formatting.console().print(_backtest_page(tried))
        if tried is not None and not yes:
            _ask_to_publish(tried, always=backtest, can_ask=can_ask)
        published = client.publish_policy(text)
    if as_json:
        more = {"backtest": tried.model_dump(mode="json")} if tried is not None and backtest else {}
        formatting.print_json({**published.model_dump(mode="json", exclude={"text"}), **more})
    else:
        formatting.console().print(f"version {published.version} is in force, digest {visible(published.digest)}")


def _ask_to_publish(tried: "Backtested", *, always: bool, can_ask: bool) -> None:
    """Ask if the policy lets more pass than the one in force, or `always`. Without a terminal, --yes is required."""
    if not (always or tried.passes_more):
        return
    if not can_ask:
        raise typer.TyperException(
            "This policy lets more pass than the one in force, so nothing was published. Read what "
            "`interlock policy backtest FILE` shows, and give --yes."
        )
    if tried.passes_more:
        formatting.console().print(_loosened_page(tried))
    try:
        typer.confirm("Put it in force?", abort=True)
    except typer.Abort:
        raise typer.TyperException("Nothing was published. To publish without a question, give --yes.") from None


def _loosened_page(tried: "Backtested") -> RenderableType:
    """Return examples of what needs less than before: made-up actions first, then recorded ones."""
    less = [*tried.loosened, *(change for change in tried.changes if change.passes_more)][:_MOST_EXAMPLES]
    said = Text("This policy lets more pass than the one in force. For example:", style="yellow")
    after = "These are examples. An action that depends on several conditions at the same time may pass too."
    return Group(said, "", formatting.table(less, approval_views.LOOSENED), "", after)


@app.command(epilog=example("interlock policy rollback 3", "interlock policy rollback 3 --yes"))
def rollback(
    ctx: typer.Context,
    version: OneVersion,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Put the text of an earlier version in force again, as a new version."""
    with connect(ctx) as client, _faults_of(f"version {version}", as_json=as_json):
        if not yes:
            text = client.policy_version(version).text or ""
            _ask_to_publish(client.backtest_policy(text), always=False, can_ask=not as_json)
        published = client.roll_back_policy(version)
    said = f"version {published.version} is in force; it has the text of version {version}"
    formatting.print_view(published, lambda: said, as_json=as_json)


@app.command(
    "show",
    epilog=example(
        "interlock policy show", "interlock policy show --version 2", "interlock policy show --text > shop.cedar"
    ),
)
def show_policy(
    ctx: typer.Context,
    version: Annotated[int | None, typer.Option(min=0, help="Another version than the one in force.")] = None,
    text_only: Annotated[bool, typer.Option("--text", help="Only its text, to be edited and applied.")] = False,
    as_json: Json = False,
) -> None:
    """Show the policy in force. Version 0 is the built-in policy."""
    with connect(ctx) as client:
        policy = client.policy() if version is None else client.policy_version(version)
    if text_only and not as_json:
        text = policy.text or ""
        sys.stdout.write(_readable(text) if sys.stdout.isatty() else text)
    else:
        formatting.print_view(policy, lambda: _policy_page(policy), as_json=as_json)


@app.command(epilog=example("interlock policy versions", "interlock policy versions --digest 3f6c…"))
def versions(
    ctx: typer.Context,
    digest: Annotated[str | None, typer.Option(help="Only versions with this digest, as evidence names it.")] = None,
    limit: PageLimit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List the versions of the policy, newest first."""
    with connect(ctx) as client:
        page = client.policy_versions(digest=digest, limit=limit, cursor=cursor)
    formatting.print_page(page, VERSIONS, as_json=as_json)


@app.command(epilog=example("interlock policy diff 3", "interlock policy diff 3 --against 1"))
def diff(ctx: typer.Context, version: OneVersion, against: Against = None, as_json: Json = False) -> None:
    """Compare a version with the one before it, or with another one."""
    with connect(ctx) as client:
        found = client.compare_policy(version, against)
    formatting.print_view(found, lambda: formatting.difference(found), as_json=as_json)


@app.command("test", epilog=example("INTERLOCK_TOOLS=shop.py interlock policy test shop.cedar shop.cases.yaml"))
def run_cases_of(
    policy_file: Annotated[str, typer.Argument(metavar="POLICY", help="A policy in Cedar.")],
    cases_file: Annotated[
        str | None, typer.Argument(metavar="CASES", help="Cases in YAML; else POLICY's name with .cases.yaml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check what a policy answers, without a server, with the tools of INTERLOCK_TOOLS. Fails if a case does."""
    results, faults = _run_cases(policy_file, cases_file or _cases_next_to(policy_file))
    failed = sum(not result.passed for result in results)
    if as_json:
        cases = [asdict(result) for result in results]
        formatting.print_json({"ok": not faults and not failed, "cases": cases, "faults": faults})
    elif faults:
        print_faults(faults)
    else:
        formatting.console().print(formatting.table(results, CASES))
    fail_on(faults)
    if failed:
        raise typer.TyperException(f"{failed} of {len(results)} cases failed")


@app.command(
    epilog=example(
        "interlock policy evaluate shop.refund --param amount=250",
        "interlock policy evaluate shop.refund --param amount=50 --hour 23 --policy shop.cedar",
    )
)
def evaluate(
    ctx: typer.Context,
    tool: Annotated[str, typer.Argument(help="The tool's name.")],
    input: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="Its input, a JSON object.")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="One field of the input.")] = None,
    role: Annotated[Role, typer.Option(help="The role of the key that starts the run.")] = Role.OPERATOR,
    group: Annotated[list[str] | None, typer.Option(help="A group of that key; repeatable.")] = None,
    workflow: Annotated[str, typer.Option(help="The workflow it is asked from.")] = "",
    hour: Annotated[int | None, typer.Option(min=0, max=23, help="The hour of the day; else the current one.")] = None,
    policy: Annotated[str | None, typer.Option(metavar="FILE", help="Judge by this, not by what is in force.")] = None,
    as_json: Json = False,
) -> None:
    """Show the decision on an action, with the rules and the reasons. Nothing is executed."""
    values = parse_input(input, param or ())
    text = read_text(policy) if policy is not None else None
    with connect(ctx) as client, _faults_of(policy or "policy", as_json=as_json):
        decision = client.evaluate_policy(
            tool, values, role=role, groups=group or (), workflow=workflow, hour=hour, policy=text
        )
    formatting.print_view(decision, lambda: approval_views.decision_page(decision), as_json=as_json)


@app.command(
    epilog=example("interlock policy backtest shop.cedar", "interlock policy backtest shop.cedar --limit 5000")
)
def backtest(ctx: typer.Context, file: PolicyFile, limit: Limit = 1000, as_json: Json = False) -> None:
    """Evaluate past decisions under another policy, and list those that would differ. Nothing is published."""
    text = read_text(file)
    with connect(ctx) as client, _faults_of(file, as_json=as_json):
        tried = client.backtest_policy(text, limit=limit)
    pages = [_backtest_page(tried)] + ([_loosened_page(tried)] if tried.passes_more else [])
    formatting.print_view(tried, lambda: Group(*pages), as_json=as_json)


_MOST_EXAMPLES = 12

VERSIONS: "formatting.Columns[Policy]" = {
    "version": lambda policy: str(policy.version),
    "in force": lambda policy: Text("yes", style="green") if policy.in_force else "",
    "digest": lambda policy: policy.digest[:19],
    "created": lambda policy: formatting.moment(policy.created_at) if policy.created_at else "",
    "by": lambda policy: visible(policy.created_by or ""),
}

CASES: "formatting.Columns[CaseResult]" = {
    "": lambda case: Text("✓", style="green") if case.passed else Text("✗", style="red"),
    "case": lambda case: one_line(case.name),
    "expected": lambda case: one_line(case.expected),
    "got": lambda case: one_line(case.got),
    "why": lambda case: "" if case.passed else one_line(case.why),
}


def _run_cases(policy_file: str, cases_file: str) -> "tuple[list[CaseResult], Faults]":
    from interlock.engine.policies import facts
    from interlock.errors import DefinitionInvalid
    from interlock.policy.policy import compile_policy, run_cases

    policy_text, cases_text = read_text(policy_file), read_text(cases_file)
    tools = facts(tools_here())
    if not tools:
        raise typer.TyperException("there are no tools to judge; name their files in INTERLOCK_TOOLS")
    try:
        policy = compile_policy(policy_text, tools, file=policy_file)
        return run_cases(policy, cases_text, tools, file=cases_file), []
    except DefinitionInvalid as invalid:
        return [], [fault.as_dict() for fault in invalid.faults]


def _cases_next_to(policy_file: str) -> str:
    if policy_file == "-":
        raise typer.BadParameter("a piped policy has no cases next to it; name their file", param_hint="CASES")
    return str(Path(policy_file).with_suffix(".cases.yaml"))


@contextmanager
def _faults_of(name: str, *, as_json: bool) -> Iterator[None]:
    """Print every fault that the server finds in the policy, under the name that the file has here."""
    from interlock.client import ApiError

    try:
        yield
    except ApiError as error:
        refuse_faults_in(error, name, as_json=as_json)
        raise


def _backtest_page(tried: "Backtested") -> RenderableType:
    if not tried.decisions:
        return "nothing has been decided yet, so there is nothing to compare with"
    said = f"{tried.changed or 'none'} of {tried.decisions} recorded decisions would differ"
    return Group(formatting.table(tried.changes, approval_views.DIFFERENCES), "", said) if tried.changes else said


def _policy_page(policy: "Policy") -> RenderableType:
    version = f"{policy.version}" if policy.version else "0, the one that every tenant starts with"
    created = formatting.moment(policy.created_at) if policy.version else None
    head = formatting.facts(version=version, digest=visible(policy.digest), created=created)
    return Group(head, "", _readable(policy.text).rstrip()) if policy.text else head


def _readable(text: str) -> str:
    return visible(text.expandtabs(4))
