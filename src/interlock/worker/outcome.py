"""How an attempt went: done, failed or interrupted, and what the error means that ended it.

What a tool raises is sorted here, once: time-outs, lost connections, 429 and 5xx are worth another try, and so is
anything unknown; wrong input, other 4xx and whatever the tool calls Terminal are not. A write that was cut off in the
middle is neither: it may have happened.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from interlock.errors import Retryable, Terminal
from interlock.governance.redact import Scrubber
from interlock.tools import Context, explain
from interlock.waiting import retry_after

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
    # A write that was cut off: whether it happened is not known.
    in_doubt: bool = False
    # It was done, and then something else went wrong.
    happened: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """It was told to stop, and did; perhaps before anything was done."""

    begun: bool = True


class NotBegun(Retryable):
    """It waited for a thread until it was told to stop or its time was over."""


Outcome = Done | Failed | Interrupted


def failure(error: BaseException, context: Context | None = None, *, in_doubt: bool = False) -> Failed:
    retryable, after = sort(error)
    return Failed(describe(error, context.scrubber if context else None), retryable, after, context, in_doubt)


def is_cut_off(error: BaseException) -> bool:
    """The other side may have acted, and the answer got lost or was not understood.

    Unless it was refused in so many words, or the tool says Retryable or Terminal, which is its word that nothing was
    done. Clients have their own time-outs and connection errors; no list of them would be complete.
    """
    if isinstance(error, (Retryable, Terminal)):
        return False
    status = _status(error)
    return status is None or status == 408 or not 400 <= status < 500


def sort(error: BaseException) -> tuple[bool, float | None]:
    """Whether another try may help, and after how many seconds if the error says so."""
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
    return retry_after(value, datetime.now(UTC), _LONGEST_RETRY_SECONDS) if value is not None else None


def _status(error: BaseException) -> int | None:
    return next((s for s in _statuses(error, getattr(error, "response", None)) if isinstance(s, int)), None)


def _statuses(error: BaseException, response: Any) -> Iterator[Any]:
    """httpx and requests have a response, most SDKs a `status_code`, aiohttp and urllib a `status`."""
    yield getattr(response, "status_code", None)
    yield getattr(error, "status_code", None)
    yield getattr(error, "status", None)


def describe(error: BaseException, scrubber: Scrubber | None = None) -> dict[str, Any]:
    kind = type(error).__name__
    message = str(error) if scrubber is None else _scrubbed(error, scrubber)
    message = (message or kind)[:2000].replace("\x00", "\ufffd")
    # Names of files may have bytes that are no text.
    return {"type": kind, "message": message.encode(errors="replace").decode()}


def _scrubbed(error: BaseException, scrubber: Scrubber) -> str:
    """Before it is cut to size: half a secret would not be found. Pydantic shows inputs cut already, so not at all."""
    return scrubber.scrub(explain(error, show_input=False) if isinstance(error, ValidationError) else str(error))
