"""Outcomes of an attempt (done, failed or interrupted) and the classification of errors.

Errors that a tool raises are classified here, once. Time-outs, lost connections, 429, 5xx and unknown errors are
retryable. Invalid input, other 4xx and Terminal are not. A write that was cut off is neither: it may have happened.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from interlock import clock
from interlock.audit.redact import Scrubber
from interlock.errors import Retryable, Terminal
from interlock.timeouts import retry_after
from interlock.tools import Context
from interlock.wire.validation_errors import explain

_LONGEST_RETRY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Done:
    output: str
    context: Context


@dataclass(frozen=True, slots=True)
class Failed:
    error: dict[str, Any]
    retryable: bool
    after: float | None
    context: Context | None
    # A write that was cut off: it is unknown whether it happened.
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker canceled the attempt, perhaps before anything was done: see `begun`."""

    begun: bool = True


class NotBegun(Retryable):
    """The call was canceled or timed out while it waited for a thread or a connection."""


CallOutcome = Done | Failed | Interrupted


def failure(error: BaseException, context: Context | None = None, *, in_doubt: bool = False) -> Failed:
    retryable, after = sort(error)
    return Failed(describe(error, context.scrubber if context else None), retryable, after, context, in_doubt)


def is_cut_off(error: BaseException) -> bool:
    """Return True if the other system may have acted and its answer was lost or not understood.

    Return False for an explicit rejection, and for Retryable or Terminal, by which the tool asserts that nothing was
    done. Clients have their own time-out and connection errors; a list of them would never be complete.
    """
    if isinstance(error, (Retryable, Terminal)):
        return False
    status = _status(error)
    return status is None or status == 408 or not 400 <= status < 500


def sort(error: BaseException) -> tuple[bool, float | None]:
    """Return whether a retry may help, and after how many seconds if the error says so."""
    match error:
        case Terminal() | ValidationError():
            return False, None
        case Retryable():
            return True, _after(error.after)
    status = _status(error)
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return False, None
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None)
    get: Callable[[str], Any] = getattr(headers, "get", lambda _: None)
    return True, _after(get("Retry-After") or get("retry-after"))


def _after(value: Any) -> float | None:
    return retry_after(value, clock.now(), _LONGEST_RETRY_SECONDS) if value is not None else None


def _status(error: BaseException) -> int | None:
    return next((s for s in _statuses(error, getattr(error, "response", None)) if isinstance(s, int)), None)


def _statuses(error: BaseException, response: Any) -> Iterator[Any]:
    """Yield the candidates for a status.

    httpx and requests have a response, most SDKs `status_code`, aiohttp and urllib `status`.
    """
    yield getattr(response, "status_code", None)
    yield getattr(error, "status_code", None)
    yield getattr(error, "status", None)


def describe(error: BaseException, scrubber: Scrubber | None = None) -> dict[str, Any]:
    kind = type(error).__name__
    message = str(error) if scrubber is None else _scrubbed(error, scrubber)
    message = (message or kind)[:2000].replace("\x00", "\ufffd")
    # File names may contain bytes that are not valid text.
    return {"type": kind, "message": message.encode(errors="replace").decode()}


def _scrubbed(error: BaseException, scrubber: Scrubber) -> str:
    """Scrub the message before it is shortened, because half a secret would not be found.

    Pydantic shortens inputs itself, so leave them out.
    """
    return scrubber.scrub(explain(error, show_input=False) if isinstance(error, ValidationError) else str(error))
