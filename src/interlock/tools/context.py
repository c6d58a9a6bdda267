"""Context: what a tool is told about the step it is doing, and what it can tell back."""

import math
import threading
from typing import Any
from uuid import UUID

import structlog
from pydantic_core import to_jsonable_python

from interlock import tracing
from interlock.governance.redact import Scrubber
from interlock.telemetry import log


class Canceled(BaseException):
    """Raised in a plain function by `ctx.heartbeat()` when its run was canceled: the only way into a thread."""


class Context:
    __slots__ = (
        "_canceled",
        "_idempotency_key",
        "_traceparent",
        "attempt",
        "cost_usd",
        "costs",
        "run_id",
        "scrubber",
        "step",
        "tenant_id",
    )

    def __init__(
        self, *, run_id: UUID, tenant_id: UUID, step: str, attempt: int, idempotency_key: str | None = None
    ) -> None:
        self.run_id = run_id
        self.tenant_id = tenant_id
        self.step = step
        self.attempt = attempt
        self.cost_usd = 0.0
        self.costs: list[dict[str, Any]] | None = None
        # Knows the secrets that this call was given, if there are any.
        self.scrubber: Scrubber | None = None
        self._idempotency_key = idempotency_key
        self._canceled: threading.Event | None = None
        self._traceparent: str | None = None

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context to send along with requests, if the run has one."""
        return tracing.current() or self._traceparent

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at this effect; hand it to the system that you act on."""
        return self._idempotency_key or default_key(self.run_id, self.step)

    @property
    def log(self) -> Any:
        bound = log.bind(run_id=str(self.run_id), step=self.step, attempt=self.attempt)
        if self.scrubber is None:
            return bound
        return type(bound)(bound._logger, [self._scrub, *bound._processors], bound._context)

    def _scrub(self, logger: Any, method: str, event: Any) -> Any:
        """Before anything else sees the line. Exceptions and objects are made text first: they may hold one too."""
        return self.scrub(structlog.processors.format_exc_info(logger, method, event))

    def scrub(self, told: Any) -> Any:
        return told if self.scrubber is None else self.scrubber.scrub(to_jsonable_python(told, fallback=repr))

    def cost(self, usd: float, *, provider: str | None = None, model: str | None = None, **units: float) -> None:
        """Report what this step cost; it is added up on the step and on the run."""
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
        """Call it now and then in a long plain function: it ends the function when its run was canceled."""
        if self._canceled is not None and self._canceled.is_set():
            raise Canceled

    def cancel_token(self) -> threading.Event:
        self._canceled = self._canceled or threading.Event()
        return self._canceled


def _scrubbed(cost: dict[str, Any], scrubber: Scrubber) -> dict[str, Any]:
    """Numbers are added up later: one that is a secret is left out, not replaced by a word."""
    kept = {name: value for name, value in cost.items() if isinstance(value, str) or not scrubber.finds(value)}
    return scrubber.scrub(kept | {"usd": cost["usd"]})


def default_key(run_id: UUID, step: str) -> str:
    return f"interlock:{run_id}:{step}"
