"""The database as the engine sees it: a pool whose calls survive a broken connection or a restarted server.

A call is retried from its beginning with backoff until the caller's patience ends. That is safe because every
command can be repeated: ids are made before the call, and a transition that already happened is recognised.
"""

import asyncio
import contextlib
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import asyncpg

from interlock.errors import Invalid, Unavailable
from interlock.settings import Settings
from interlock.store.queries import SQL
from interlock.telemetry import log

T = TypeVar("T")
# What the driver calls a Record.
Row = Mapping[str, Any]
# The patience of whoever has nothing better to do than to wait for a database that is away.
FOREVER = float("inf")


class Raced(Exception):
    """Somebody changed between two of our statements what both are about: try the transaction again."""


# The server went away, is starting or shutting down, has no room left, chose us as the victim of a deadlock, or made us
# wait too long; or somebody migrated its tables since the statement was prepared.
TRANSIENT: tuple[type[Exception], ...] = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InsufficientResourcesError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.ReadOnlySQLTransactionError,  # connected to a replica during a fail-over
    asyncpg.InvalidCachedStatementError,
    asyncpg.InternalClientError,
    Raced,
    ConnectionError,
    OSError,
    TimeoutError,
)

# A server that we cannot use, though the connection is there: it became a replica, or is silent for longer than any
# statement takes. What lies idle leads to the same one.
_USELESS: tuple[type[BaseException], ...] = (asyncpg.ReadOnlySQLTransactionError, TimeoutError)

# A user that ends with one of these may leave its connection in the middle of a statement or a transaction.
_HALF_WAY: tuple[type[BaseException], ...] = (asyncio.CancelledError, *TRANSIENT)

# No address, or one where we are not known, or that asks for what is not known there: waiting would not help.
_WRONG_ADDRESS: tuple[type[Exception], ...] = (
    asyncpg.exceptions.ClientConfigurationError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.UndefinedObjectError,
    ssl.SSLCertVerificationError,
)

# Not this host, but perhaps the next one of the address.
_NOT_HERE: tuple[type[Exception], ...] = (
    OSError,  # it does not answer, or not in time
    asyncpg.CannotConnectNowError,
    asyncpg.exceptions.TargetServerAttributeNotMatched,
)

# A value that no column or index can hold, found out by the server or already by the driver (whose error is an
# InterfaceError).
UNSTORABLE: tuple[type[Exception], ...] = (
    asyncpg.DataError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.exceptions._base.DataError,
)


class Clock(Protocol):
    """None means the database's own time; tests give one that they can move."""

    def __call__(self) -> datetime | None: ...


def database_time() -> datetime | None:
    return None


