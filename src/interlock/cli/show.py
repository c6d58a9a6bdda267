"""Showing: tables and pages for people, JSON for programs."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from interlock.cli.text import one_line, visible
from interlock.lifecycle import APPROVAL, MACHINES, SETTLED_WELL, ApprovalState, Machine, Term, WorkerState

if TYPE_CHECKING:
    from pydantic import BaseModel

    from interlock.wire import Approval, Event, Key, Page, Run, Step, Tenant, Tool, Vote, Workflow

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], RenderableType]]

_MACHINE_OF: dict[type[Term], Machine[Any, Any]] = {type(machine.initial): machine for machine in MACHINES}
_ENDED_WELL = SETTLED_WELL | {ApprovalState.APPROVED, WorkerState.COMPLETED}
_WIDE = 400


def console() -> Console:
    """Where commands print. Into a pipe nothing is cut or wrapped; foreign text is never read as markup."""
    width = None if sys.stdout.isatty() else _WIDE
    return Console(width=width, markup=False, emoji=False, highlight=False)


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
        out.print(f"more: --cursor {page.next_cursor}", style="dim")


# ---------------------------------------------------------------- words


def style(state: Term) -> str:
    """A colour for any state of any machine, by its place in the table."""
    machine = _MACHINE_OF[type(state)]
    if state in machine.terminal:
        was_canceled = any(t.target == state and t.event == "cancel" for t in machine.transitions())
        return "green" if state in _ENDED_WELL else "dim" if was_canceled else "red"
    if state.startswith("waiting") or machine is APPROVAL:
        return "yellow"
    return "" if state == machine.initial else "cyan"


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


def cell(value: Any) -> str:
    """Any JSON value on one line."""
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def brief(error: Any) -> str:
    """The sentence of an error, whether it is one or has one."""
    if isinstance(error, Mapping):
        error = next((error[name] for name in ("message", "detail", "code") if error.get(name)), error)
    return "" if error is None else cell(error)


def table(items: Iterable[T], columns: "Columns[T]") -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        found.add_column(name.upper(), no_wrap=name == "id", overflow="fold")
    for item in items:
        found.add_row(*(column(item) for column in columns.values()))
    return found


def facts(**pairs: RenderableType | None) -> Table:
    """Names and values under each other; what is empty is left out."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for name, value in pairs.items():
        if value not in (None, ""):
            found.add_row(name.replace("_", " "), value if value is not None else "")
    return found


# ---------------------------------------------------------------- runs

RUNS: "Columns[Run]" = {
    "id": lambda run: run.id,
    "workflow": lambda run: visible(f"{run.workflow}@{run.workflow_version}"),
    "status": lambda run: word(run.status),
    "reason": lambda run: run.reason or "",
    "created": lambda run: moment(run.created_at),
    "took": lambda run: took(run.started_at, run.completed_at),
}

STEPS: "Columns[Step]" = {
    "step": lambda step: visible(step.key),
    "does": lambda step: visible(step.tool or step.kind),
    "status": lambda step: Text("retrying", style="yellow") if step.retrying else word(step.status),
    "attempt": lambda step: f"{step.attempt}/{step.max_attempts}" if step.attempt else "",
    "took": lambda step: took(step.started_at, step.completed_at) if step.attempt or step.completed_at else "",
    "note": lambda step: note(step),
}


def note(step: "Step") -> str:
    if step.retrying:
        at = f"retrying at {clock(step.next_run_at)}" if step.next_run_at else "retrying"
        return f"{at}: {brief(step.last_error)}" if step.last_error else at
    return brief(step.last_error) if step.status not in SETTLED_WELL else ""


def run_page(run: "Run") -> RenderableType:
    head = facts(
        run=run.id,
        workflow=visible(f"{run.workflow}@{run.workflow_version}"),
        status=_status(run),
        error=Text(brief(run.error), style="red") if run.error else None,
        trigger=visible(" ".join(filter(None, (run.trigger.source, run.trigger.ref)))),
        created=moment(run.created_at),
        took=took(run.started_at, run.completed_at),
        cost=f"${run.cost_usd:.4f}" if run.cost_usd else None,
        resumed_from=run.resumed_from,
        input=cell(run.input) if run.input else None,
        result=cell(run.result) if run.result is not None else None,
    )
    return Group(head, "", table(run.steps, STEPS)) if run.steps else head


