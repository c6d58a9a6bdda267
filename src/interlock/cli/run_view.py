"""Views of a run: its page, its steps, and its events, one line each."""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from interlock.cli import formatting
from interlock.cli.parsing import visible
from interlock.lifecycle import SETTLED_WELL, RunState

if TYPE_CHECKING:
    from interlock.wire import Compensation, Event, Run, Step

STEPS: "formatting.Columns[Step]" = {
    "step": lambda step: visible(step.key),
    "does": lambda step: visible(step.tool or step.kind) + (f" on {visible(step.runs_on)}" if step.runs_on else ""),
    "status": lambda step: Text("retrying", style="yellow") if step.retrying else formatting.word(step.status),
    "tries": lambda step: f"{step.attempt}/{step.max_attempts}" if step.attempt else "",
    "took": lambda step: _took(step),
    "note": lambda step: _note(step),
}

COMPENSATION: "formatting.Columns[Compensation]" = {
    "undo": lambda step: visible(step.undoes),
    **{name: STEPS[name] for name in ("does", "status", "tries", "took", "note")},
}


def _took(step: "Step") -> str:
    """Return the duration of the last attempt.

    The end of an earlier one may be unknown, because its worker was lost.
    """
    if step.duration_ms is not None:
        return formatting.span(step.duration_ms / 1000)
    return formatting.took(step.started_at, step.completed_at) if step.attempt or step.completed_at else ""


def _note(step: "Step") -> str:
    if step.retrying:
        at = f"retrying at {formatting.moment(step.next_run_at)}" if step.next_run_at else "retrying"
        return f"{at}: {formatting.brief(step.last_error)}" if step.last_error else at
    if (awaited := step.waits_for) is not None:
        until = (
            f" until {formatting.moment(datetime.fromisoformat(awaited['timeout_at']))}"
            if awaited.get("timeout_at")
            else ""
        )
        return f"waits for {formatting.cell(awaited['event'])} {formatting.cell(awaited['correlation'])}{until}"
    return formatting.brief(step.last_error) if step.status not in SETTLED_WELL else ""


def run_page(run: "Run") -> RenderableType:
    head = formatting.facts(
        run=run.id,
        workflow=visible(f"{run.workflow}@{run.workflow_version}"),
        status=_status(run),
        waiting_for=Text(visible(run.waiting_for), style="yellow") if run.waiting_for else None,
        error=Text(formatting.error(run.error), style="red") if run.error else None,
        trigger=visible(" ".join(filter(None, (run.trigger.source, run.trigger.ref)))),
        created=formatting.moment(run.created_at),
        took=formatting.took(run.created_at, run.completed_at),
        cost=f"${run.cost_usd:.4f}" if run.cost_usd else None,
        resumed_from=run.resumed_from,
        parent=run.parent_run_id,
        resumed=formatting.times(run.resume_count) if run.resume_count else None,
        heartbeat=formatting.moment(run.last_heartbeat_at),
        input=formatting.cell(run.input) if run.input else None,
        result=formatting.cell(run.result) if run.result is not None else None,
    )
    parts: list[RenderableType] = [head]
    if waiting := to_decide(run):
        parts += ["", waiting]
    if run.steps:
        parts += ["", formatting.table(run.steps, STEPS)]
    if run.compensation:
        parts += ["", formatting.table(run.compensation, COMPENSATION)]
    return Group(*parts)


def to_decide(run: "Run") -> Text | None:
    """Return the command for a run that waits for people. It lists the approvals and their approvers."""
    if run.status is not RunState.WAITING_APPROVAL:
        return None
    return Text(f"to decide: interlock approval list --run {run.id}", style="yellow")


def _status(run: "Run") -> Text:
    said = Text.assemble(formatting.word(run.status), (f"  {run.reason}" if run.reason else "", "dim"))
    return said.append(f"  {(run.reason or run.status).doc}", style="dim")


def print_event(out: Console, event: "Event") -> None:
    """Print one line: cut to the width of a terminal, complete in a pipe."""
    out.print(_event_line(event), no_wrap=True, overflow="ellipsis")


def _event_line(event: "Event") -> str:
    return f"{event.seq:>4}  {formatting.moment(event.at)}  {event.type:<18}  {_what(event.data)}".rstrip()


def _what(data: Mapping[str, Any]) -> str:
    """Return `review: running → waiting_approval  attempt=1`, or every field if the event is not a transition."""
    rest = {name: value for name, value in data.items() if value not in (None, "", {}, [])}
    rest.pop("context", None)  # for programs; people see the actor
    for name in ("decision", "policy_digest"):  # the approval's page has them
        rest.pop(name, None)
    declared = rest.pop("declares", None) or {}
    if "tool" in declared:  # the JSON has the whole declaration
        rest["tool"] = declared["tool"]
    step, source, target = rest.pop("step_key", None), rest.pop("from_state", None), rest.pop("to_state", None)
    move = f"{source} → {target}" if source and target else target or ""
    if "actor" in rest:  # the actor first: it matters most
        rest = {"by": formatting.who(str(rest.pop("actor")))} | rest
    head = ": ".join(formatting.cell(part) for part in (step, move) if part)
    return "  ".join(
        filter(None, (head, " ".join(f"{visible(name)}={formatting.cell(value)}" for name, value in rest.items())))
    )