class Tx:
    """One transaction, or one statement that is its own. Every statement is a named one."""

    __slots__ = ("_afterwards", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._afterwards: list[Callable[[], None]] = []

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
        before = len(self._afterwards)
        try:
            async with self.connection.transaction():
                yield
        except BaseException:
            del self._afterwards[before:]
            raise

    def afterwards(self, tell: Callable[[], None]) -> None:
        """When it is committed, and only then: what is logged and counted has happened, and once."""
        if self.connection.is_in_transaction():
            self._afterwards.append(tell)
        else:
            tell()

    def committed(self) -> None:
        for tell in self._afterwards:
            tell()


class Pool:
    """Connections that are used in turns, the one that was used last first.

    None of our statements leaves anything in a session, so a connection that comes back needs no reset. A general pool
    makes one, and that took as long as a small statement.
    """

    def __init__(self, options: dict[str, Any], size: int, patience: float | None = None) -> None:
        self._options = options
        self._patience = patience
        self._room = asyncio.Semaphore(size)
        self._idle: list[Any] = []
        self._all: set[Any] = set()
        self._is_closed = False

    def acquire(self) -> "_Use":
        return _Use(self)

    async def take(self) -> Any:
        await self._enter()
        try:
            while self._idle:
                if not (connection := self._idle.pop()).is_closed():
                    return connection
                self._all.discard(connection)
            if self._is_closed:
                raise Unavailable("the database was closed")
            connection = await connect(self._options)
        except BaseException:
            self._room.release()
            raise
        self._all.add(connection)
        return connection

    async def _enter(self) -> None:
        """Wait for a free place, but not for ever: a caller has to hear that there is none to be had."""
        if not self._room.locked():
            await self._room.acquire()
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._room.acquire()
        except TimeoutError:
            raise TimeoutError("all of this process's connections are in use") from None

    def give_back(self, connection: Any) -> None:
        self._room.release()
        if self._is_closed or connection.is_closed():
            connection.terminate()
            self._all.discard(connection)
        else:
            self._idle.append(connection)

    def leave_idle(self) -> None:
        for connection in self._idle:
            connection.terminate()

    def terminate(self) -> None:
        self._is_closed = True
        for connection in self._all:
            connection.terminate()

    async def execute(self, statement: str, *args: Any) -> Any:
        async with self.acquire() as connection:
            return await connection.execute(statement, *args)

    async def fetch(self, statement: str, *args: Any) -> list[Row]:
        async with self.acquire() as connection:
            rows: list[Row] = await connection.fetch(statement, *args)
            return rows

    async def fetchrow(self, statement: str, *args: Any) -> Row | None:
        async with self.acquire() as connection:
            row: Row | None = await connection.fetchrow(statement, *args)
            return row

    async def fetchval(self, statement: str, *args: Any) -> Any:
        async with self.acquire() as connection:
            return await connection.fetchval(statement, *args)


class _Use:
    """A connection for as long as it is used, clean again however its user ends."""

    __slots__ = ("_connection", "_pool")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def __aenter__(self) -> Any:
        self._connection = await self._pool.take()
        return self._connection

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                return
            if issubclass(kind, _USELESS):
                self._connection.terminate()
                self._pool.leave_idle()
            elif issubclass(kind, _HALF_WAY) and not self._connection.is_closed():
                await self._clean()
        finally:
            self._pool.give_back(self._connection)

    async def _clean(self) -> None:
        """Its user may have ended between the parts of a statement. The server then waits for the rest of it, with
        locks held, and sends an error to the next user when the statement's time is over: a round trip ends it.

        Or it ended while a transaction began. The driver would then take the next user's for a part of that one, and
        what it commits would be gone with the connection: a reset ends it, on both sides.
        """
        try:
            await self._connection.execute("SELECT", timeout=5)
            await self._connection.reset(timeout=5)
        except BaseException as error:
            self._connection.terminate()
            # An exception that took the place of a cancellation would make whoever was told to end go on.
            if not isinstance(error, Exception):
                raise


class Database:
    def __init__(self, url: str, settings: Settings, *, clock: Clock = database_time, size: int | None = None) -> None:
        self.url = url
        self.clock = clock
        self.settings = settings
        self._size = size or settings.pool_size
        self._pool: Pool | None = None

    def __repr__(self) -> str:
        return f"Database({without_password(self.url)})"

    async def open(self, patience: float | None = None) -> "Database":
        self._pool = await retrying(self._make_pool, patience or self.settings.database_patience_seconds)
        return self

    async def _make_pool(self) -> Pool:
        _check_address(self.url)
        options = connection_options(self)
        pool = Pool(options, self._size, self.settings.database_patience_seconds)
        try:
            async with pool.acquire() as connection:
                is_kept = "server_settings" not in options or await connection.fetchval(_KEEPS_OUR_SETTINGS)
        except _WRONG_ADDRESS as error:
            raise Invalid(f"INTERLOCK_DATABASE_URL: {error}") from None
        except asyncpg.ProtocolViolationError as error:
            if "startup parameter" not in str(error):
                raise
            is_kept = False
        if not is_kept:
            pool.terminate()
            raise Invalid(_POOLER)
        return pool

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            raise Unavailable("the database was not opened")
        return self._pool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """One try, no retry: for callers that know what to do when it breaks."""
        async with self.connection() as connection:
            tx = Tx(connection)
            async with connection.transaction():
                yield tx
            tx.committed()

    def connection(self) -> _Use:
        return self.pool.acquire()

    def afterwards(self, tell: Callable[[], None]) -> None:
        """At once, since each statement that is not in a transaction is committed by itself: see `Tx.afterwards`."""
        tell()

    @asynccontextmanager
    async def unhurried(self) -> AsyncIterator[Any]:
        """A connection of its own on which the driver waits as long as the server does: for what may take hours."""
        connection = await connect(connection_options(self) | {"command_timeout": None})
        try:
            yield connection
        finally:
            await connection.close()

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


# Which host of an address answered last: the first to be asked the next time.
_answered: dict[str, str] = {}


async def connect(options: dict[str, Any]) -> Any:
    """To the first host of the address that will do. Each has the whole time-out: the driver has one for all of them,
    and never gets past a host that is silent.
    """
    address = options["dsn"]
    hosts = hosts_of(address)
    if (last := _answered.get(address)) in hosts:
        hosts = [last, *(host for host in hosts if host != last)]
    *others, final = hosts
    for host in others:
        with contextlib.suppress(*_NOT_HERE):
            return await _connect(options, host)
    return await _connect(options, final)


async def _connect(options: dict[str, Any], host: str) -> Any:
    connection = await asyncpg.connect(**options | {"dsn": host})
    _answered[options["dsn"]] = host
    return connection


def hosts_of(address: str) -> list[str]:
    """An address for each host of it."""
    if (parts := re.fullmatch(r"(\w+://(?:[^@/?#]*@)?)([^/?#]*)(.*)", address, re.DOTALL)) is None:
        return [address]
    before, hosts, after = parts.groups()
    return [before + host + after for host in hosts.split(",")]


# What was asked for when the connection was made is the server's own: whoever stands between has dropped it, and hands
# out another session for each transaction, with the statements of others prepared in it.
_KEEPS_OUR_SETTINGS = "SELECT source = 'client' FROM pg_settings WHERE name = 'enable_bitmapscan'"
_POOLER = (
    "INTERLOCK_DATABASE_URL: a pooler answers there, which keeps nothing in a session: add pgbouncer=true to the"
    " address (postgresql://host/interlock?pgbouncer=true), or name the server itself"
)


def _check_address(url: str) -> None:
    """Nothing of a password that broke it is in what we say."""
    with contextlib.suppress(ValueError):
        if urlsplit(url).netloc.count("@") < 2 and all(urlsplit(host).port != 0 for host in hosts_of(url)):
            return
    raise Invalid(
        "INTERLOCK_DATABASE_URL: this is no address; in a password, @ : / ? # [ ] and % are written %40 %3A %2F %3F"
        " %23 %5B %5D and %25"
    )


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
            "default_transaction_isolation": "read committed",
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
    task = asyncio.current_task()
    assert task is not None
    cancellations = task.cancelling()
    while True:
        try:
            return await attempt()
        except UNSTORABLE:
            raise
        except TRANSIENT as error:
            if isinstance(error, asyncpg.InterfaceError) and "argument" in str(error):
                raise  # a mistake in the call: the same statement would be refused again
            if task.cancelling() > cancellations:
                raise asyncio.CancelledError from error  # a rollback raised this error in place of the cancellation
            if time.monotonic() + delay > deadline:
                raise Unavailable(
                    f"the database did not answer for {patience:.0f} s: {error or type(error).__name__}"
                ) from error
            log.warning("database_retry", error=str(error) or type(error).__name__, retry_in=round(delay, 2))
            await asyncio.sleep(delay * (0.5 + random.random()))
            delay = min(delay * 2, 1.0)
