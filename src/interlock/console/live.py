"""Live pages: one stream that says when to look again. What there is to see is asked for as by anybody else.

A page of one run hears of it from the journal's notifications. Lists look once a second at a few rows that tell whether
anything changed, and all who watch the same list share that look.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar
from uuid import UUID
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from interlock.api.services import Services
from interlock.api.streams import WATCH_SECONDS, Watch
from interlock.console.page import COOKIE, Visit, Visitor, uuid_of
from interlock.engine import runs, sessions, signins
from interlock.errors import NotFound, Unavailable
from interlock.governance.roles import Permission
from interlock.lifecycle import RUN
from interlock.waiting import either

router = APIRouter()

_LOOK_SECONDS = 1.0
_COMMENT_SECONDS = 15.0

Look = Callable[[Services, Visitor], Awaitable[Any]]


async def _inbox(found: Services, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_inbox", visit.who.tenant_id)


async def _runs(found: Services, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_runs", visit.who.tenant_id, sorted(RUN.open))


async def _sessions(found: Services, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_sessions", visit.who.tenant_id)


async def _workers(found: Services, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_workers")


async def _jobs(found: Services, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_jobs", visit.who.tenant_id)


LISTS: dict[str, Look] = {"inbox": _inbox, "runs": _runs, "sessions": _sessions, "workers": _workers, "jobs": _jobs}


@router.get("/live/{topic}")
async def follow_list(topic: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    if topic not in LISTS:
        raise NotFound(f"nothing is told about {topic}")
    return _stream(_changes(topic, visit, _SignIn(visit.services, request)))


@router.get("/live/run/{run_id}")
async def follow_run(run_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    row = await runs.get(visit.services.database, visit.who, uuid_of(run_id, "run"))
    return _stream(
        _steps(visit.services, _SignIn(visit.services, request), row["id"], request.headers.get("last-event-id"))
    )


@router.get("/live/session/{session_id}")
async def follow_session(session_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    row = await sessions.get(visit.services.database, visit.who, uuid_of(session_id, "session"))
    return _stream(_session(visit.services, _SignIn(visit.services, request), row["id"]))


def _stream(changes: AsyncIterator[bytes]) -> Response:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(changes, media_type="text/event-stream", headers=headers)


async def _steps(found: Services, signin: "_SignIn", run_id: UUID, last: str | None) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    seen, watch, spoke = last, Watch(), clock()
    yield b"retry: 1000\n\n"
    with found.follower.watching(run_id) as news:
        while not found.follower.closing.is_set():
            if watch.is_due():
                await found.database.fetch("watch_run", found.database.clock(), run_id, WATCH_SECONDS)
            news.clear()
            now = await found.database.row("pulse_of_run", run_id)
            if now is None or not await signin.holds():
                return
            pulse = f"{now['seq']}.{now['asked']}"
            if pulse != seen:
                yield b"id: %s\nevent: changed\ndata: {}\n\n" % pulse.encode()
                seen, spoke = pulse, clock()
            elif clock() - spoke > _COMMENT_SECONDS:
                yield b": still here\n\n"
                spoke = clock()
            await either(news, 2.0)
            # Many steps in a moment are one look.
            await asyncio.sleep(0.1)


async def _session(found: Services, signin: "_SignIn", session_id: UUID) -> AsyncIterator[bytes]:
    """As a run; which run it is changes with every message, and the session tells of that itself."""
    clock = asyncio.get_running_loop().time
    seen, spoke = None, clock()
    yield b"retry: 1000\n\n"
    with found.follower.watching(session_id) as news:
        while not found.follower.closing.is_set():
            news.clear()
            now = await found.database.row("pulse_of_session", session_id)
            if now is None or not await signin.holds():
                return
            run_id, pulse = now["run_id"], tuple(now.values())
            if run_id is not None:
                await found.database.fetch("watch_session", found.database.clock(), session_id, WATCH_SECONDS)
            if pulse != seen:
                yield b"event: changed\ndata: {}\n\n"
                seen, spoke = pulse, clock()
            elif clock() - spoke > _COMMENT_SECONDS:
                yield b": still here\n\n"
                spoke = clock()
            found.follower.listen(news, run_id)
            await either(news, 2.0)
            await asyncio.sleep(0.1)


async def _changes(topic: str, visit: Visitor, signin: "_SignIn") -> AsyncIterator[bytes]:
    found = visit.services
    pulse = _Pulse.of(topic, visit)
    clock = asyncio.get_running_loop().time
    seen, spoke = pulse.beat, clock()
    yield b"retry: 1000\nevent: changed\ndata: {}\n\n"
    while not found.follower.closing.is_set():
        await pulse.next(seen)
        if not await signin.holds():
            return
        if pulse.beat != seen:
            seen, spoke = pulse.beat, clock()
            yield b"event: changed\ndata: {}\n\n"
        elif clock() - spoke > _COMMENT_SECONDS:
            spoke = clock()
            yield b": still here\n\n"


class _SignIn:
    """Whether somebody is still signed in: asked now and then, and at once when a key was revoked or somebody left."""

    def __init__(self, found: Services, request: Request) -> None:
        self._found, self._token = found, request.cookies[COOKIE]
        self._asked, self._ended = float("-inf"), found.follower.ended

    async def holds(self) -> bool:
        now, ended = asyncio.get_running_loop().time(), self._found.follower.ended
        if ended == self._ended and now - self._asked < _COMMENT_SECONDS:
            return True
        self._asked, self._ended = now, ended
        return await signins.behind(self._found.database, self._token) is not None


class _Pulse:
    """Looks once a second for as long as somebody holds on to it."""

    _all: ClassVar[WeakValueDictionary[tuple[int, str, UUID], "_Pulse"]] = WeakValueDictionary()

    def __init__(self, topic: str, visit: Visitor) -> None:
        self.beat = 0
        self._look, self._visit = LISTS[topic], visit
        self._seen: Any = None
        self._lock = asyncio.Lock()
        self._looked = float("-inf")

    @classmethod
    def of(cls, topic: str, visit: Visitor) -> "_Pulse":
        key = (id(visit.services), topic, visit.who.tenant_id)
        found = cls._all.get(key)
        if found is None:
            found = cls._all[key] = cls(topic, visit)
        return found

    async def next(self, seen: int) -> None:
        """Until it beats or a look found nothing. Whoever comes first looks; the others have it from them."""
        closing = self._visit.services.follower.closing
        async with self._lock:
            if self.beat != seen:
                return
            clock = asyncio.get_running_loop().time
            await either(closing, max(0.0, self._looked + _LOOK_SECONDS - clock()))
            self._looked = clock()
            try:
                now = await self._look(self._visit.services, self._visit)
            except Unavailable:
                return
            if now != self._seen:
                self._seen = now
                self.beat += 1
