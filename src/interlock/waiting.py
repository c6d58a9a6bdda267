"""Waiting: for a signal but not for ever, and for as long as a server asks us to."""

import asyncio
import contextlib
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any


async def either(event: asyncio.Event, seconds: float) -> None:
    """Until the event or the time, whichever is first.

    Not `wait_for`: before Python 3.12 it swallows a cancellation that comes together with the event, and whoever was
    told to end would go on for ever.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def retry_after(value: Any, now: datetime, longest: float) -> float | None:
    """The seconds of a Retry-After, which is a number or a date; what is neither is as good as nothing.

    What a foreign system says is bounded: nothing must be lost to a nonsensical number.
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return _until(value, now, longest)
    return min(seconds, longest) if seconds >= 0 else None


def _until(value: Any, now: datetime, longest: float) -> float | None:
    try:
        at = parsedate_to_datetime(value)
        # A date without a zone is meant as UTC: HTTP knows no other.
        moment = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max((moment - now).total_seconds(), 0.0), longest)
