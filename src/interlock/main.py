"""The composition root: wires the server, the worker and one-time commands."""

import asyncio
import atexit
import contextlib
import faulthandler
import os
import random
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import structlog

from interlock import tracing
from interlock.compute import pool
from interlock.engine.access import encryption, tenants
from interlock.engine.access.key_store import Salts, SecretsKey, Signing
from interlock.engine.policies import Policies
from interlock.engine.proof import audit, restore, retention
from interlock.engine.proof.evidence import EvidenceSigner
from interlock.engine.queueing import workers
from interlock.engine.queueing.workers import DEFAULT_LABEL
from interlock.engine.workflows import Plans
from interlock.errors import Unavailable
from interlock.ids import WorkerId
from interlock.listening import address_of, listen
from interlock.policy.policy import policy_is_imported
from interlock.settings import Settings, mcp_file, private_directory
from interlock.store import embedded
from interlock.store import migrate as migrations
from interlock.store.notify import POLICY
from interlock.store.pool import Database, without_password
from interlock.telemetry import configure_logging, log
from interlock.timeouts import wait_for_event
from interlock.tools import load_tools, registry
from interlock.tools.mcp import load_mcp
from interlock.worker.heartbeat import end_process
from interlock.worker.pulse import Pulse
from interlock.worker.supervisor import STACKS_SIGNAL, Supervisor
from interlock.worker.sweeper import prove_forever, sweep_forever
from interlock.worker.worker import Worker

# Imports that only a server needs are made where it starts, which halves the start time of a worker.
if TYPE_CHECKING:
    import uvicorn
    from rich.console import Console

T = TypeVar("T")

_LOOK_SECONDS = 2.0
# A worker that starts while the database is unavailable tries again after this time, then after twice as long each
# time.
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 10.0
_ONE_TRY = 0.001


