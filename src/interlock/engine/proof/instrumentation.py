"""Observability: count, log and trace what was committed. This module changes no state."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import orjson

from interlock import tracing
from interlock.definition.plan import UNDO
from interlock.engine.access.principal import initiator_behind
from interlock.ids import RunId
from interlock.journal import Cause, Entry
from interlock.lifecycle import SETTLED_WELL, STEP, ApprovalState, RunState
from interlock.store.records import ResumedRun, RunFacts
from interlock.telemetry import detail, log, metrics


def observe_entries(run_id: RunId, entries: list[Entry]) -> None:
    if detail.wanted:
        _log_entries(run_id, entries)
    for e in entries:
        if e.from_state is None or e.to_state is None:
            continue
        metrics.transition("step" if e.step else "run", e.from_state, e.to_state).inc()
        if e.step is not None and e.step.endswith(UNDO) and e.to_state in STEP.terminal:
            metrics.compensations.labels(e.to_state).inc()


def _log_entries(run_id: RunId, entries: list[Entry]) -> None:
    """Log every transition of the run, and every step that need not be repeated after a crash."""
    for e in entries:
        if e.step is None and e.from_state is not None and e.to_state is not None:
            log_run_move(run_id, e.from_state, e.to_state, e.actor, (e.data or {}).get("cause"))
        elif e.step is not None and e.to_state in STEP.terminal:
            resumable = e.to_state in SETTLED_WELL
            log.debug("run_checkpoint", run_id=str(run_id), step=e.step, resumable=resumable, **_duration(e))


def _duration(entry: Entry) -> dict[str, Any]:
    data = entry.data or {}
    return {"duration_ms": data["duration_ms"]} if "duration_ms" in data else {}


def log_run_move(run_id: RunId, before: str, after: str, actor: str, cause: Cause | None = None) -> None:
    log.debug(
        "run_transition", run_id=str(run_id), from_state=before, to_state=after, by=actor,
        initiator=initiator_behind(actor, cause),
    )  # fmt: skip


def observe_resumed(runs: Iterable[ResumedRun], actor: str) -> None:
    """Count transitions only of runs that were waiting; the others were only put into the queue."""
    for run in runs:
        if run.status_before in (RunState.WAITING_APPROVAL, RunState.WAITING_EXTERNAL):
            metrics.transition("run", run.status_before, RunState.RUNNING).inc()
            if detail.wanted:
                log_run_move(run.run_id, run.status_before, RunState.RUNNING, actor)


def observe_run_end(run: RunFacts, status: str, reason: str, *, ended: datetime, duration_ms: float) -> None:
    metrics.run_took(run.workflow, status).observe(duration_ms / 1000)
    log.info("run_completed", run_id=str(run.id), status=status, reason=reason, duration_ms=round(duration_ms))
    _trace_run(run, ended, status, reason)


def _trace_run(run: RunFacts, ended: datetime, status: str, reason: str) -> None:
    """Make the span of a run, at the run's end: see `tracing.Spans.run`."""
    if tracing.spans is None:
        return
    about = {
        "interlock.run_id": str(run.id), "interlock.workflow": run.workflow,
        "interlock.version": run.workflow_version, "interlock.status": status, "interlock.reason": reason,
    }  # fmt: skip
    given = orjson.loads(run.trigger).get("traceparent")
    failure = reason if status == RunState.FAILED else None
    tracing.spans.run(run.id, given, f"run {run.workflow}", run.created_at, ended, about, failure)


def observe_approval_end(status: ApprovalState, requested_at: datetime, resolved_at: datetime) -> None:
    """Count an approval that was decided, expired, or was withdrawn with its run."""
    metrics.transition("approval", ApprovalState.REQUESTED, status).inc()
    metrics.was_in("approval", ApprovalState.REQUESTED, (resolved_at - requested_at).total_seconds())