def _status(run: "Run") -> Text:
    said = Text.assemble(word(run.status), (f"  {run.reason}" if run.reason else "", "dim"))
    return said.append(f"  {(run.reason or run.status).doc}", style="dim")


def event_line(event: "Event") -> str:
    return f"{event.seq:>4}  {clock(event.at)}  {event.type:<18}  {_what(event.data)}".rstrip()


def _what(data: Mapping[str, Any]) -> str:
    """`review: running → waiting_approval  attempt=1`, or simply every field."""
    rest = {name: value for name, value in data.items() if value not in (None, "", {}, [])}
    step, source, target = rest.pop("step_key", None), rest.pop("from_state", None), rest.pop("to_state", None)
    move = f"{source} → {target}" if source and target else target or ""
    head = ": ".join(cell(part) for part in (step, move) if part)
    return "  ".join(filter(None, (head, " ".join(f"{visible(name)}={cell(value)}" for name, value in rest.items()))))


# ---------------------------------------------------------------- approvals

APPROVALS: "Columns[Approval]" = {
    "id": lambda approval: approval.id,
    "status": lambda approval: word(approval.status),
    "tier": lambda approval: approval.tier,
    "step": lambda approval: visible(approval.step_key),
    "asks": lambda approval: one_line(approval.summary or approval.action.tool or ""),
    "votes": lambda approval: f"{len(approval.votes)}/{2 if approval.two_person else 1}",
    "expires": lambda approval: moment(approval.expires_at),
    "run": lambda approval: approval.run_id,
}


def approval_page(approval: "Approval") -> RenderableType:
    action, why = approval.action, approval.rationale
    head = facts(
        approval=approval.id,
        status=Text.assemble(word(approval.status), (f"  {approval.status.doc}", "dim")),
        run=f"{approval.run_id}  step {visible(approval.step_key)}",
        asks=visible(approval.summary),
        tier=f"{approval.tier}, two people" if approval.two_person else str(approval.tier),
        tool=visible(action.tool or ""),
        target=cell(action.target) if action.target is not None else None,
        why=visible(why.reason or ""),
        rules=visible(", ".join(why.rule_ids)),
        digest=visible(action.digest),
        requested=moment(approval.requested_at),
        expires=moment(approval.expires_at),
        decided=moment(approval.resolved_at),
    )
    parts: list[RenderableType] = [head]
    if action.fields:
        parts += ["", "fields", facts(**{visible(name): cell(value) for name, value in action.fields.items()})]
    if approval.votes:
        parts += ["", "votes", *(_vote_line(vote) for vote in approval.votes)]
    return Group(*parts)


def _vote_line(vote: "Vote") -> str:
    return f"{moment(vote.at)}  {visible(vote.by)}: {vote.decision}  {one_line(vote.reason or '')}".rstrip()


# ---------------------------------------------------------------- the rest

WORKFLOWS: "Columns[Workflow]" = {
    "name": lambda workflow: visible(workflow.name),
    "version": lambda workflow: str(workflow.version),
    "digest": lambda workflow: workflow.digest[:19],
    "created": lambda workflow: moment(workflow.created_at),
}

TOOLS: "Columns[Tool]" = {
    "name": lambda tool: visible(tool.name),
    "effect": lambda tool: "writes" if tool.writes else "reads",
    "risk": lambda tool: tool.risk,
    "idempotent": lambda tool: "yes" if tool.idempotent else "no",
    "description": lambda tool: one_line(tool.description),
}

KEYS: "Columns[Key]" = {
    "id": lambda key: key.id,
    "name": lambda key: visible(key.name),
    "role": lambda key: key.role,
    "workspace": lambda key: visible(key.workspace_id or ""),
    "created": lambda key: moment(key.created_at),
    "revoked": lambda key: moment(key.revoked_at),
}

TENANTS: "Columns[Tenant]" = {
    "id": lambda tenant: tenant.id,
    "name": lambda tenant: visible(tenant.name),
    "concurrency": lambda tenant: str(tenant.max_concurrency or "no cap"),
    "weight": lambda tenant: f"{tenant.weight:g}",
    "created": lambda tenant: moment(tenant.created_at),
}
