"""Showing: tables and pages for people, JSON for programs."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from interlock.cli.listing import Listing
from interlock.cli.text import one_line, visible
from interlock.lifecycle import (
    MACHINES,
    SETTLED_WELL,
    Machine,
    Term,
)
from interlock.lifecycle.tone import Tone, tone_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from interlock.wire import (
        Agent,
        Compensation,
        Event,
        Flow,
        Job,
        Key,
        OutsideEvent,
        Page,
        Run,
        Session,
        StateChange,
        Step,
        StoredSecret,
        Tenant,
        Tool,
        Usage,
        Worker,
        Workflow,
    )

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], RenderableType]]

_MACHINE_OF: dict[type[Term], Machine[Any, Any]] = {type(machine.initial): machine for machine in MACHINES}
_COLOURS: dict[Tone, str] = {
    "good": "green",
    "bad": "red",
    "ask": "yellow",
    "wait": "yellow",
    "warn": "yellow",
    "busy": "cyan",
}
_WIDE = 1_000_000
_PADDING = re.compile(r" +$(?=\n)", re.MULTILINE)


def console() -> Console:
    """Where commands print. Into a pipe nothing is cut or wrapped; foreign text is never read as markup."""
    to_terminal = sys.stdout.isatty()
    out = sys.stdout if to_terminal else cast(TextIO, _Unpadded(sys.stdout))
    return Console(file=out, width=None if to_terminal else _WIDE, markup=False, emoji=False, highlight=False)


class _Unpadded:
    """Lines without the spaces that fill a column up at their end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(_PADDING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def print_json(view: "BaseModel | Mapping[str, Any]", *, indent: int | None = 2) -> None:
    plain = view if isinstance(view, Mapping) else view.model_dump(mode="json")
    sys.stdout.write(json.dumps(plain, indent=indent, default=str) + "\n")
    sys.stdout.flush()


def print_view(view: "BaseModel", shown: Callable[[], RenderableType], *, as_json: bool) -> None:
    if as_json:
        print_json(view)
    else:
        console().print(shown())


def print_page(page: "Page[T]", columns: "Columns[T]", *, as_json: bool) -> None:
    if as_json:
        print_json(page)
        return
    out = console()
    out.print(table(page.items, columns) if page.items else "none")
    if page.next_cursor:
        out.print(f"more: --cursor {page.next_cursor}", style="dim", soft_wrap=True)


# ---------------------------------------------------------------- words


def style(state: Term) -> str:
    """A colour for any state of any machine, by its place in the table."""
    machine = _MACHINE_OF[type(state)]
    return _COLOURS.get(tone_of(machine, state), "dim" if state in machine.terminal else "")


def word(state: Term | None) -> Text:
    return Text(state, style=style(state)) if state is not None else Text("")


def moment(at: datetime | None) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""


def clock(at: datetime) -> str:
    return at.astimezone().strftime("%H:%M:%S")


def span(seconds: float) -> str:
    """A duration as people say it: 240ms, 3.1s, 2m05s, 3h07m, 4d02h."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}{seconds % size // below:02.0f}{smaller}"
    raise AssertionError(seconds)


def took(start: datetime | None, end: datetime | None) -> str:
    return span(((end or datetime.now(UTC)) - start).total_seconds()) if start else ""


def who(actor: str) -> str:
    """Of `name:key-id` the name."""
    name, _, tail = actor.rpartition(":")
    return name if name and len(tail) == 36 else actor


def cell(value: Any) -> str:
    """Any JSON value on one line."""
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def exact(value: Any) -> str:
    """A value as it is, for somebody who answers for it: with its line breaks, and with quotes where one could err."""
    if isinstance(value, str) and value.strip() == value != "":
        return visible(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return visible(text if len(text) <= 80 else json.dumps(value, ensure_ascii=False, default=str, indent=2))


def brief(error: Any) -> str:
    """The sentence of an error, whether it is one or has one."""
    if isinstance(error, Mapping):
        error = next((error[name] for name in ("message", "detail", "code") if error.get(name)), error)
    return "" if error is None else cell(error)


def table(items: Iterable[T], columns: "Columns[T]") -> Listing:
    rows = [[column(item) for column in columns.values()] for item in items]
    return Listing([name.upper() for name in columns], rows)


def facts(**pairs: RenderableType | None) -> Table:
    """Names and values under each other; what is empty is left out."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for name, value in pairs.items():
        if value not in (None, ""):
            found.add_row(name.replace("_", " "), value if value is not None else "")
    return found


def block(values: Mapping[str, Any], indent: int = 2) -> Table:
    """Every value under its own name, nothing left out or shortened."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for name, value in values.items():
        found.add_row(" " * indent + visible(name), exact(value))
    return found


# ---------------------------------------------------------------- workers and jobs

WORKERS: "Columns[Worker]" = {
    "id": lambda worker: worker.id,
    "name": lambda worker: visible(worker.name),
    "status": lambda worker: word(worker.status),
    "host": lambda worker: visible(worker.host or ""),
    "pid": lambda worker: str(worker.pid or ""),
    "runs": lambda worker: f"{worker.holds}/{worker.capacity}",
    "labels": lambda worker: visible(", ".join(worker.labels)),
    "job": lambda worker: worker.job_id or "",
    "reason": lambda worker: one_line(worker.reason or ""),
}

JOBS: "Columns[Job]" = {
    "id": lambda job: job.id,
    "task": lambda job: one_line(job.task_description)[:60],
    "workflow": lambda job: visible(job.workflow),
    "status": lambda job: word(job.status),
    "done": lambda job: f"{job.progress.done}/{job.progress.total}",
    "workers": lambda job: f"{len(job.workers)}/{job.worker_count}",
    "created": lambda job: moment(job.created_at),
    "took": lambda job: took(job.started_at, job.completed_at),
    "reason": lambda job: one_line(job.reason or ""),
}

HISTORY: "Columns[StateChange]" = {
    "at": lambda change: moment(change.at),
    "from": lambda change: change.from_state or "",
    "event": lambda change: change.event,
    "to": lambda change: change.to_state,
    "by": lambda change: visible(who(change.by)),
    "reason": lambda change: one_line(change.reason or ""),
}

# ---------------------------------------------------------------- runs

RUNS: "Columns[Run]" = {
    "id": lambda run: run.id,
    "workflow": lambda run: visible(f"{run.workflow}@{run.workflow_version}"),
    "status": lambda run: word(run.status),
    "reason": lambda run: run.reason or visible(run.waiting_for or ""),
    "created": lambda run: moment(run.created_at),
    "took": lambda run: took(run.created_at, run.completed_at),
}

STEPS: "Columns[Step]" = {
    "step": lambda step: visible(step.key),
    "does": lambda step: visible(step.tool or step.kind) + (f" on {visible(step.runs_on)}" if step.runs_on else ""),
    "status": lambda step: Text("retrying", style="yellow") if step.retrying else word(step.status),
    "tries": lambda step: f"{step.attempt}/{step.max_attempts}" if step.attempt else "",
    "took": lambda step: took(step.started_at, step.completed_at) if step.attempt or step.completed_at else "",
    "note": lambda step: note(step),
}


COMPENSATION: "Columns[Compensation]" = {
    "undo": lambda step: visible(step.undoes),
    **{name: STEPS[name] for name in ("does", "status", "tries", "took", "note")},
}


def note(step: "Step") -> str:
    if step.retrying:
        at = f"retrying at {clock(step.next_run_at)}" if step.next_run_at else "retrying"
        return f"{at}: {brief(step.last_error)}" if step.last_error else at
    if (awaited := step.waits_for) is not None:
        until = f" until {moment(datetime.fromisoformat(awaited['timeout_at']))}" if awaited.get("timeout_at") else ""
        return f"waits for {cell(awaited['event'])} {cell(awaited['correlation'])}{until}"
    return brief(step.last_error) if step.status not in SETTLED_WELL else ""


def run_page(run: "Run") -> RenderableType:
    head = facts(
        run=run.id,
        workflow=visible(f"{run.workflow}@{run.workflow_version}"),
        status=_status(run),
        waiting_for=Text(visible(run.waiting_for), style="yellow") if run.waiting_for else None,
        error=Text(brief(run.error), style="red") if run.error else None,
        trigger=visible(" ".join(filter(None, (run.trigger.source, run.trigger.ref)))),
        created=moment(run.created_at),
        took=took(run.created_at, run.completed_at),
        cost=f"${run.cost_usd:.4f}" if run.cost_usd else None,
        resumed_from=run.resumed_from,
        parent=run.parent_run_id,
        resumed=f"{run.resume_count} times" if run.resume_count > 1 else "once" if run.resume_count else None,
        heartbeat=moment(run.last_heartbeat_at),
        input=cell(run.input) if run.input else None,
        result=cell(run.result) if run.result is not None else None,
    )
    parts: list[RenderableType] = [head]
    if run.steps:
        parts += ["", table(run.steps, STEPS)]
    if run.compensation:
        parts += ["", table(run.compensation, COMPENSATION)]
    return Group(*parts)


def _status(run: "Run") -> Text:
    said = Text.assemble(word(run.status), (f"  {run.reason}" if run.reason else "", "dim"))
    return said.append(f"  {(run.reason or run.status).doc}", style="dim")


def print_event(out: Console, event: "Event") -> None:
    """One line: at a terminal what fits, into a pipe all of it."""
    out.print(event_line(event), no_wrap=True, overflow="ellipsis")


def event_line(event: "Event") -> str:
    return f"{event.seq:>4}  {clock(event.at)}  {event.type:<18}  {_what(event.data)}".rstrip()


def _what(data: Mapping[str, Any]) -> str:
    """`review: running → waiting_approval  attempt=1`, or simply every field."""
    rest = {name: value for name, value in data.items() if value not in (None, "", {}, [])}
    rest.pop("context", None)  # for programs; people have the actor
    step, source, target = rest.pop("step_key", None), rest.pop("from_state", None), rest.pop("to_state", None)
    move = f"{source} → {target}" if source and target else target or ""
    if "actor" in rest:  # first: it is what people ask for
        rest = {"by": who(str(rest.pop("actor")))} | rest
    head = ": ".join(cell(part) for part in (step, move) if part)
    return "  ".join(filter(None, (head, " ".join(f"{visible(name)}={cell(value)}" for name, value in rest.items()))))


# ---------------------------------------------------------------- the rest

WORKFLOWS: "Columns[Workflow]" = {
    "name": lambda workflow: visible(workflow.name),
    "version": lambda workflow: str(workflow.version),
    "digest": lambda workflow: workflow.digest[:19],
    "created": lambda workflow: moment(workflow.created_at),
}

AGENTS: "Columns[Agent]" = {
    "name": lambda agent: visible(agent.name),
    "version": lambda agent: str(agent.version),
    "model": lambda agent: visible(agent.model),
    "digest": lambda agent: agent.digest[:19],
    "created": lambda agent: moment(agent.created_at),
}

SESSIONS: "Columns[Session]" = {
    "id": lambda session: session.id,
    "agent": lambda session: visible(session.agent),
    "status": lambda session: Text(session.status, style="cyan" if session.status == "busy" else ""),
    "messages": lambda session: str(session.messages),
    "cost": lambda session: f"${session.cost_usd:.4f}" if session.cost_usd else "",
    "by": lambda session: visible(session.created_by),
    "created": lambda session: moment(session.created_at),
}

TOOLS: "Columns[Tool]" = {
    "name": lambda tool: visible(tool.name),
    "effect": lambda tool: "writes" if tool.writes else "reads",
    "risk": lambda tool: tool.risk,
    "idempotent": lambda tool: "yes" if tool.idempotent else "no",
    "description": lambda tool: one_line(tool.description),
}

FLOWS: "Columns[Flow]" = {
    "flow": lambda flow: visible(flow.name),
    "version": lambda flow: visible(flow.version),
    "new runs": lambda flow: "no, retired" if flow.retired else "yes",
    "description": lambda flow: one_line(flow.description),
}

KEYS: "Columns[Key]" = {
    "id": lambda key: key.id,
    "name": lambda key: visible(key.name),
    "role": lambda key: key.role,
    "groups": lambda key: visible(", ".join(key.groups)),
    "workspace": lambda key: visible(key.workspace_id or ""),
    "created": lambda key: moment(key.created_at),
    "revoked": lambda key: moment(key.revoked_at),
}

TENANTS: "Columns[Tenant]" = {
    "id": lambda tenant: tenant.id,
    "name": lambda tenant: visible(tenant.name),
    "caps": lambda tenant: caps(tenant) or "none",
    "weight": lambda tenant: f"{tenant.weight:g}",
    "created": lambda tenant: moment(tenant.created_at),
}


EVENTS: "Columns[OutsideEvent]" = {
    "id": lambda event: visible(event.id),
    "type": lambda event: visible(event.type),
    "about": lambda event: visible(event.correlation),
    "received": lambda event: moment(event.received_at),
    "by": lambda event: visible(event.sent_by),
    "run": lambda event: event.run_id or Text("waits for a step", style="yellow"),
    "step": lambda event: visible(event.step_key or ""),
    "expires": lambda event: moment(event.expires_at),
}

USAGE: "Columns[Usage]" = {
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

SECRETS: "Columns[StoredSecret]" = {
    "name": lambda secret: visible(secret.name),
    "version": lambda secret: str(secret.version),
    "set": lambda secret: moment(secret.created_at),
    "by": lambda secret: visible(secret.created_by),
}


def _of(used: int | None, most: int | None) -> str:
    if used is None:
        return str(most) if most is not None else "any"
    return f"{used} of {most}" if most is not None else str(used)


def caps(tenant: "Tenant") -> str:
    found = {
        "runs in flight": tenant.max_concurrency,
        "runs per minute": tenant.max_runs_per_min,
        "writes per run": tenant.max_writes_per_run,
    }
    return ", ".join(f"{most} {what}" for what, most in found.items() if most is not None)
