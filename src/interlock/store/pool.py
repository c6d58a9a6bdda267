"""The database as the engine sees it: a pool whose calls survive a broken connection or a restarted server.

A call is retried from its beginning with backoff until the caller's patience ends. That is safe because every
command can be repeated: ids are made before the call, and a transition that already happened is recognised.
"""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import asyncpg

from interlock.errors import Unavailable
from interlock.settings import Settings
from interlock.store.queries import SQL
from interlock.telemetry import log

T = TypeVar("T")
# What the driver calls a Record.
Row = Mapping[str, Any]


class Raced(Exception):
    """Somebody changed between two of our statements what both are about: try the transaction again."""


# The server went away, is starting or shutting down, chose us as the victim of a deadlock, or made us wait too long.
TRANSIENT: tuple[type[BaseException], ...] = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TooManyConnectionsError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.ReadOnlySQLTransactionError,  # connected to a replica during a fail-over
    asyncpg.InternalClientError,
    Raced,
    ConnectionError,
    OSError,
    TimeoutError,
)

# A value that no column can hold, found out by the server or already by the driver (whose error is an InterfaceError).
UNSTORABLE: tuple[type[Exception], ...] = (asyncpg.DataError, asyncpg.exceptions._base.DataError)


class Clock(Protocol):
    """None means the database's own time; tests give one that they can move."""

    def __call__(self) -> datetime | None: ...


def database_time() -> datetime | None:
    return None


class Tx:
    """One transaction, or one statement that is its own. Every statement is a named one."""

    __slots__ = ("connection",)

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def fetch(self, name: str, *args: Any) -> list[Row]:
        rows: list[Row] = await self.connection.fetch(SQL[name], *args)
        return rows

    async def row(self, name: str, *args: Any) -> Row | None:
        found: Row | None = await self.connection.fetchrow(SQL[name], *args)
        return found

    async def value(self, name: str, *args: Any) -> Any:
        return await self.connection.fetchval(SQL[name], *args)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """What fails in here is undone, and only that."""
        async with self.connection.transaction():
            yield


class _Clean(asyncpg.Connection):  # type: ignore[misc]
    """Nothing that we do outlives its transaction: a connection that comes back needs no cleaning round trip.

    Unless its user was cancelled between the parts of a statement. The server then waits for the rest of it, with locks
    held, and sends an error to the next user when the statement's time is over: one round trip ends it.
    """

    interrupted = False

    def get_reset_query(self) -> str:
        if not self.interrupted:
            return ""
        self.interrupted = False
        return "SELECT"


class Database:
    def __init__(self, url: str, settings: Settings, *, clock: Clock = database_time, size: int | None = None) -> None:
        self.url = url
        self.clock = clock
        self.settings = settings
        self._size = size or settings.pool_size
        self._pool: asyncpg.Pool | None = None

    def __repr__(self) -> str:
        return f"Database({without_password(self.url)})"

    async def open(self, patience: float | None = None) -> "Database":
        self._pool = await retrying(self._make_pool, patience or self.settings.database_patience_seconds)
        return self

    async def _make_pool(self) -> asyncpg.Pool:
        return await asyncpg.create_pool(
            min_size=1,
            max_size=self._size,
            max_inactive_connection_lifetime=300,
            connection_class=_Clean,
            **connection_options(self),
        )

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None

    @property
    def pool(self) -> asyncpg.Pool:
        if self._pool is None:
            raise Unavailable("the database was not opened")
        return self._pool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """One try, no retry: for callers that know what to do when it breaks."""
        async with self.connection() as connection, connection.transaction():
            yield Tx(connection)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection of the pool, clean again however its user ends."""
        async with self.pool.acquire() as connection:
            try:
                yield connection
            except asyncio.CancelledError:
                if connection._con is not None:  # the pool may be gone already
                    connection._con.interrupted = True
                raise

    async def command(self, work: Callable[[Tx], Awaitable[T]], patience: float | None = None) -> T:
        """One transaction, tried again from its beginning when the connection breaks."""

        async def attempt() -> T:
            async with self.transaction() as tx:
                return await work(tx)

        return await retrying(attempt, patience or self.settings.database_patience_seconds)

    async def fetch(self, name: str, *args: Any, patience: float | None = None) -> list[Row]:
        rows: list[Row] = await self._single("fetch", name, args, patience)
        return rows

    async def row(self, name: str, *args: Any, patience: float | None = None) -> Row | None:
        found: Row | None = await self._single("fetchrow", name, args, patience)
        return found

    async def value(self, name: str, *args: Any, patience: float | None = None) -> Any:
        return await self._single("fetchval", name, args, patience)

    async def _single(self, method: str, name: str, args: tuple[Any, ...], patience: float | None) -> Any:
        async def attempt() -> Any:
            async with self.connection() as connection:
                return await getattr(connection, method)(SQL[name], *args)

        return await retrying(attempt, patience or self.settings.database_patience_seconds)


def connection_options(database: Database) -> dict[str, Any]:
    settings = database.settings
    options: dict[str, Any] = {
        "dsn": database.url,
        "timeout": 10,
        "command_timeout": settings.statement_timeout_seconds + 5,
    }
    if behind_pooler(database.url):
        # PgBouncer in transaction mode hands out another session each time: nothing may stay in one.
        return options | {"dsn": _without_pooler_mark(database.url), "statement_cache_size": 0}
    return options | {
        "server_settings": {
            "application_name": "interlock",
            "statement_timeout": f"{settings.statement_timeout_seconds * 1000:.0f}",
            "lock_timeout": f"{settings.lock_timeout_seconds * 1000:.0f}",
            "idle_in_transaction_session_timeout": "60000",
            "jit": "off",
            # Whole tables fit in memory or lie on flash here: an index is nearly always the better way in.
            "random_page_cost": "1.1",
            # And every statement of ours has one. A plan that was made while a table was small, and read whole, would
            # stay until the table is analyzed: by then there may be a hundred thousand runs in it.
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
        }
    }


def behind_pooler(url: str) -> bool:
    return "pgbouncer=true" in urlsplit(url).query


def _without_pooler_mark(url: str) -> str:
    # Not through urlunsplit: it makes postgresql:/app of postgresql:///app.
    address, _, query = url.partition("?")
    kept = "&".join(p for p in query.split("&") if p and p != "pgbouncer=true")
    return f"{address}?{kept}" if kept else address


def without_password(url: str) -> str:
    if (password := urlsplit(url).password) is not None:
        url = url.replace(f":{password}@", ":***@", 1)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


async def retrying(attempt: Callable[[], Awaitable[T]], patience: float) -> T:
    deadline = time.monotonic() + patience
    delay = 0.02
    while True:
        try:
            return await attempt()
        except UNSTORABLE:
            raise
        except TRANSIENT as error:
            if isinstance(error, asyncpg.InterfaceError) and "argument" in str(error):
                raise  # ours: the same statement would be refused again
            if time.monotonic() + delay > deadline:
                raise Unavailable(
                    f"the database did not answer for {patience:.0f} s: {error or type(error).__name__}"
                ) from error
            log.warning("database_retry", error=str(error) or type(error).__name__, retry_in=round(delay, 2))
            await asyncio.sleep(delay * (0.5 + random.random()))
            delay = min(delay * 2, 1.0)
