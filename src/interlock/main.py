"""The one place where parts are wired: the server, the worker, and what runs once."""

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import structlog

from interlock import tracing
from interlock.engine import audit, tenants, vault, workers
from interlock.engine.evidence import Notary
from interlock.engine.keyfiles import Salts, SecretsKey, Signing
from interlock.engine.policies import Policies
from interlock.engine.workers import DEFAULT_LABEL
from interlock.engine.workflows import Plans
from interlock.errors import Invalid, Unavailable
from interlock.settings import Settings, mcp_file
from interlock.store import embedded
from interlock.store import migrate as migrations
from interlock.store.notify import POLICY
from interlock.store.pool import Database, without_password
from interlock.telemetry import configure_logging, log
from interlock.tools import load_tools, registry
from interlock.tools.mcp import load_mcp
from interlock.worker.loop import Worker
from interlock.worker.supervisor import Supervisor
from interlock.worker.sweeper import prove_forever, sweep_forever

# What only a server needs is imported where it is started: a worker begins in half the time without.
if TYPE_CHECKING:
    import uvicorn
    from rich.console import Console

T = TypeVar("T")

_LOOK_SECONDS = 2.0


def database_url(settings: Settings) -> str:
    """The one that is configured, or the embedded server, which is started or joined."""
    return settings.database_url or embedded.start(settings.data_dir).url


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    if not structlog.is_configured():
        # What a command prints is its answer; a log line in the midst of it would spoil it for programs.
        configure_logging("warning", "auto")
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
    """SIGTERM ends it as Ctrl-C does: whoever opened something closes it. Who serves has a way of their own.

    And it has been told to end though tidying up after that failed.
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


# ---------------------------------------------------------------- once


def migrate(settings: Settings) -> list[str]:
    async def work() -> list[str]:
        async with opened(settings, database_url(settings)) as database:
            return await migrations.migrate(database)

    return run_loop(work())


def database_status(settings: Settings) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        url = database_url(settings)
        async with opened(settings, url) as database:
            found = await migrations.status(database)
        return found | {"url": without_password(url), "embedded": settings.database_url is None}

    return run_loop(work())


def rotate_secrets_key(settings: Settings) -> int:
    """A new key, and everything under it. Returns how many secrets that were."""

    async def work() -> int:
        async with opened(settings, database_url(settings)) as database:
            SecretsKey(settings).rotate()
            return await vault.encrypt_anew(database)

    return run_loop(work())


# ---------------------------------------------------------------- worker


@dataclass(frozen=True, slots=True)
class Serving:
    """What workers are told to serve, as it was typed: how much at a time, which labels, whose runs."""

    concurrency: int | None = None
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    tenants: tuple[str, ...] = ()


def work(settings: Settings, serve: Serving, adopt: UUID | None = None) -> int:
    configure_logging(settings.log_level, settings.log_format)
    tracing.configure()
    load_tools(settings.tools)
    load_mcp(mcp_file(settings), registry)
    run_loop(_work(settings, database_url(settings), serve, adopt))
    tracing.close()
    # A plain function cannot be stopped from outside, and Python would wait for its thread. Its run was given back.
    if any(thread.name.startswith("step") for thread in threading.enumerate()):
        log.warning("left_behind", threads=sum(t.name.startswith("step") for t in threading.enumerate()))
        atexit._run_exitfuncs()
        os._exit(0)
    return 0


async def _work(settings: Settings, url: str, serve: Serving, adopt: UUID | None) -> None:
    stop = _on_signals()
    async with opened(settings, url, size=5) as database:
        await migrations.wait_until_migrated(database, stop)
        tenant_ids = await workers.tenants_named(database, serve.tenants) if serve.tenants else None
        worker = Worker(
            database, settings, capacity=serve.concurrency, labels=serve.labels, tenants=tenant_ids, adopt=adopt
        )
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


def supervise(settings: Settings, wished: int, serve: Serving) -> int:
    configure_logging(settings.log_level, settings.log_format)
    tracing.configure()
    try:
        return run_loop(_supervise(settings, database_url(settings), wished, serve))
    finally:
        tracing.close()


async def _supervise(settings: Settings, url: str, wished: int, serve: Serving) -> int:
    stop = _on_signals()
    async with opened(settings, url, size=3) as database:
        await migrations.wait_until_migrated(database, stop)
        sweeping = asyncio.create_task(sweep_forever(database, settings, Signing(settings)))
        try:
            await (await _supervisor(database, settings, url, wished, serve)).run(stop)
        finally:
            sweeping.cancel()
    return 0


async def _supervisor(database: Database, settings: Settings, url: str, wished: int, serve: Serving) -> Supervisor:
    tenant_ids = await workers.tenants_named(database, serve.tenants) if serve.tenants else None
    return Supervisor(
        database, settings, url, wished=wished, concurrency=serve.concurrency, labels=serve.labels, tenants=tenant_ids
    )


# ---------------------------------------------------------------- server


def up(settings: Settings, workers: int = 1, concurrency: int | None = None) -> int:
    configure_logging(settings.log_level, settings.log_format)
    tracing.configure()
    load_tools(settings.tools)
    load_mcp(mcp_file(settings), registry)
    url = database_url(settings)
    try:
        return run_loop(_up(settings, url, workers, Serving(concurrency)))
    finally:
        tracing.close()


async def _up(settings: Settings, url: str, wished: int, serve: Serving) -> int:
    stop = _on_signals()
    async with opened(settings, url) as database, serving(settings, database) as address:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        noted = settings.data_dir / "url"
        await announce(noted, address)
        print(
            f"Interlock is at {address}, a console in the browser; its API reference at {address}/api/docs", flush=True
        )
        supervising = asyncio.create_task((await _supervisor(database, settings, url, wished, serve)).run(stop))
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
    """Where commands on this machine find a server. Whoever is there stays there for as long as it answers."""
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
    """The embedded server has nobody else who would start it again."""
    while settings.database_url is None:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            if await asyncio.to_thread(embedded.revive, settings.data_dir):
                log.warning("database_restarted")
        except Unavailable as error:
            log.warning("database_not_restarted", error=error.detail)


@contextlib.asynccontextmanager
async def serving(settings: Settings, database: Database) -> AsyncIterator[str]:
    """The API and the console on their port, with the schema up to date and a first key to get in with."""
    import uvicorn

    from interlock import console
    from interlock.api import Services, create_app
    from interlock.api.follow import Follower
    from interlock.integrations import deliver_forever, use_settings

    await migrations.migrate(database)
    key = await tenants.bootstrap(database, settings.bootstrap_key)
    if key is not None:
        _announce_key(settings, key)
    principals, policies = tenants.Principals(database), Policies(database, registry)
    follower = Follower(database, principals, {POLICY: policies.forget})
    notary = await _notary(settings, database)
    app = create_app(Services(database, settings, Plans(database), principals, policies, follower, notary))
    console.mount(app)
    listening = listen(settings.host, settings.port)
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    )
    await follower.start()
    await use_settings(database, settings)
    sweeping = asyncio.create_task(sweep_forever(database, settings, notary.signing))
    proving = asyncio.create_task(prove_forever(database, notary))
    delivering = asyncio.create_task(deliver_forever(database, settings))
    listening_task = asyncio.create_task(_serve(server, listening))
    try:
        yield address_of(listening.getsockname())
    finally:
        follower.close()
        sweeping.cancel()
        proving.cancel()
        delivering.cancel()
        server.should_exit = True
        await listening_task
        with contextlib.suppress(asyncio.CancelledError):
            await delivering
        await follower.stop()


async def _notary(settings: Settings, database: Database) -> Notary:
    """Keys are made here and nowhere else, and not beside another's: two would not trust each other's chain."""
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
    return Notary(signing, salts, Artifacts(place))


async def _serve(server: "uvicorn.Server", listening: socket.socket) -> None:
    # Not `serve()`: it would take over the signals, which the workers are waiting for as well.
    await server._serve(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # Now, and not when it serves: as long as nobody listens a second server could have the port as well.
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise Invalid(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
    listening.set_inheritable(False)
    return listening


def address_of(bound: tuple[Any, ...]) -> str:
    """Where to call a server that listens there."""
    host, port = bound[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce_key(settings: Settings, key: str) -> None:
    """Printed once, and kept where the command line on this machine finds it."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    path = settings.data_dir / "admin.key"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key)
    if settings.bootstrap_key is None:
        print(f"The admin key of tenant default, shown this once: {key}\n(also in {path})", flush=True)


# ---------------------------------------------------------------- demo


def demo(settings: Settings, yes: bool, console: "Console") -> int:
    from interlock import demonstration

    configure_logging("warning", settings.log_format)
    demonstration.announce(console)
    return run_loop(demonstration.play(settings, database_url(settings), yes, console, serving))
