"""How a run is shown: its page, its steps, and its events, a line each."""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from interlock.cli import show
from interlock.cli.text import visible
from interlock.lifecycle import SETTLED_WELL, RunState

if TYPE_CHECKING:
    from interlock.wire import Compensation, Event, Run, Step

STEPS: "show.Columns[Step]" = {
    "step": lambda step: visible(step.key),
    "does": lambda step: visible(step.tool or step.kind) + (f" on {visible(step.runs_on)}" if step.runs_on else ""),
    "status": lambda step: Text("retrying", style="yellow") if step.retrying else show.word(step.status),
    "tries": lambda step: f"{step.attempt}/{step.max_attempts}" if step.attempt else "",
    "took": lambda step: show.took(step.started_at, step.completed_at) if step.attempt or step.completed_at else "",
    "note": lambda step: _note(step),
}

COMPENSATION: "show.Columns[Compensation]" = {
    "undo": lambda step: visible(step.undoes),
    **{name: STEPS[name] for name in ("does", "status", "tries", "took", "note")},
}


def _note(step: "Step") -> str:
    if step.retrying:
        at = f"retrying at {show.clock(step.next_run_at)}" if step.next_run_at else "retrying"
        return f"{at}: {show.brief(step.last_error)}" if step.last_error else at
    if (awaited := step.waits_for) is not None:
        until = (
            f" until {show.moment(datetime.fromisoformat(awaited['timeout_at']))}" if awaited.get("timeout_at") else ""
        )
        return f"waits for {show.cell(awaited['event'])} {show.cell(awaited['correlation'])}{until}"
    return show.brief(step.last_error) if step.status not in SETTLED_WELL else ""


def run_page(run: "Run") -> RenderableType:
    head = show.facts(
        run=run.id,
        workflow=visible(f"{run.workflow}@{run.workflow_version}"),
        status=_status(run),
        waiting_for=Text(visible(run.waiting_for), style="yellow") if run.waiting_for else None,
        error=Text(show.brief(run.error), style="red") if run.error else None,
        trigger=visible(" ".join(filter(None, (run.trigger.source, run.trigger.ref)))),
        created=show.moment(run.created_at),
        took=show.took(run.created_at, run.completed_at),
        cost=f"${run.cost_usd:.4f}" if run.cost_usd else None,
        resumed_from=run.resumed_from,
        parent=run.parent_run_id,
        resumed=show.times(run.resume_count) if run.resume_count else None,
        heartbeat=show.moment(run.last_heartbeat_at),
        input=show.cell(run.input) if run.input else None,
        result=show.cell(run.result) if run.result is not None else None,
    )
    parts: list[RenderableType] = [head]
    if waiting := to_decide(run):
        parts += ["", waiting]
    if run.steps:
        parts += ["", show.table(run.steps, STEPS)]
    if run.compensation:
        parts += ["", show.table(run.compensation, COMPENSATION)]
    return Group(*parts)


def to_decide(run: "Run") -> Text | None:
    """What somebody types for a run that waits for people."""
    if run.status is not RunState.WAITING_APPROVAL:
        return None
    return Text(f"to decide: interlock run approve {run.id}", style="yellow")


def _status(run: "Run") -> Text:
    said = Text.assemble(show.word(run.status), (f"  {run.reason}" if run.reason else "", "dim"))
    return said.append(f"  {(run.reason or run.status).doc}", style="dim")


def print_event(out: Console, event: "Event") -> None:
    """One line: at a terminal what fits, into a pipe all of it."""
    out.print(_event_line(event), no_wrap=True, overflow="ellipsis")


def _event_line(event: "Event") -> str:
    return f"{event.seq:>4}  {show.clock(event.at)}  {event.type:<18}  {_what(event.data)}".rstrip()


def _what(data: Mapping[str, Any]) -> str:
    """`review: running → waiting_approval  attempt=1`, or simply every field."""
    rest = {name: value for name, value in data.items() if value not in (None, "", {}, [])}
    rest.pop("context", None)  # for programs; people have the actor
    step, source, target = rest.pop("step_key", None), rest.pop("from_state", None), rest.pop("to_state", None)
    move = f"{source} → {target}" if source and target else target or ""
    if "actor" in rest:  # first: it is what people ask for
        rest = {"by": show.who(str(rest.pop("actor")))} | rest
    head = ": ".join(show.cell(part) for part in (step, move) if part)
    return "  ".join(
        filter(None, (head, " ".join(f"{visible(name)}={show.cell(value)}" for name, value in rest.items())))
    )
