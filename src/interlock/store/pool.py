"""The database as the engine sees it: a pool whose calls survive a broken connection or a restarted server.

A call is retried from its beginning with backoff until the caller's patience ends. That is safe because every
command can be repeated: ids are made before the call, and a transition that already happened is recognized.
"""

import asyncio
import contextlib
import random
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import asyncpg

from interlock import clock
from interlock.errors import Invalid, Unavailable
from interlock.settings import Settings
from interlock.store.queries import statements_in
from interlock.store.session import DatabaseClock, server_time, session_class
from interlock.telemetry import log, metrics

T = TypeVar("T")
# The driver's Record.
Row = Mapping[str, Any]
# The patience of callers that can only wait while the database is unavailable.
NO_TIMEOUT = float("inf")


class RetryTransaction(Exception):
    """Another transaction changed the data between two of our statements: try the transaction again."""


# The server went away, is starting or shutting down, has no room left, chose us as the victim of a deadlock, or made us
# wait too long; or a migration changed its tables after the statement was prepared.
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
    RetryTransaction,
    ConnectionError,
    OSError,
    TimeoutError,
)

# Another session was in the way for a moment. Every other error in TRANSIENT is about the server itself.
_CONTENTION: tuple[type[Exception], ...] = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError, RetryTransaction)

# The server accepts a connection and cannot serve it: "could not write init file" while its disk is full, for example.
# On an established connection the same SQLSTATEs mean a defect, and are not retried.
_CANNOT_SERVE: tuple[type[Exception], ...] = (asyncpg.InternalServerError, asyncpg.PostgresSystemError)

# The connection exists but its server is unusable: it became a replica, or is silent for longer than any statement
# takes. Idle connections lead to the same server.
_USELESS: tuple[type[BaseException], ...] = (asyncpg.ReadOnlySQLTransactionError, TimeoutError)

# A caller that ends with one of these may leave its connection in the middle of a statement or a transaction.
_HALF_WAY: tuple[type[BaseException], ...] = (asyncio.CancelledError, *TRANSIENT)

# An invalid address, unknown credentials, or an unknown database: waiting would not help.
_WRONG_ADDRESS: tuple[type[Exception], ...] = (
    asyncpg.exceptions.ClientConfigurationError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.UndefinedObjectError,
    ssl.SSLCertVerificationError,
)

# This host failed, but perhaps the next one of the address works.
_NOT_HERE: tuple[type[Exception], ...] = (
    OSError,  # it does not answer, or not in time
    asyncpg.CannotConnectNowError,
    asyncpg.exceptions.TargetServerAttributeNotMatched,
)

# A value that no column or index can hold, rejected by the server or by the driver (whose error is an
# InterfaceError).
UNSTORABLE: tuple[type[Exception], ...] = (
    asyncpg.DataError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.exceptions._base.DataError,
)


class Executor(Protocol):
    """Executes named statements: a transaction, or the database, where each statement is a transaction of its own."""

    async def fetch(self, name: str, *args: Any) -> list[Any]: ...

    async def row(self, name: str, *args: Any) -> Any: ...

    async def one(self, name: str, *args: Any) -> Any: ...

    async def value(self, name: str, *args: Any) -> Any: ...

    def on_commit(self, tell: Callable[[], None]) -> None: ...