def database_url(settings: Settings) -> str:
    """Return the configured URL, or that of the embedded server, which is started or joined."""
    return settings.database_url or embedded.start(settings.data_dir).url


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    if not structlog.is_configured():
        # The command's output is its answer, and a log line within it would break programs that parse it. If the
        # command fails, its error says why.
        configure_logging("error", "auto")
    try:
        return _run(_until_told(work))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _until_told(work: Coroutine[Any, Any, T]) -> T:
    """Cancel the main task on SIGTERM, so that context managers close what they opened. Servers handle it themselves.

    If a context manager fails while it closes after the signal, the process still exits as canceled.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    except Exception as error:
        if not task.cancelling():
            raise
        log.warning("stopped_untidily", error=str(error) or type(error).__name__)
        raise asyncio.CancelledError from error


@contextlib.asynccontextmanager
async def opened(settings: Settings, url: str, *, size: int | None = None) -> AsyncIterator[Database]:
    database = await Database(url, settings, size=size).open()
    try:
        yield database
    finally:
        await database.close()


async def open_when_there(
    database: Database, stop: asyncio.Event, *, is_wanted: Callable[[], bool] = lambda: True,
    pause: Callable[[asyncio.Event, float], Awaitable[None]] = wait_for_event,
) -> bool:  # fmt: skip
    """Open the database, and wait while it is unavailable. Return False if stopped or no longer wanted."""
    wait = _FIRST_WAIT_SECONDS
    while not stop.is_set() and is_wanted():
        try:
            await database.open(patience=_ONE_TRY)
            return True
        except Unavailable as error:
            why = str(error.__cause__) or type(error.__cause__).__name__
            pause_seconds = wait * (0.5 + random.random() / 2)
            log.warning("waits_for_database", error=why, retry_in=round(pause_seconds, 1))
        await pause(stop, pause_seconds)
        wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
    return False


@contextlib.asynccontextmanager
async def _opened_for_work(database: Database, stop: asyncio.Event, adopted: bool = False) -> AsyncIterator[bool]:
    """Open the database and wait for its schema. Yield False if stopped before that, or if the supervisor has died."""
    parent = os.getppid()
    try:
        is_open = await open_when_there(database, stop, is_wanted=lambda: not adopted or os.getppid() == parent)
        if is_open:
            await migrations.wait_until_migrated(database, stop)
        yield is_open and not stop.is_set()
    finally:
        await database.close()


# ---------------------------------------------------------------- one-time commands

# A person waits for the answer, and a wrong address stays wrong.
_ONCE_SECONDS = 3.0


@contextlib.asynccontextmanager
async def _opened_once(settings: Settings) -> AsyncIterator[Database]:
    """Open the database for one command, which does not wait long for an unavailable server."""
    patience = min(settings.database_patience_seconds, _ONCE_SECONDS)
    hurried = settings.model_copy(update={"database_patience_seconds": patience})
    async with opened(hurried, database_url(settings)) as database:
        yield database


def migrate(settings: Settings) -> list[str]:
    async def work() -> list[str]:
        async with _opened_once(settings) as database:
            return await migrations.migrate(database)

    return run_loop(work())


def database_status(settings: Settings) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        async with _opened_once(settings) as database:
            found = await migrations.status(database)
        return found | {"url": without_password(database_url(settings)), "embedded": settings.database_url is None}

    return run_loop(work())


def database_restored_to(settings: Settings) -> datetime:
    async def work() -> datetime:
        async with _opened_once(settings) as database:
            return await restore.restored_to(database)

    return run_loop(work())


def begin_epoch(settings: Settings) -> restore.Epoch:
    async def work() -> restore.Epoch:
        async with _opened_once(settings) as database:
            return await restore.begin_epoch(database)

    return run_loop(work())


def journal_months(settings: Settings) -> list[dict[str, Any]]:
    async def work() -> list[dict[str, Any]]:
        async with _opened_once(settings) as database:
            return [dict(row) | {"name": retention.month_of(row["name"])} for row in await retention.months(database)]

    return run_loop(work())


def keep_month(settings: Settings, month: str, *, kept: bool) -> None:
    async def work() -> None:
        async with _opened_once(settings) as database:
            await (retention.keep if kept else retention.release)(database, month)

    run_loop(work())


def rotate_secrets_key(settings: Settings) -> int:
    """Create a new key and re-encrypt all secrets under it. Return how many there were."""

    async def work() -> int:
        async with _opened_once(settings) as database:
            SecretsKey(settings).rotate()
            return await encryption.encrypt_anew(database)

    return run_loop(work())


# ---------------------------------------------------------------- worker


@dataclass(frozen=True, slots=True)
class Serving:
    """What workers serve, as it was typed: the capacity, the labels and the tenants."""

    concurrency: int | None = None
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    tenants: tuple[str, ...] = ()


def work(
    settings: Settings,
    serve: Serving,
    adopt: WorkerId | None = None,
    *,
    after_loss: bool = False,
    pulse: int | None = None,
) -> int:
    configure_logging(settings.log_level, settings.log_format)
    tracing.configure()
    load_tools(settings.tools)
    load_mcp(mcp_file(settings), registry)
    run_loop(_work(settings, database_url(settings), serve, adopt, after_loss, pulse))
    tracing.close()
    # A plain function cannot be stopped from outside, and Python would wait for its thread. Its run was requeued.
    if any(thread.name.startswith("step") for thread in threading.enumerate()):
        log.warning("left_behind", threads=sum(t.name.startswith("step") for t in threading.enumerate()))
        atexit._run_exitfuncs()
        os._exit(0)
    return 0


async def _work(
    settings: Settings, url: str, serve: Serving, adopt: WorkerId | None, after_loss: bool, pulse: int | None
) -> None:
    stop = _on_signals()
    if pulse is not None:
        # Written in C: the supervisor asks for the stacks when no thread of this process can run Python.
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
    database = Database(url, settings, size=5)
    async with _opened_for_work(database, stop, adopted=adopt is not None) as is_open:
        if not is_open:
            return
        tenant_ids = await workers.tenants_named(database, serve.tenants) if serve.tenants else None
        worker = Worker(
            database, settings, capacity=serve.concurrency, labels=serve.labels, tenants=tenant_ids, adopt=adopt,
            end_process=partial(end_process, with_group=adopt is not None), after_loss=after_loss,
            look_back=partial(restore.look, database, settings.data_dir), pulse=None if pulse is None else Pulse(pulse),
        )  # fmt: skip
        sweeping = asyncio.create_task(sweep_forever(database, settings, Signing(settings)))
        try:
            await worker.run(stop)
        finally:
            sweeping.cancel()


def _on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def supervise(settings: Settings, desired_workers: int, serve: Serving) -> int:
    configure_logging(settings.log_level, settings.log_format)
    tracing.configure()
    try:
        return run_loop(_supervise(settings, database_url(settings), desired_workers, serve))
    finally:
        tracing.close()


async def _supervise(settings: Settings, url: str, desired_workers: int, serve: Serving) -> int:
    stop = _on_signals()
    database = Database(url, settings, size=3)
    async with _opened_for_work(database, stop) as is_open:
        if not is_open:
            return 0
        sweeping = asyncio.create_task(sweep_forever(database, settings, Signing(settings)))
        try:
            await (await _supervisor(database, settings, url, desired_workers, serve)).run(stop)
        finally:
            sweeping.cancel()
    return 0


async def _supervisor(
    database: Database, settings: Settings, url: str, desired_workers: int, serve: Serving
) -> Supervisor:
    tenant_ids = await workers.tenants_named(database, serve.tenants) if serve.tenants else None
    return Supervisor(
        database, settings, url, desired_workers=desired_workers, concurrency=serve.concurrency, labels=serve.labels,
        tenants=tenant_ids,
    )  # fmt: skip


# ---------------------------------------------------------------- server


def up(settings: Settings, listening: socket.socket, workers: int = 1, concurrency: int | None = None) -> int:
    configure_logging(settings.log_level, settings.log_format)
    tracing.configure()
    load_tools(settings.tools)
    load_mcp(mcp_file(settings), registry)
    url = database_url(settings)
    try:
        return run_loop(_up(settings, url, workers, Serving(concurrency), listening))
    finally:
        tracing.close()


async def _up(settings: Settings, url: str, desired_workers: int, serve: Serving, listening: socket.socket) -> int:
    stop = _on_signals()
    async with opened(settings, url) as database, serving(settings, database, listening) as address:
        private_directory(settings.data_dir)
        noted = settings.data_dir / "url"
        await announce(noted, address)
        print(
            f"Interlock is at {address}, a console in the browser; its API reference at {address}/api/docs", flush=True
        )
        supervising = asyncio.create_task(
            (await _supervisor(database, settings, url, desired_workers, serve)).run(stop)
        )
        keeping = [asyncio.create_task(_keep_database(settings)), asyncio.create_task(_keep_announced(noted, address))]
        await stop.wait()
        for task in keeping:
            task.cancel()
        withdraw(noted, address)
        await supervising
    return 0


async def _keep_announced(file: Path, address: str) -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        await announce(file, address)


async def announce(file: Path, address: str) -> None:
    """Write the server's address for commands on this machine. An earlier address stays as long as it answers."""
    if (noted := _read(file)) != address and not await _answers(noted):
        _write(file, address)


