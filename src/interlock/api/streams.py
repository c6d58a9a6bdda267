"""Event streams: what is new is pulled from the database; notifications only say when to look again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

from fastapi import Request
from fastapi.sse import EventSourceResponse

from interlock.api.services import NUMBER, Services, key_in
from interlock.api.views import dump
from interlock.errors import Unauthorized
from interlock.waiting import either

# How long a run announces its entries after somebody last said that they follow it.
WATCH_SECONDS = 90.0
_HEARTBEAT_SECONDS = 15.0
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 5.0

# What the reader was not given yet, in its order; [] if there is nothing now, None if there never will be. It is given
# the event that ends the pause until it is asked again.
More = Callable[[asyncio.Event], Awaitable[list[bytes] | None]]


def is_wanted(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def resumed(request: Request, after: int) -> int:
    """Where a reader goes on that has lost its connection."""
    last = request.headers.get("last-event-id", "")
    return max(after, int(last)) if NUMBER.fullmatch(last) else after


def event(number: bytes, kind: str, view: Any) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (number, kind.encode(), dump(view))


def stream(found: Services, request: Request, subject_id: UUID, more: More) -> EventSourceResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventSourceResponse(_events(found, key_in(request), subject_id, more), headers=headers)


async def _events(found: Services, key: str, subject_id: UUID, more: More) -> AsyncIterator[bytes]:
    """Readers pull: one that is slow holds up nobody."""
    quiet, pause = 0.0, _FIRST_PAUSE_SECONDS
    yield b"retry: 1000\n\n"
    with found.follower.watching(subject_id) as news:
        while not found.follower.closing.is_set():
            news.clear()
            events = await more(news)
            # After the look: nothing of what happened since a key was revoked is given to it.
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
            await either(news, pause)
            quiet += pause
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            if quiet >= _HEARTBEAT_SECONDS:
                quiet = 0.0
                yield b": still here\n\n"
        else:
            return
    yield b"event: end\ndata: {}\n\n"


async def _still_known(found: Services, key: str) -> bool:
    try:
        await found.principals.behind(key)
    except Unauthorized:
        return False
    return True


class Watch:
    """Says again in time that somebody follows; whoever appends to a run that nobody follows announces nothing."""

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