class Tx:
    """One transaction, or a single statement as its own. Every statement is a named one."""

    __slots__ = ("_on_commit", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._on_commit: list[Callable[[], None]] = []

    async def fetch(self, name: str, *args: Any) -> list[Row]:
        rows: list[Row] = await self.connection.fetch(self.connection.statements[name], *args)
        return rows

    async def row(self, name: str, *args: Any) -> Row | None:
        found: Row | None = await self.connection.fetchrow(self.connection.statements[name], *args)
        return found

    async def one(self, name: str, *args: Any) -> Row:
        return expected(name, await self.row(name, *args))

    async def value(self, name: str, *args: Any) -> Any:
        return await self.connection.fetchval(self.connection.statements[name], *args)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Roll back the statements in this block, and only these, if it fails."""
        before = len(self._on_commit)
        try:
            async with self.connection.transaction():
                yield
        except BaseException:
            del self._on_commit[before:]
            raise

    def on_commit(self, tell: Callable[[], None]) -> None:
        """Call `tell` after the commit, and only then: logs and metrics report only committed facts, once."""
        if self.connection.is_in_transaction():
            self._on_commit.append(tell)
        else:
            tell()

    def committed(self) -> None:
        for tell in self._on_commit:
            tell()


class ConnectionPool:
    """A stack of connections: the one that was used last is used first.

    Our statements leave nothing in a session, so a returned connection needs no reset. A general pool resets it, and
    that took as long as a small statement.
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
        """Wait for a free place, with a time limit, so that a caller learns that the pool is exhausted."""
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
    """A connection for one caller, cleaned up however the caller ends."""

    __slots__ = ("_connection", "_pool")

    def __init__(self, pool: ConnectionPool) -> None:
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
        """Bring the connection back to an idle state.

        Its user may have ended between the parts of a statement. The server then waits for the rest of it, with locks
        held, and sends an error to the next user when the statement times out: a round trip completes it.

        Or the user ended while a transaction began. The driver would then treat the next user's transaction as a part
        of that one, and its commit would be lost with the connection: a reset ends the transaction on both sides.
        """
        try:
            await self._connection.execute("SELECT", timeout=5)
            await self._connection.reset(timeout=5)
        except BaseException as error:
            self._connection.terminate()
            # Re-raise a cancellation: swallowed here, it would leave a canceled task running.
            if not isinstance(error, Exception):
                raise


class Database:
    def __init__(
        self, url: str, settings: Settings, *, clock: DatabaseClock = server_time, size: int | None = None
    ) -> None:
        self.url = url
        self.clock = clock
        self.settings = settings
        # An error message if the database is at an earlier moment than this process has seen: see
        # `engine/proof/restore.py`.
        self.went_back: str | None = None
        self._size = size or settings.pool_size
        self._pool: ConnectionPool | None = None

    def __repr__(self) -> str:
        return f"Database({without_password(self.url)})"

    async def open(self, patience: float | None = None) -> "Database":
        self._pool = await retrying(self._make_pool, patience or self.settings.database_patience_seconds)
        return self

    async def _make_pool(self) -> ConnectionPool:
        _check_address(self.url)
        options = connection_options(self)
        pool = ConnectionPool(options, self._size, self.settings.database_patience_seconds)
        try:
            async with pool.acquire() as connection:
                await _compare_clocks(connection)
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

    def now(self) -> datetime:
        """Return the database's time, for code that needs it between statements."""
        return self.clock() or clock.now()

    async def compare_clocks(self) -> None:
        """Measure again how far this process's clock is from the database's."""
        async with self.connection() as connection:
            await _compare_clocks(connection)

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None

    @property
    def pool(self) -> ConnectionPool:
        if self._pool is None:
            raise Unavailable("the database was not opened")
        return self._pool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """Run one transaction without a retry, for callers that handle a broken connection themselves."""
        async with self.connection() as connection, self.begin(connection) as tx:
            yield tx

    @asynccontextmanager
    async def begin(self, connection: Any) -> AsyncIterator[Tx]:
        """Begin a transaction here. A pooler keeps no session settings, so there each transaction sets them."""
        tx = Tx(connection)
        async with connection.transaction():
            if behind_pooler(self.url):
                await connection.execute(
                    "".join(f"SET LOCAL {name} = {value};" for name, value in _limits(self.settings).items())
                )
            yield tx
        tx.committed()

    def connection(self) -> _Use:
        return self.pool.acquire()

    def on_commit(self, tell: Callable[[], None]) -> None:
        """Call `tell` at once, because each statement outside a transaction commits by itself: see `Tx.on_commit`."""
        tell()

    @asynccontextmanager
    async def without_timeouts(self) -> AsyncIterator[Any]:
        """Yield a separate connection without a driver time-out, for statements that may take hours."""
        connection = await connect(connection_options(self) | {"command_timeout": None})
        try:
            yield connection
        finally:
            await connection.close()

    async def run_in_transaction(self, work: Callable[[Tx], Awaitable[T]], patience: float | None = None) -> T:
        """Run `work` in one transaction, and retry it from its beginning when the connection breaks."""

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

    async def one(self, name: str, *args: Any, patience: float | None = None) -> Row:
        return expected(name, await self.row(name, *args, patience=patience))

    async def value(self, name: str, *args: Any, patience: float | None = None) -> Any:
        return await self._single("fetchval", name, args, patience)

    def patiently(self, seconds: float) -> "Patient":
        """Return an executor that retries for this long while the database is unavailable."""
        return Patient(self, seconds)

    async def _single(self, method: str, name: str, args: tuple[Any, ...], patience: float | None) -> Any:
        async def attempt() -> Any:
            async with self.connection() as connection:
                return await getattr(connection, method)(connection.statements[name], *args)

        return await retrying(attempt, patience or self.settings.database_patience_seconds)


class Patient:
    """Executes statements like the database, with another time limit for retries."""

    __slots__ = ("_database", "_seconds")

    def __init__(self, database: Database, seconds: float) -> None:
        self._database, self._seconds = database, seconds

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        return await self._database.fetch(name, *args, patience=self._seconds)

    async def row(self, name: str, *args: Any) -> Any:
        return await self._database.row(name, *args, patience=self._seconds)

    async def one(self, name: str, *args: Any) -> Any:
        return await self._database.one(name, *args, patience=self._seconds)

    async def value(self, name: str, *args: Any) -> Any:
        return await self._database.value(name, *args, patience=self._seconds)

    def on_commit(self, tell: Callable[[], None]) -> None:
        tell()


def expected(name: str, row: Row | None) -> Row:
    """Return the row of a statement that always returns one."""
    if row is None:
        raise LookupError(f"statement {name} returned no row")
    return row


async def _compare_clocks(connection: Any) -> None:
    """The server answers at some moment during the round trip: a smaller difference than that counts as none."""
    asked, began = clock.process_time(), time.monotonic()
    answered_at: float = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    half = (time.monotonic() - began) / 2
    ahead = asked + half - answered_at
    was_wrong = clock.is_wrong()
    clock.follow(ahead if abs(ahead) > half else 0.0)
    metrics.clock_difference.set(abs(clock.ahead()))
    if clock.is_wrong() and not was_wrong:
        log.error("clock_differs", detail=clock.difference())


# The host of an address that answered last is tried first the next time.
_answered: dict[str, str] = {}


async def connect(options: dict[str, Any]) -> Any:
    """Connect to the first usable host of the address. Each host gets the whole time-out: the driver has one for all
    hosts, and never gets past a host that is silent.
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
    try:
        connection = await asyncpg.connect(**{k: v for k, v in options.items() if k != "schema"} | {"dsn": host})
    except _CANNOT_SERVE as error:
        raise ConnectionError(f"the database cannot serve a connection now: {error}") from error
    connection.statements = statements_in(options["schema"])
    _answered[options["dsn"]] = host
    _notice_silence(connection, options.get("command_timeout"))
    return connection


def _notice_silence(connection: Any, seconds: float | None) -> None:
    """Let the kernel close a connection whose packets stay unacknowledged, where it can (Linux)."""
    transport = connection._transport
    used = transport.get_extra_info("socket") if transport is not None else None
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if seconds is not None and option is not None and used is not None and used.family != socket.AF_UNIX:
        used.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))


def hosts_of(address: str) -> list[str]:
    """Return one address for each of its hosts."""
    if (parts := re.fullmatch(r"(\w+://(?:[^@/?#]*@)?)([^/?#]*)(.*)", address, re.DOTALL)) is None:
        return [address]
    before, hosts, after = parts.groups()
    return [before + host + after for host in hosts.split(",")]


# If our startup settings are not in effect, a transaction pooler is in between. It dropped them, and hands out another
# session for each transaction, with prepared statements of other clients in it.
_KEEPS_OUR_SETTINGS = "SELECT source = 'client' FROM pg_settings WHERE name = 'enable_bitmapscan'"
_POOLER = (
    "INTERLOCK_DATABASE_URL: a pooler answers there, which keeps nothing in a session: add pgbouncer=true to the"
    " address (postgresql://host/interlock?pgbouncer=true), or name the server itself"
)


def _check_address(url: str) -> None:
    """Raise if the address is invalid. The message contains no part of a password that broke it."""
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
        "schema": settings.database_schema,
        "connection_class": session_class(database.clock),
        "timeout": 10,
        "command_timeout": settings.statement_timeout_seconds + 5,
    }
    if behind_pooler(database.url):
        # PgBouncer in transaction mode hands out another session each time, so a session must keep no state.
        return options | {"dsn": _without_pooler_mark(database.url), "statement_cache_size": 0}
    return options | {
        "server_settings": {
            "application_name": "interlock",
            **_limits(settings),
            # The server notices a lost client machine within the same time.
            "tcp_user_timeout": f"{settings.lease_seconds * 500:.0f}",
            "tcp_keepalives_idle": f"{max(settings.lease_seconds / 4, 1):.0f}",
            "tcp_keepalives_interval": f"{max(settings.lease_seconds / 8, 1):.0f}",
            "tcp_keepalives_count": "2",
            "default_transaction_isolation": "read committed",
            "jit": "off",
            # Whole tables fit in memory or are on flash storage here: an index is nearly always faster.
            "random_page_cost": "1.1",
            # Each of our statements has an index. A plan made while a table was small, with a sequential scan, would
            # stay until the table is analyzed: by then it may have a hundred thousand runs.
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
        }
    }


def _limits(settings: Settings) -> dict[str, str]:
    """Return the limits in milliseconds. A process that is frozen or cut off in a transaction loses its locks after
    half a lease, so that the workers that wait for these locks keep their leases."""
    half_a_lease = settings.lease_seconds * 500
    return {
        "statement_timeout": f"{settings.statement_timeout_seconds * 1000:.0f}",
        "lock_timeout": f"{min(settings.lock_timeout_seconds * 1000, half_a_lease):.0f}",
        "idle_in_transaction_session_timeout": f"{half_a_lease:.0f}",
    }


def behind_pooler(url: str) -> bool:
    return "pgbouncer=true" in urlsplit(url).query


def _without_pooler_mark(url: str) -> str:
    # Not with urlunsplit: it turns postgresql:///app into postgresql:/app.
    address, _, query = url.partition("?")
    kept = "&".join(p for p in query.split("&") if p and p != "pgbouncer=true")
    return f"{address}?{kept}" if kept else address


def without_password(url: str) -> str:
    if (password := urlsplit(url).password) is not None:
        url = url.replace(f":{password}@", ":***@", 1)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


async def retrying(attempt: Callable[[], Awaitable[T]], patience: float) -> T:
    deadline = time.monotonic() + patience
    tries = 0
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
                raise  # an error in the call: the same statement would be refused again
            if task.cancelling() > cancellations:
                raise asyncio.CancelledError from error  # a rollback raised this error in place of the cancellation
            delay = backoff(error, tries)
            if time.monotonic() + delay > deadline:
                raise Unavailable(
                    f"the database did not answer for {patience:.0f} s: {error or type(error).__name__}"
                ) from error
            log.warning("database_retry", error=str(error) or type(error).__name__, retry_in=round(delay, 2))
            await asyncio.sleep(delay)
            tries += 1


def backoff(error: BaseException, tries: int) -> float:
    """Return the seconds to wait before another try. At most a second on average, and different for every session:
    hundreds of sessions reconnect after a restart of the server."""
    first = 0.02 if isinstance(error, _CONTENTION) else 0.1
    return min(first * 2.0 ** min(tries, 10), 1.0) * (0.5 + random.random())