def withdraw(file: Path, address: str) -> None:
    if _read(file) == address:
        file.unlink(missing_ok=True)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _write(file: Path, address: str) -> None:
    file.write_text(address)


async def _answers(address: str) -> bool:
    try:
        parts = urlsplit(address)
        async with asyncio.timeout(2):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, ValueError):
        return False
    writer.close()
    return True


async def _keep_database(settings: Settings) -> None:
    """Restart the embedded server if it died, because no other process does."""
    while settings.database_url is None:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            if await asyncio.to_thread(embedded.revive, settings.data_dir):
                log.warning("database_restarted")
        except Unavailable as error:
            log.warning("database_not_restarted", error=error.detail)


@contextlib.asynccontextmanager
async def serving(settings: Settings, database: Database, listening: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve the API and the console on their port, with the schema up to date and a first key."""
    import uvicorn

    from interlock import console
    from interlock.api import AppContext, create_app
    from interlock.api.reading import ReadingProtocol, disconnect_slow
    from interlock.api.run_watcher import Follower
    from interlock.integrations import deliver_forever, use_settings

    await migrations.migrate(database)
    key = await tenants.bootstrap(database, settings.bootstrap_key)
    if key is not None:
        _announce_key(settings, key)
    principals, policies = tenants.Principals(database), Policies(database, registry)
    follower = Follower(database, principals, {POLICY: policies.forget})
    notary = await _notary(settings, database)
    app = create_app(AppContext(database, settings, Plans(database), principals, policies, follower, notary))
    console.mount(app)
    listening = listening or listen(settings.host, settings.port)
    server = uvicorn.Server(
        uvicorn.Config(
            app, http=ReadingProtocol, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
        )
    )
    await follower.start()
    await use_settings(database, settings)
    await restore.look(database, settings.data_dir)  # before messages are sent
    sweeping = asyncio.create_task(sweep_forever(database, settings, notary.signing))
    proving = asyncio.create_task(prove_forever(database, notary))
    delivering = asyncio.create_task(deliver_forever(database, settings))
    listening_task = asyncio.create_task(_serve(server, listening))
    reading = asyncio.create_task(disconnect_slow(server, settings.request_read_seconds))
    # Start a process now, so that the first policy that a user tries need not wait for it.
    warming = asyncio.create_task(pool.warm(policy_is_imported))
    try:
        yield address_of(listening.getsockname())
    finally:
        follower.close()
        reading.cancel()
        warming.cancel()
        sweeping.cancel()
        proving.cancel()
        delivering.cancel()
        server.should_exit = True
        await listening_task
        with contextlib.suppress(asyncio.CancelledError):
            await delivering
        await follower.stop()


async def _notary(settings: Settings, database: Database) -> EvidenceSigner:
    """Return the evidence signer. Keys are created only here.

    If the chain was sealed with another key, do not create one: the two would not trust each other's chain.
    """
    from interlock.integrations.artifacts import Artifacts

    signing, salts = Signing(settings), Salts(settings)
    if signing.key() is not None or not await audit.is_begun(database):
        signing.make()
        salts.make()
    else:
        log.error(
            "no_signing_key",
            detail="the audit chain is sealed with a key that is not here: copy signing.key and redaction.key to this"
            " machine, or set INTERLOCK_SIGNING_KEY and INTERLOCK_REDACTION_KEY; if the key is lost, begin a new one"
            " with `interlock audit rotate-key`",
        )
    place = settings.artifacts or (settings.data_dir.absolute() / "artifacts").as_uri()
    return EvidenceSigner(signing, salts, Artifacts(place))


async def _serve(server: "uvicorn.Server", listening: socket.socket) -> None:
    # Not `serve()`: it would install its own signal handlers, but the workers wait for the signals too.
    await server._serve(sockets=[listening])


def _announce_key(settings: Settings, key: str) -> None:
    """Print the key once, and store it where the command line on this machine finds it."""
    private_directory(settings.data_dir)
    path = settings.data_dir / "admin.key"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key)
    if settings.bootstrap_key is None:
        print(f"The admin key of tenant default, shown this once: {key}\n(also in {path})", flush=True)


# ---------------------------------------------------------------- demo


def demo(settings: Settings, yes: bool, console: "Console") -> int:
    from interlock.demo import command

    configure_logging("warning", settings.log_format)
    command.announce(console)
    return run_loop(command.play(settings, database_url(settings), yes, console, serving))
