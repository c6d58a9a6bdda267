"""Live pages: one stream tells the page when to reload. The page then loads its content with an ordinary request.

The page of a run waits for the journal's notifications. Lists check once a second a few rows that show whether anything
changed, and all viewers of the same list share that check.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar
from uuid import UUID
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from interlock.api.dependencies import AppContext
from interlock.api.limits import COOKIE
from interlock.api.streams import WATCH_SECONDS, Watch
from interlock.console.rendering import Visit, Visitor, uuid_of
from interlock.engine import sessions
from interlock.engine.access import console_sessions
from interlock.engine.runs import runs
from interlock.errors import NotFound, Unavailable
from interlock.ids import RunId, SessionId
from interlock.lifecycle import RUN
from interlock.policy.roles import Permission
from interlock.timeouts import wait_for_event

router = APIRouter()

_LOOK_SECONDS = 1.0
_QUIET_SECONDS = 15.0
# A page that receives nothing for long says that it is out of date. A comment is not enough: the page's script cannot
# see it.
_HERE = b"event: here\ndata: {}\n\n"

Look = Callable[[AppContext, Visitor], Awaitable[Any]]


async def _inbox(found: AppContext, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_inbox", visit.who.tenant_id, visit.who.workspace_id)


async def _runs(found: AppContext, visit: Visitor) -> Any:
    who = visit.who
    return await found.database.value("pulse_of_runs", who.tenant_id, sorted(RUN.open), who.workspace_id)


async def _sessions(found: AppContext, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_sessions", visit.who.tenant_id, visit.who.workspace_id)


async def _workers(found: AppContext, visit: Visitor) -> Any:
    tenant_id = None if visit.who.is_operator else visit.who.tenant_id
    return await found.database.value("pulse_of_workers", tenant_id, visit.who.workspace_id)


async def _jobs(found: AppContext, visit: Visitor) -> Any:
    return await found.database.value("pulse_of_jobs", visit.who.tenant_id, visit.who.workspace_id)


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
    row = await runs.get(visit.services.database, visit.who, RunId(uuid_of(run_id, "run")))
    return _stream(
        _steps(visit.services, _SignIn(visit.services, request), row.id, request.headers.get("last-event-id"))
    )


@router.get("/live/session/{session_id}")
async def follow_session(session_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    row = await sessions.get(visit.services.database, visit.who, SessionId(uuid_of(session_id, "session")))
    return _stream(_session(visit.services, _SignIn(visit.services, request), row["id"]))


def _stream(changes: AsyncIterator[bytes]) -> Response:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(changes, media_type="text/event-stream", headers=headers)


async def _steps(found: AppContext, signin: "_SignIn", run_id: RunId, last: str | None) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    seen, watch, spoke = last, Watch(), clock()
    yield b"retry: 1000\n\n"
    with found.follower.watching(run_id) as news:
        while not found.follower.closing.is_set():
            if watch.is_due():
                await found.database.fetch("watch_run", run_id, WATCH_SECONDS)
            news.clear()
            now = await found.database.row("pulse_of_run", run_id)
            if now is None or not await signin.holds():
                return
            pulse = f"{now['seq']}.{now['asked']}"
            if pulse != seen:
                yield b"id: %s\nevent: changed\ndata: {}\n\n" % pulse.encode()
                seen, spoke = pulse, clock()
            elif clock() - spoke > _QUIET_SECONDS:
                yield _HERE
                spoke = clock()
            await wait_for_event(news, 2.0)
            # Combine many steps in a short time into one update.
            await asyncio.sleep(0.1)


async def _session(found: AppContext, signin: "_SignIn", session_id: SessionId) -> AsyncIterator[bytes]:
    """Stream the changes of a session.

    Each message changes the current run, and the session notifies of that itself.
    """
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
                await found.database.fetch("watch_session", session_id, WATCH_SECONDS)
            if pulse != seen:
                yield b"event: changed\ndata: {}\n\n"
                seen, spoke = pulse, clock()
            elif clock() - spoke > _QUIET_SECONDS:
                yield _HERE
                spoke = clock()
            found.follower.listen(news, run_id)
            await wait_for_event(news, 2.0)
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
        elif clock() - spoke > _QUIET_SECONDS:
            spoke = clock()
            yield _HERE


class _SignIn:
    """Checks whether the visitor is still signed in.

    It checks from time to time, and at once after a key was revoked or a session ended.
    """

    def __init__(self, found: AppContext, request: Request) -> None:
        self._found, self._token = found, request.cookies[COOKIE]
        self._asked, self._ended = float("-inf"), found.follower.ended

    async def holds(self) -> bool:
        now, ended = asyncio.get_running_loop().time(), self._found.follower.ended
        if ended == self._ended and now - self._asked < _QUIET_SECONDS:
            return True
        self._asked, self._ended = now, ended
        return await console_sessions.behind(self._found.database, self._token) is not None


class _Pulse:
    """Reads a list's rows once a second, for as long as a viewer holds a reference to it."""

    _all: ClassVar[WeakValueDictionary[tuple[int, str, UUID, str | None], "_Pulse"]] = WeakValueDictionary()

    def __init__(self, topic: str, visit: Visitor) -> None:
        self.beat = 0
        self._look, self._visit = LISTS[topic], visit
        self._seen: Any = None
        self._lock = asyncio.Lock()
        self._looked = float("-inf")

    @classmethod
    def of(cls, topic: str, visit: Visitor) -> "_Pulse":
        # Only viewers who see the same rows share one: the timing of changes would reveal when others work.
        key = (id(visit.services), topic, visit.who.tenant_id, visit.who.workspace_id)
        found = cls._all.get(key)
        if found is None:
            found = cls._all[key] = cls(topic, visit)
        return found

    async def next(self, seen: int) -> None:
        """Wait for a change or for one check without a change. The first waiter reads; the others use its result."""
        closing = self._visit.services.follower.closing
        async with self._lock:
            if self.beat != seen:
                return
            clock = asyncio.get_running_loop().time
            await wait_for_event(closing, max(0.0, self._looked + _LOOK_SECONDS - clock()))
            self._looked = clock()
            try:
                now = await self._look(self._visit.services, self._visit)
            except Unavailable:
                return
            if now != self._seen:
                self._seen = now
                self.beat += 1
