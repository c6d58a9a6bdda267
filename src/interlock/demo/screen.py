"""The screen: how the demo shows a run to a person, on a terminal or into a pipe."""

import difflib
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from interlock.lifecycle import SETTLED_WELL, STEP, RunState, StepEvent, StepState
from interlock.wire import Approval, Event

WIDEST = 96
NARROWEST = 40
_SUBJECT = 8


def fit(console: Console) -> Console:
    """At most as wide as is pleasant to read; into a pipe as wide as a plain terminal, and in its encoding."""
    console.width = max(NARROWEST, min(console.width, WIDEST)) if console.is_terminal else 80
    if console.options.ascii_only and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return console


def heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def note(console: Console, *parts: str | tuple[str, str]) -> None:
    console.print(Text.assemble("  ", *parts))


def show_event(console: Console, event: Event, since: datetime) -> None:
    """One line: when, what, and what became of it."""
    data = event.data
    line = Text.assemble(
        (f"{(event.at - since).total_seconds():>7.2f}  ", "dim"),
        (f"{data.get('step_key', 'run'):<{_SUBJECT}} ", "bold" if "step_key" in data else "dim"),
    )
    line.append(Text.assemble(*_story(event)))
    console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _story(event: Event) -> Iterable[str | tuple[str, str]]:
    data = event.data
    match data.get("step_key"), event.type:
        case None, "run_created":
            yield from ("accepted for ", (who(data["actor"]), "cyan"))
        case None, _:
            yield from _run_story(data)
        case _, "approval_requested":
            yield from (("waits for a person", "yellow"), f", tier {data['tier']}")
        case _, "approval_resolved":
            good = data["decision"] == "approved"
            yield from ((data["decision"], "green" if good else "red"), " by ", (who(data["actor"]), "cyan"))
        case _:
            yield from _step_story(data)


def _run_story(data: Mapping[str, Any]) -> Iterable[str | tuple[str, str]]:
    match RunState(data["to_state"]):
        case RunState.RUNNING if data["event"] == "start":
            yield f"running on {who(data['actor'])}"
        case RunState.RUNNING:
            yield "ready again for any worker"
        case RunState.WAITING_APPROVAL | RunState.WAITING_EXTERNAL as state:
            yield f"{state}: holds no worker, no thread, no connection"
        case RunState.SUCCEEDED as state:
            yield (state, "bold green")
        case state:
            yield (f"{state}: {data.get('reason')}", "bold red")


def _step_story(data: Mapping[str, Any]) -> Iterable[str | tuple[str, str]]:
    state, took = StepState(data["to_state"]), _milliseconds(data)
    match data["event"]:
        case StepEvent.RETRY:
            yield ("failed, will be tried again", "yellow")
            yield f": {data['error']['message']}"
        case StepEvent.CLAIM:
            yield f"is at work on {who(data['actor'])}"
        case StepEvent.PARK:
            yield "waits for its time"
        case StepEvent.SUCCEED:
            again = f" at attempt {data['attempt']}" if data.get("attempt", 1) > 1 else ""
            yield from ((f"done{again}", "green"), f"{took}  ", (_brief(data.get("output")), "dim"))
        case StepEvent.ARRIVE:
            yield ("its time came", "green")
        case StepEvent.SKIP:
            yield from (("skipped", "dim"), f": {data.get('why')}")
        case _:
            yield (state, "red" if state in STEP.terminal - SETTLED_WELL else "")


def _milliseconds(data: Mapping[str, Any]) -> str:
    return f" in {data['duration_ms']:.0f} ms" if "duration_ms" in data else ""


def _brief(output: Any) -> str:
    """A tool's answer on half a line."""
    return ", ".join(f"{name} {value}" for name, value in output.items()) if isinstance(output, dict) else ""


def who(actor: str) -> str:
    """`you`, `refund-bot`, `timer`, or `worker 3f2a`: an actor without what only the database needs."""
    kind, _, rest = actor.partition(":")
    return f"worker {rest[-4:]}" if kind == "worker" else rest if kind == "system" else kind


# ---------------------------------------------------------------- the question and the answer


def show_question(console: Console, approval: Approval, asked_by: str) -> None:
    body = Text(approval.summary)
    body.append(f"\n\nasked by {asked_by}, tier {approval.tier}", style="dim")
    if approval.expires_at is not None:
        body.append(f", open until {approval.expires_at.astimezone():%H:%M}", style="dim")
    body.append(f"\nbound to this exact action: {approval.action.digest[:24]}", style="dim")
    title = Text("A person has to decide", style="bold yellow")
    console.print()
    console.print(Panel(body, title=title, title_align="left", border_style="yellow", padding=(0, 2)))


def show_changes(console: Console, name: str, before: str, after: str) -> None:
    """What is different in a file now, and a word if nothing is."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm=""))[3:]
    if not lines:
        note(console, (f"{name}: nothing changed", "dim"))
        return
    note(console, (name, "underline"))
    for line in lines:
        if not line.startswith("@@"):
            style = {"+": "green", "-": "red"}.get(line[:1], "dim")
            console.print(Text(f"  {line}", style=style), no_wrap=True, overflow="ellipsis", crop=True)
