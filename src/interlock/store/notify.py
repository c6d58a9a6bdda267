"""Notifications: one listening connection per process, which comes back by itself when it breaks.

Nothing depends on a notification: everything that waits for one also polls slowly. Behind a pooler that cannot
LISTEN the poll is all there is.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import asyncpg

from interlock.store.pool import TRANSIENT, Database, behind_pooler, connection_options
from interlock.telemetry import log
from interlock.waiting import either

READY = "interlock_ready"
RUN = "interlock_run"
INBOX = "interlock_inbox"
POLICY = "interlock_policy"
OUTBOX = "interlock_outbox"
KEYS = "interlock_keys"
WORKER = "interlock_worker"

Handler = Callable[[str], None]


class Listener:
    """Calls each channel's handler with the payload; with "" after a reconnect, because something may be missed."""

    def __init__(self, database: Database, handlers: dict[str, Handler]) -> None:
        self._database = database
        self._handlers = handlers
        self._task: asyncio.Task[None] | None = None
        self.listening = asyncio.Event()

    async def start(self) -> None:
        if not behind_pooler(self._database.url):
            self._task = asyncio.create_task(self._keep_listening(), name="listener")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_listening(self) -> None:
        delay = 0.05
        while True:
            try:
                await self._listen_until_broken()
                delay = 0.05
            except TRANSIENT as error:
                log.warning("listener_lost", error=str(error) or type(error).__name__)
            self.listening.clear()
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _listen_until_broken(self) -> None:
        connection: Any = await asyncpg.connect(**connection_options(self._database))
        broken = asyncio.Event()
        connection.add_termination_listener(lambda _: broken.set())
        try:
            for channel, handler in self._handlers.items():
                await connection.add_listener(channel, lambda _c, _p, _ch, payload, handler=handler: handler(payload))
            for handler in self._handlers.values():
                handler("")
            self.listening.set()
            while not broken.is_set():
                await either(broken, 20)
                # A half-open connection is only found by using it.
                if not broken.is_set():
                    await connection.execute("SELECT 1", timeout=10)
        finally:
            connection.terminate()
