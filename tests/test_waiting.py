"""Waiting ends with the signal, with the time-out, or on request."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from interlock.timeouts import retry_after, wait_for_event

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)


async def test_it_ends_with_the_event_or_with_the_time() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await asyncio.wait_for(wait_for_event(event, 3600), 5)
    await asyncio.wait_for(wait_for_event(asyncio.Event(), 0), 5)


@pytest.mark.parametrize("moments", range(4))
async def test_a_cancellation_that_comes_together_with_the_event_is_not_lost(moments: int) -> None:
    event = asyncio.Event()

    async def wait_for_ever() -> None:
        while True:
            await wait_for_event(event, 3600)
            event.clear()

    waiting = asyncio.create_task(wait_for_ever())
    await asyncio.sleep(0)
    event.set()
    for _ in range(moments):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=5)
    assert waiting.cancelled()


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("17", 17),
        (1.5, 1.5),
        ("0", 0),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90),
        (format_datetime(NOW - timedelta(days=1), usegmt=True), 0),
        ("Mon, 16 Nov 2026 12:00:05 -0000", 5),
        ("Mon, 16 Nov 2026 14:00:05 +0200", 5),
        ("99999999", 3600),
        ("inf", 3600),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600),
        ("-5", None),
        ("nan", None),
        ("soon", None),
        ("", None),
        (None, None),
        ([], None),
        ("Mon, 99 Nov 2026 12:00:05 GMT", None),
    ],
)
def test_retry_after_is_a_number_or_a_date_within_reason(said: object, seconds: float | None) -> None:
    assert retry_after(said, NOW, 3600) == seconds
