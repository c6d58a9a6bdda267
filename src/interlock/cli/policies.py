"""`interlock policy`: what may be done without asking, what people decide, and trying that out first."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from interlock.cli import decisions, show
from interlock.cli.connection import connect
from interlock.cli.environment import tools_here
from interlock.cli.faults import Faults, fail_on, print_faults, refuse_faults_in
from interlock.cli.options import Json
from interlock.cli.outcome import example
from interlock.cli.text import one_line, parse_input, read_text, visible
from interlock.wire import Role

if TYPE_CHECKING:
    from interlock.governance.policy import CaseResult
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
    """Put a policy in force. It is checked against the server's tools first; every mistake is a line."""
    if backtest and not yes and (as_json or file == "-"):
        raise typer.BadParameter(
            "nobody can be asked with --json or a piped policy; give --yes", param_hint="--backtest"
        )
    text = read_text(file)
    with connect(ctx) as client, _faults_of(file, as_json=as_json):
        tried = client.backtest_policy(text) if backtest else None
        if tried is not None and not as_json:
            show.console().print(_backtest_page(tried))
        if tried is not None and not yes:
            _ask_to_publish()
        published = client.publish_policy(text)
    if as_json:
        more = {"backtest": tried.model_dump(mode="json")} if tried is not None else {}
        show.print_json({**published.model_dump(mode="json", exclude={"text"}), **more})
    else:
        show.console().print(f"version {published.version} is in force, digest {visible(published.digest)}")


def _ask_to_publish() -> None:
    try:
        typer.confirm("Put it in force?", abort=True)
    except typer.Abort:
        raise typer.TyperException("nothing was published; --yes is for where nobody can be asked") from None


@app.command("show", epilog=example("interlock policy show", "interlock policy show --text > shop.cedar"))
def show_policy(
    ctx: typer.Context,
    text_only: Annotated[bool, typer.Option("--text", help="Only its text, to be edited and applied.")] = False,
    as_json: Json = False,
) -> None:
    """Show the policy in force. Version 0 is the one that every tenant starts with."""
    with connect(ctx) as client:
        policy = client.policy()
    if text_only and not as_json:
        text = policy.text or ""
        sys.stdout.write(_readable(text) if sys.stdout.isatty() else text)
    else:
        show.print_view(policy, lambda: _policy_page(policy), as_json=as_json)


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
        show.print_json({"ok": not faults and not failed, "cases": cases, "faults": faults})
    elif faults:
        print_faults(faults)
    else:
        show.console().print(show.table(results, CASES))
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
    role: Annotated[Role, typer.Option(help="The role of whoever starts the run.")] = Role.OPERATOR,
    workflow: Annotated[str, typer.Option(help="The workflow it is asked from.")] = "",
    hour: Annotated[int | None, typer.Option(min=0, max=23, help="The hour of the day; else the current one.")] = None,
    policy: Annotated[str | None, typer.Option(metavar="FILE", help="Judge by this, not by what is in force.")] = None,
    as_json: Json = False,
) -> None:
    """Ask what would be decided about an action, by which rules and why. Nothing is done."""
    values = parse_input(input, param or ())
    text = read_text(policy) if policy is not None else None
    with connect(ctx) as client, _faults_of(policy or "policy", as_json=as_json):
        decision = client.evaluate_policy(tool, values, role=role, workflow=workflow, hour=hour, policy=text)
    show.print_view(decision, lambda: decisions.decision_page(decision), as_json=as_json)


@app.command(
    epilog=example("interlock policy backtest shop.cedar", "interlock policy backtest shop.cedar --limit 5000")
)
def backtest(ctx: typer.Context, file: PolicyFile, limit: Limit = 1000, as_json: Json = False) -> None:
    """Judge past decisions by another policy, and list those that would differ. Nothing is published."""
    text = read_text(file)
    with connect(ctx) as client, _faults_of(file, as_json=as_json):
        tried = client.backtest_policy(text, limit=limit)
    show.print_view(tried, lambda: _backtest_page(tried), as_json=as_json)


CASES: "show.Columns[CaseResult]" = {
    "": lambda case: Text("✓", style="green") if case.passed else Text("✗", style="red"),
    "case": lambda case: one_line(case.name),
    "expected": lambda case: one_line(case.expected),
    "got": lambda case: one_line(case.got),
    "why": lambda case: "" if case.passed else one_line(case.why),
}


def _run_cases(policy_file: str, cases_file: str) -> "tuple[list[CaseResult], Faults]":
    from interlock.engine.policies import facts
    from interlock.errors import DefinitionInvalid
    from interlock.governance.policy import compile_policy, run_cases

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
    """What the server finds wrong with the policy is said with every fault, under the name the file has here."""
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
    return Group(show.table(tried.changes, decisions.DIFFERENCES), "", said) if tried.changes else said


def _policy_page(policy: "Policy") -> RenderableType:
    version = f"{policy.version}" if policy.version else "0, the one that every tenant starts with"
    created = show.moment(policy.created_at) if policy.version else None
    head = show.facts(version=version, digest=visible(policy.digest), created=created)
    return Group(head, "", _readable(policy.text).rstrip()) if policy.text else head


def _readable(text: str) -> str:
    return visible(text.expandtabs(4))
