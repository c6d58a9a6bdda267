"""Waiting: for an event but with a timeout, and for as long as a server asks us to."""

import asyncio
import contextlib
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set or the time has passed.

    Not `wait_for`: before Python 3.12 it swallows a cancellation that arrives together with the event, and the
    canceled task would continue for ever.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def retry_after(value: Any, now: datetime, longest: float) -> float | None:
    """Return the seconds of a Retry-After header, which is a number or a date. Return None for any other value.

    A value from another system is limited, so that a nonsensical number cannot block us.
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return _until(value, now, longest)
    return min(seconds, longest) if seconds >= 0 else None


def _until(value: Any, now: datetime, longest: float) -> float | None:
    try:
        at = parsedate_to_datetime(value)
        # A date without a zone is UTC: HTTP knows no other.
        moment = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max((moment - now).total_seconds(), 0.0), longest)
