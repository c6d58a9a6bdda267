"""Notifications: one listening connection per process, which reconnects when it breaks.

Correctness does not depend on notifications: every waiting component also polls slowly. Behind a pooler that cannot
LISTEN, polling is the only way.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import asyncpg

from interlock.settings import Settings
from interlock.store.pool import TRANSIENT, Database, backoff, behind_pooler, connect, connection_options
from interlock.telemetry import log
from interlock.timeouts import wait_for_event

# The channels. The database's name of a channel begins with the schema, because all schemas share its channels.
READY = "ready"
RUN = "run"
RUN_COMMAND = "run_command"
POLICY = "policy"
OUTBOX = "outbox"
KEYS = "keys"
WORKER = "worker"

Handler = Callable[[str], None]


def channel_name(settings: Settings, channel: str) -> str:
    """Return the database's name of a channel."""
    return f"{settings.database_schema}.{channel}"


class Listener:
    """Calls each channel's handler with the payload, or with "" after a reconnect, which may lose notifications."""

    def __init__(self, database: Database, handlers: dict[str, Handler]) -> None:
        self._database = database
        self.handlers = handlers
        self.listening = asyncio.Event()

    async def start(self) -> None:
        if not behind_pooler(self._database.url):
            _ears.setdefault(self._database, _Ear(self._database)).add(self)

    async def stop(self) -> None:
        self.listening.clear()
        if (ear := _ears.get(self._database)) is not None and not ear.remove(self):
            del _ears[self._database]
            await ear.close()


class _Ear:
    """The connection that all listeners of a process share: the server wakes every listening connection each time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listeners: list[Listener] = []
        self._stir = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)
        self._stir.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep_listening(), name="listener")

    def remove(self, listener: Listener) -> int:
        """Remove the listener and return how many are left."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        return len(self._listeners)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_listening(self) -> None:
        failures = 0
        while True:
            lost: BaseException = ConnectionError("the connection was closed")
            try:
                await self._listen_until_broken()
                failures = 0
            except (asyncpg.PostgresError, *TRANSIENT) as error:  # or no connections are accepted for a while
                lost = error
                log.warning("listener_lost", error=str(error) or type(error).__name__)
            for listener in self._listeners:
                listener.listening.clear()
            await asyncio.sleep(backoff(lost, failures))
            failures += 1

    async def _listen_until_broken(self) -> None:
        connection = await connect(connection_options(self._database))
        connection.add_termination_listener(lambda _: self._stir.set())
        try:
            while not connection.is_closed():
                self._stir.clear()
                for listener in [each for each in self._listeners if not each.listening.is_set()]:
                    await self._begin(connection, listener)
                await wait_for_event(self._stir, 20)
                # A broken half-open connection is only detected by using it.
                if not self._stir.is_set():
                    await connection.execute("SELECT 1", timeout=10)
        finally:
            connection.terminate()

    async def _begin(self, connection: Any, listener: Listener) -> None:
        for channel in listener.handlers:
            # asyncpg does not add a listener twice.
            await connection.add_listener(channel_name(self._database.settings, channel), self._on_news)
        if listener not in self._listeners:
            return  # stopped in the meantime
        for handler in listener.handlers.values():
            handler("")
        listener.listening.set()

    def _on_news(self, _connection: Any, _pid: int, channel: str, payload: str) -> None:
        name = channel.removeprefix(channel_name(self._database.settings, ""))
        for listener in list(self._listeners):
            if (handler := listener.handlers.get(name)) is not None:
                handler(payload)


_ears: dict[Database, _Ear] = {}
