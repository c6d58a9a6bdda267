"""Watching a run: its steps on the screen, updated by its events."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from interlock.cli import formatting, run_view
from interlock.cli.parsing import visible
from interlock.lifecycle import STEP, StepState

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import Event, Run


def watch(client: "Client", run: "Run", *, as_json: bool = False) -> "Run":
    """Show a run until it ends, and return how it ended. Without a terminal: one line per event."""
    events = client.follow(run.id)
    out = formatting.console()
    if as_json:
        for event in events:
            formatting.print_json(event, indent=None)
    elif out.is_terminal:
        _watch_live(RunProgress(run), events, out)
    else:
        for event in events:
            run_view.print_event(out, event)
    return client.run(run.id)


def _watch_live(progress: "RunProgress", events: "Iterator[Event]", out: Console) -> None:
    # Redrawn several times a second and not only on events, so that running steps show how long they have taken.
    with Live(console=out, refresh_per_second=8, get_renderable=progress.page):
        for event in events:
            progress.apply(event)


def _declared(said: Mapping[str, Any]) -> dict[str, Any]:
    from interlock.definition.plan import Retry

    usual = {"kind": "step", "max_attempts": Retry().max_attempts}
    return usual | {name: said[name] for name in ("kind", "tool", "runs_on", "max_attempts") if name in said}


def _began(event: "Event") -> datetime:
    """Return when a step began. A short step has only one event, its end, with its duration."""
    return event.at - timedelta(milliseconds=event.data.get("duration_ms") or 0)


class RunProgress:
    """A run, updated by its events from the state in which it was first read."""

    def __init__(self, run: "Run") -> None:
        self.run = run

    def apply(self, event: "Event") -> None:
        match event.data:
            case {"step_key": str(key), "to_state": str(state)}:
                self._move_step(key, state, event)
            case {"to_state": str(state)}:
                self.run = self._changed({"status": state})

    def _move_step(self, key: str, state: str, event: "Event") -> None:
        steps, data = [step.model_dump() for step in self.run.steps], event.data
        found = next((step for step in steps if step["key"] == key), None)
        if found is None:  # a flow's steps appear with their first event, which describes them
            found = {"id": key, "key": key, "index": len(steps)} | _declared(data.get("declares") or {})
            steps.append(found)
        found["status"] = state
        found["attempt"] = data.get("attempt") or found.get("attempt", 0)
        found["next_run_at"] = data.get("next_run_at")
        found["last_error"] = data.get("error")
        if state == StepState.RUNNING or not found.get("started_at"):
            found["started_at"] = data.get("started_at") or _began(event)
        found["completed_at"] = event.at if state in STEP.terminal else None
        self.run = self._changed({"steps": steps})

    def _changed(self, changes: dict[str, Any]) -> "Run":
        return type(self.run).model_validate({**self.run.model_dump(), **changes})

    @property
    def settled(self) -> int:
        return sum(step.status in STEP.terminal for step in self.run.steps)

    def page(self) -> RenderableType:
        run, total = self.run, len(self.run.steps)
        head = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=max(total, 1), completed=self.settled, width=30)
        head.add_row(visible(run.workflow), formatting.word(run.status), bar, f"{self.settled}/{total}")
        # The run's id, to return to it later, or the command to decide if the run waits for approval.
        parts: list[RenderableType] = [head, run_view.to_decide(run) or Text(f"run {run.id}", style="dim")]
        return Group(*parts, formatting.table(run.steps, run_view.STEPS))
