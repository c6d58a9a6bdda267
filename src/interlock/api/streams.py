"""Event streams: readers pull new entries from the database; notifications only wake them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

from fastapi import Request
from fastapi.sse import EventSourceResponse

from interlock.api.dependencies import NUMBER, AppContext, key_in
from interlock.api.views import dump
from interlock.errors import Unauthorized
from interlock.timeouts import wait_for_event

# How long a run announces its entries after a reader last registered.
WATCH_SECONDS = 90.0
_HEARTBEAT_SECONDS = 15.0
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 5.0

# Returns the next events for the reader, in order; [] if there is nothing now, None if nothing will follow. The
# argument is the event that ends the pause before the next call.
More = Callable[[asyncio.Event], Awaitable[list[bytes] | None]]


def is_wanted(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def resumed(request: Request, after: int) -> int:
    """Return the position at which a reader continues after it lost its connection."""
    last = request.headers.get("last-event-id", "")
    return max(after, int(last)) if NUMBER.fullmatch(last) else after


def event(number: bytes, kind: str, view: Any) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (number, kind.encode(), dump(view))


def stream(found: AppContext, request: Request, subject_id: UUID, more: More) -> EventSourceResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventSourceResponse(_events(found, key_in(request), subject_id, more), headers=headers)


async def _events(found: AppContext, key: str, subject_id: UUID, more: More) -> AsyncIterator[bytes]:
    """Yield events as the reader pulls them, so a slow reader does not delay the others."""
    quiet, pause = 0.0, _FIRST_PAUSE_SECONDS
    yield b"retry: 1000\n\n"
    with found.follower.watching(subject_id) as news:
        while not found.follower.closing.is_set():
            news.clear()
            events = await more(news)
            # Check the key after reading: an entry written after the key was revoked must not be sent.
            if not await _still_known(found, key):
                return
            if events is None:
                break
            for one in events:
                yield one
            if events:
                quiet, pause = 0.0, _FIRST_PAUSE_SECONDS
                continue
            pause = found.follower.pause(pause, found.settings.poll_seconds)
            await wait_for_event(news, pause)
            quiet += pause
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            if quiet >= _HEARTBEAT_SECONDS:
                quiet = 0.0
                yield b": still here\n\n"
        else:
            return
    yield b"event: end\ndata: {}\n\n"


async def _still_known(found: AppContext, key: str) -> bool:
    try:
        await found.principals.behind(key)
    except Unauthorized:
        return False
    return True


class Watch:
    """Renews the registration of a reader in time. A run without registered readers announces no entries."""

    def __init__(self) -> None:
        self._said = float("-inf")

    def is_due(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._said <= WATCH_SECONDS / 3:
            return False
        self._said = now
        return True

    def forget(self) -> None:
        self._said = float("-inf")
