"""The local lease: how long this process may act by its own monotonic clock, and which tool calls are acting.

The database decides which worker holds a run. A worker that cannot reach it must stop before the database gives its
runs to others. The lease therefore counts from the moment at which the last acknowledged heartbeat was sent, and a
worker's clock may run a tenth slower than the database's.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from interlock.ids import RunId

# Parts of the lease: after the first no call starts and all are canceled, after the second none may act.
_STOPS_AFTER = 0.75
ENDS_AFTER = 0.9
# How many ended calls are remembered, to name those that held the interpreter.
_MOST_ENDED = 100


class Lapsed(BaseException):
    """Raised instead of a tool call that would start after the local lease ended. Nothing was done."""


@dataclass(frozen=True, slots=True)
class Acting:
    """A tool call that may change something now. `stop` asks a plain function in its thread to stop."""

    run_id: RunId
    step: str
    tool: str
    stop: threading.Event | None

    def __str__(self) -> str:
        return f"{self.tool} (run {self.run_id}, step {self.step})"


class LocalLease:
    """The lease shared by the event loop, the tool threads and the heartbeat. Without a heartbeat it never ends.

    `second` returns when another process sent the last heartbeat for this one, see `Pulse`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, second: Callable[[], float] | None = None
    ) -> None:
        self._clock, self._second = clock, second
        self._sent = self._seconds = 0.0
        self._ended: deque[tuple[float, Acting]] = deque(maxlen=_MOST_ENDED)
        self._lock = threading.Lock()
        self._stops_at = self._ends_at = math.inf
        self._has_lapsed = False
        self._acting: dict[object, Acting] = {}

    def renew(self, sent: float, seconds: float) -> None:
        """Extend the lease after an acknowledged heartbeat that was sent at `sent`. A lapsed lease stays lapsed."""
        self._sent, self._seconds = max(sent, self._sent), seconds
        self._stops_at, self._ends_at = self._sent + seconds * _STOPS_AFTER, self._sent + seconds * ENDS_AFTER

    def _ask_second(self) -> None:
        if self._second is not None and self._seconds and (sent := self._second()) > self._sent:
            self.renew(sent, self._seconds)

    @property
    def is_over(self) -> bool:
        if not self._has_lapsed and self._clock() >= self._stops_at:
            self._ask_second()
        return self._has_lapsed or self._clock() >= self._stops_at

    def remaining(self) -> float:
        """Return the seconds for which an acting call may safely continue if no further heartbeat is acknowledged."""
        self._ask_second()
        return 0.0 if self._has_lapsed else max(self._stops_at - self._clock(), 0.0)

    def seconds_to_end(self) -> float:
        return max(self._ends_at - self._clock(), 0.0)

    def lapse(self) -> None:
        """Start nothing more, and ask the plain functions in threads to stop."""
        with self._lock:
            self._has_lapsed = True
            acting = list(self._acting.values())
        for call in acting:
            if call.stop is not None:
                call.stop.set()

    @contextmanager
    def acting(self, run_id: RunId, step: str, tool: str, stop: threading.Event | None = None) -> Iterator[None]:
        """Register the call while the tool's function runs. Raise Lapsed if it would start too late."""
        key = object()
        with self._lock:
            if self.is_over:
                raise Lapsed(f"{tool} was not begun: the worker's lease is over")
            self._acting[key] = Acting(run_id, step, tool, stop)
        try:
            yield
        finally:
            with self._lock:
                self._ended.append((self._clock(), self._acting.pop(key)))

    def acts_for(self, run_id: RunId, step: str | None = None) -> bool:
        return any(call.run_id == run_id and step in (None, call.step) for call in self.still_acting())

    def acted_since(self, moment: float) -> list[Acting]:
        """Return the calls that are acting, and those that ended after that moment."""
        with self._lock:
            return [*self._acting.values(), *(call for at, call in self._ended if at >= moment)]

    def still_acting(self) -> list[Acting]:
        with self._lock:
            return list(self._acting.values())
