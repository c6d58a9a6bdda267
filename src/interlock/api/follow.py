"""Following runs: one listening connection wakes whoever waits for a run's next entry."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from interlock.engine.tenants import Principals
from interlock.store.notify import KEYS, RUN, Handler, Listener
from interlock.store.pool import Database


class Follower:
    def __init__(self, database: Database, principals: Principals, also: dict[str, Handler] | None = None) -> None:
        self._principals = principals
        # Counts the times that some key or sign-in ended.
        self.ended = 0
        self._waiting: dict[str, set[asyncio.Event]] = {}
        # A session's reader waits for the run that is under way in it as well.
        self._also: dict[asyncio.Event, str] = {}
        self._listener = Listener(database, {RUN: self._on_run, KEYS: self.on_keys, **(also or {})})
        self.closing = asyncio.Event()

    async def start(self) -> None:
        await self._listener.start()

    async def stop(self) -> None:
        self.close()
        await self._listener.stop()

    def close(self) -> None:
        """Streams end, so that a server can shut down while people are watching; their clients come back."""
        self.closing.set()
        self._on_run("")

    def pause(self, seconds: float, poll_seconds: float) -> float:
        """How long to wait for news before looking: the poll is all there is where no notifications come."""
        return seconds if self._listener.listening.is_set() else min(seconds, poll_seconds)

    @contextmanager
    def watching(self, run_id: object) -> Iterator[asyncio.Event]:
        """An event that is set when the run has something new. Readers pull; a slow one holds up nobody."""
        event, key = asyncio.Event(), str(run_id)
        self._waiting.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            self.listen(event, None)
            self._forget(key, event)

    def listen(self, event: asyncio.Event, run_id: object | None) -> None:
        """Set it for this run too, in place of the last that it was set for."""
        if (before := self._also.pop(event, None)) is not None:
            self._forget(before, event)
        if run_id is not None:
            self._also[event] = str(run_id)
            self._waiting.setdefault(str(run_id), set()).add(event)

    def _forget(self, key: str, event: asyncio.Event) -> None:
        self._waiting[key].discard(event)
        if not self._waiting[key]:
            del self._waiting[key]

    def on_keys(self, _: str = "") -> None:
        """A key was revoked or somebody signed out: all who read look whether they still may."""
        self._principals.forget()
        self.ended += 1
        self._on_run("")

    def _on_run(self, run_id: str) -> None:
        groups = [self._waiting.get(run_id, set())] if run_id else list(self._waiting.values())
        for group in groups:
            for event in group:
                event.set()
