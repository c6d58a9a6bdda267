"""Following runs: one listening connection wakes every request that waits for a run's next entry."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from interlock.engine.access.tenants import Principals
from interlock.store.notify import KEYS, RUN, Handler, Listener
from interlock.store.pool import Database


class Follower:
    def __init__(self, database: Database, principals: Principals, also: dict[str, Handler] | None = None) -> None:
        self._principals = principals
        # How often a key or a console session was revoked or ended.
        self.ended = 0
        self._waiting: dict[str, set[asyncio.Event]] = {}
        # The stream of a session also waits for the current run of that session.
        self._also: dict[asyncio.Event, str] = {}
        self._listener = Listener(database, {RUN: self._on_run, KEYS: self.on_keys, **(also or {})})
        self.closing = asyncio.Event()

    async def start(self) -> None:
        await self._listener.start()

    async def stop(self) -> None:
        self.close()
        await self._listener.stop()

    def close(self) -> None:
        """End all streams, so that the server can shut down while clients are connected. The clients reconnect."""
        self.closing.set()
        self._on_run("")

    def pause(self, seconds: float, poll_seconds: float) -> float:
        """Return how long to wait for a notification before reading.

        Without notifications, the poll interval is the maximum.
        """
        return seconds if self._listener.listening.is_set() else min(seconds, poll_seconds)

    @contextmanager
    def watching(self, run_id: object) -> Iterator[asyncio.Event]:
        """Yield an event that is set when the run has a new entry.

        Readers pull, so a slow reader does not delay the others.
        """
        event, key = asyncio.Event(), str(run_id)
        self._waiting.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            self.listen(event, None)
            self._forget(key, event)

    def listen(self, event: asyncio.Event, run_id: object | None) -> None:
        """Set the event for this run too, in place of the previous additional run."""
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
        """Wake all readers after a key was revoked or a session ended: each checks whether it may continue."""
        self._principals.forget()
        self.ended += 1
        self._on_run("")

    def _on_run(self, run_id: str) -> None:
        groups = [self._waiting.get(run_id, set())] if run_id else list(self._waiting.values())
        for group in groups:
            for event in group:
                event.set()
