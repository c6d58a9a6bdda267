"""What operators see: structured logs and Prometheus metrics, with labels taken from the lifecycles."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

log = structlog.stdlib.get_logger("interlock")


def _as_json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()


class _Detail:
    """Whether every step is logged. Callers check it before they make a line that no log level shows."""

    wanted = False


detail = _Detail()


def configure_logging(level: str, format_: str) -> None:
    detail.wanted = level == "debug"
    as_json = format_ == "json" or (format_ == "auto" and not sys.stderr.isatty())
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=_as_json) if as_json else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _scrub,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.setLogRecordFactory(_ScrubbedRecord)


# Set while a tool works with secrets: removes them from every log line, including those of libraries.
_scrubs: ContextVar[Callable[[Any], Any] | None] = ContextVar("scrubs", default=None)


@contextmanager
def scrubbed_lines(scrub: Callable[[Any], Any]) -> Iterator[None]:
    token = _scrubs.set(scrub)
    try:
        yield
    finally:
        _scrubs.reset(token)


def _scrub(logger: Any, method: str, event: Any) -> Any:
    scrub = _scrubs.get()
    return event if scrub is None else scrub(event)


class _ScrubbedRecord(logging.LogRecord):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if (scrub := _scrubs.get()) is not None:
            if self.exc_info:
                self.exc_text, self.exc_info = scrub(logging.Formatter().formatException(self.exc_info)), None
            self.msg, self.args = scrub(self.getMessage()), None


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 86400)


class Names:
    """Label values that callers choose. The first `most` names keep their own value; all others share `other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._most:
                return "other"
            self._known.add(name)
        return name


class Metrics:
    """One process's metrics. Label values are bounded: states come from the tables, and there is no tenant label."""

    MOST_NAMES = 50

    def __init__(self) -> None:
        self.workflows, self.tools = Names(self.MOST_NAMES), Names(self.MOST_NAMES)
        self.registry = CollectorRegistry()
        r = self.registry
        self.transitions = {
            name: Counter(
                f"interlock_{name}_transitions",
                f"Transitions in the table of the {name}{more}.",
                ["from_state", "to_state"],
                registry=r,
            )
            for name, more in (
                ("run", ""),
                ("step", " that have an entry of their own; the start of a short one has none"),
                ("approval", ""),
                ("receipt", ""),
                ("worker", ""),
                ("job", ""),
                ("idempotency", " record"),
            )
        }
        self.state_seconds = {
            name: Histogram(
                f"interlock_{name}_state_seconds",
                f"How long {who} was in a state that it left{more}.",
                ["state"],
                buckets=_SECONDS,
                registry=r,
            )
            for name, who, more in (
                ("run", "a run", ", measured when that is sealed"),
                ("step", "a step", " and in which it waited; for running see interlock_step_duration_seconds"),
                ("approval", "an approval", ""),
                ("worker", "a worker", ""),
                ("job", "a job", ""),
            )
        }
        self.refused = Counter(
            "interlock_refused_transitions", "Transitions that a table does not allow.", ["machine", "state", "event"],
            registry=r,
        )  # fmt: skip
        self.run_duration = Histogram(
            "interlock_run_duration_seconds",
            f"From creation to end. A process names its first {self.MOST_NAMES} workflows; the rest is `other`.",
            ["workflow", "status"],
            buckets=_SECONDS,
            registry=r,
        )
        self.run_active = Gauge(
            "interlock_run_active", "Runs that have not ended.", ["status"], registry=r, multiprocess_mode="mostrecent"
        )
        self.step_duration = Histogram(
            "interlock_step_duration_seconds",
            f"One attempt at a tool. A process names its first {self.MOST_NAMES} tools; the rest is `other`.",
            ["tool", "outcome"],
            buckets=_SECONDS,
            registry=r,
        )
        self.idempotency_hits = Counter(
            "interlock_idempotency_hits", "Requests with an idempotency key.", ["source", "result"], registry=r
        )
        self.events = Counter(
            "interlock_outside_events", "Events from outside: matched with a wait, kept, expired.", ["outcome"],
            registry=r,
        )  # fmt: skip
        self.compensations = Counter(
            "interlock_compensations", "Steps that were undone, and that could not be.", ["outcome"], registry=r
        )
        self.flush_size = Histogram(
            "interlock_flush_entries",
            "Entries committed together.",
            buckets=(1, 2, 5, 10, 25, 50, 100, 250, 500),
            registry=r,
        )
        self.claimed = Counter("interlock_claimed_runs", "Runs leased by this process.", registry=r)
        self.orphans = Counter("interlock_orphaned_runs", "Runs taken back from lost workers.", registry=r)
        self.queue_drift = Counter(
            "interlock_queue_drift", "Times a queue's in-flight count had to be corrected; should stay 0.", registry=r
        )
        self.worker_active = Gauge(
            "interlock_worker_active", "Workers that have not ended.", ["status"], registry=r,
            multiprocess_mode="mostrecent",
        )  # fmt: skip
        self.job_active = Gauge(
            "interlock_job_active", "Jobs that have not ended.", ["status"], registry=r, multiprocess_mode="mostrecent"
        )
        self.worker_restarts = Counter(
            "interlock_worker_restarts", "Worker processes that died and were replaced.", registry=r
        )
        self.loop_blocked = Counter(
            "interlock_worker_loop_blocked", "Times a step blocked a worker's event loop; the log names it.", registry=r
        )
        self.unsealed = Gauge(
            "interlock_audit_unsealed_entries", "Journal entries that are not in the audit chain yet.",
            registry=r, multiprocess_mode="mostrecent",
        )  # fmt: skip
        self.evidence_due = Gauge(
            "interlock_evidence_due_runs", "Ended runs that are in the audit chain and have no evidence yet.",
            registry=r, multiprocess_mode="mostrecent",
        )  # fmt: skip
        self.clock_difference = Gauge(
            "interlock_clock_difference_seconds",
            "How far the clock of a process is from the database's; above 60 the process deletes nothing.",
            registry=r, multiprocess_mode="livemax",
        )  # fmt: skip
        self.held = Gauge(
            "interlock_worker_held_runs", "Runs that workers hold.", registry=r, multiprocess_mode="livesum"
        )

    @cache  # noqa: B019 — there is one Metrics, and as many labels as the tables have transitions
    def transition(self, machine: str, source: str, target: str) -> Counter:
        return self.transitions[machine].labels(source, target)

    def was_in(self, machine: str, state: str, seconds: float | None) -> None:
        """Record how long a machine was in the state that it left. Moments from two clocks may be in reverse order."""
        self.state_seconds[machine].labels(state).observe(max(seconds or 0.0, 0.0))

    def run_took(self, workflow: str, status: str) -> Histogram:
        return self.run_duration.labels(self.workflows.label(workflow), status)

    def step_took(self, tool: str | None, outcome: str) -> Histogram:
        return self.step_duration.labels(self.tools.label(tool or ""), outcome)


metrics = Metrics()


def forget_process(pid: int) -> None:
    """Remove the gauges of a child process that has ended. Its counters stay."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def exposition() -> bytes:
    """Return this process's metrics, or those of all processes that share PROMETHEUS_MULTIPROC_DIR."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(metrics.registry)
    shared = CollectorRegistry()
    multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
    return generate_latest(shared)
