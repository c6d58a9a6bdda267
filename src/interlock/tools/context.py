"""The context of a step for its tool: what the tool can read about the step, and what it can report."""

import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import structlog
from pydantic_core import to_jsonable_python

from interlock import tracing
from interlock.audit.redact import Scrubber
from interlock.telemetry import log


class Canceled(BaseException):
    """Raised by `ctx.heartbeat()` in a plain function whose run was canceled.

    A thread cannot be interrupted otherwise.
    """


class Context:
    __slots__ = (
        "_canceled",
        "_ends_at",
        "_idempotency_key",
        "_lease_remaining",
        "_traceparent",
        "attempt",
        "cost_usd",
        "costs",
        "fencing_token",
        "run_id",
        "scrubber",
        "step",
        "tenant_id",
    )

    def __init__(
        self, *, run_id: UUID, tenant_id: UUID, step: str, attempt: int, idempotency_key: str | None = None,
        fencing_token: int = 1, lease_remaining: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self.run_id = run_id
        self.tenant_id = tenant_id
        self.step = step
        self.attempt = attempt
        # Grows whenever another worker takes the run. The tool's system can reject a token smaller than one it has seen
        # for this run.
        self.fencing_token = fencing_token
        self.cost_usd = 0.0
        self.costs: list[dict[str, Any]] | None = None
        # Knows the secrets passed to this call, if any.
        self.scrubber: Scrubber | None = None
        self._idempotency_key = idempotency_key
        self._canceled: threading.Event | None = None
        self._traceparent: str | None = None
        self._lease_remaining = lease_remaining
        # When this attempt times out, by the monotonic clock.
        self._ends_at = math.inf

    @property
    def traceparent(self) -> str | None:
        """Return the W3C trace context to send with requests, if the run has one."""
        return tracing.current() or self._traceparent

    @property
    def idempotency_key(self) -> str:
        """Return the key for this effect, the same for every attempt. Pass it to the system that you act on."""
        return self._idempotency_key or default_key(self.run_id, self.step)

    def remaining(self) -> float:
        """Return the seconds for which this attempt may safely act.

        They end with its time-out or with the worker's lease. The lease is renewed continuously and runs down only
        while the database cannot be reached. The result is infinite if the tool has no time-out and has no lease, as in
        tests.
        """
        lease = self._lease_remaining() if self._lease_remaining is not None else math.inf
        return max(min(self._ends_at - time.monotonic(), lease), 0.0)

    @property
    def deadline(self) -> datetime | None:
        """Return `remaining()` as a time by this machine's clock, to send with a request, or None if it is infinite."""
        left = self.remaining()
        return None if left == math.inf else datetime.now(UTC) + timedelta(seconds=left)

    def begins(self, timeout: float | None) -> None:
        """Start the attempt with this time-out."""
        self._ends_at = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def log(self) -> Any:
        bound = log.bind(run_id=str(self.run_id), step=self.step, attempt=self.attempt)
        if self.scrubber is None:
            return bound
        return type(bound)(bound._logger, [self._scrub, *bound._processors], bound._context)

    def _scrub(self, logger: Any, method: str, event: Any) -> Any:
        """Scrub a log line before any other processor.

        Exceptions and objects become text first, because they may contain a secret.
        """
        return self.scrub(structlog.processors.format_exc_info(logger, method, event))

    def scrub(self, told: Any) -> Any:
        return told if self.scrubber is None else self.scrubber.scrub(to_jsonable_python(told, fallback=repr))

    def cost(self, usd: float, *, provider: str | None = None, model: str | None = None, **units: float) -> None:
        """Report a cost of this step; it is added to the totals of the step and of the run."""
        usd = float(usd)
        units = {name: amount if isinstance(amount, int) else float(amount) for name, amount in units.items()}
        if not all(0 <= amount < math.inf for amount in (usd, *units.values())):
            raise ValueError(f"a cost is a number of at least 0, not {usd} with {units}")
        self.cost_usd += usd
        self.costs = [*(self.costs or ()), {"usd": usd, "provider": provider, "model": model, **units}]

    def scrub_costs(self) -> None:
        if self.scrubber is not None and self.costs:
            self.costs = [_scrubbed(cost, self.scrubber) for cost in self.costs]

    def heartbeat(self) -> None:
        """Raise Canceled if the run was canceled, the attempt timed out, or the worker lost its lease.

        Call it regularly in a long plain function.
        """
        if self._canceled is not None and self._canceled.is_set():
            raise Canceled

    def cancel_token(self) -> threading.Event:
        self._canceled = self._canceled or threading.Event()
        return self._canceled


def _scrubbed(cost: dict[str, Any], scrubber: Scrubber) -> dict[str, Any]:
    """Scrub a cost. Numbers are summed later, so a number that is a secret is omitted instead of replaced by text."""
    kept = {name: value for name, value in cost.items() if isinstance(value, str) or not scrubber.finds(value)}
    return scrubber.scrub(kept | {"usd": cost["usd"]})


def default_key(run_id: UUID, step: str) -> str:
    return f"interlock:{run_id}:{step}"
