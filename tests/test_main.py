"""How commands on this machine find their server, and how they end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from interlock.errors import Invalid
from interlock.listening import address_of, listen
from interlock.main import announce, open_when_there, run_loop, withdraw
from interlock.settings import Settings
from interlock.store import sql
from interlock.store.pool import Database

MINE = "http://127.0.0.1:9"


@pytest.fixture
async def other() -> AsyncIterator[str]:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(autouse=True)
def _unconfigured_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_loop` would silence the log for good, and later tests of this process look for warnings in it."""
    monkeypatch.setattr("interlock.main.configure_logging", lambda *_: None)


async def test_a_server_that_answers_keeps_its_address_announced(tmp_path: Path, other: str) -> None:
    file = tmp_path / "url"
    await announce(file, other)
    await announce(file, MINE)
    assert file.read_text() == other
    withdraw(file, MINE)
    assert file.read_text() == other


async def test_who_ends_leaves_the_place_to_the_next(tmp_path: Path, other: str) -> None:
    file = tmp_path / "url"
    await announce(file, other)
    withdraw(file, other)
    assert not file.exists()
    withdraw(file, other)
    await announce(file, MINE)
    assert file.read_text() == MINE


@pytest.mark.parametrize("left", ["", "nonsense", "http://127.0.0.1:1", "http://127.0.0.1:99999", "\x00"])
async def test_what_a_dead_server_left_is_written_over(tmp_path: Path, left: str) -> None:
    (tmp_path / "url").write_text(left)
    await announce(tmp_path / "url", MINE)
    assert (tmp_path / "url").read_text() == MINE


def test_ctrl_c_is_ctrl_c_though_tidying_up_after_it_fails() -> None:
    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("the database is away")

    with pytest.raises(KeyboardInterrupt):
        run_loop(work())


def test_work_that_is_told_to_end_closes_what_it_opened() -> None:
    closed = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    with pytest.raises(SystemExit) as ended:
        run_loop(work())
    assert (ended.value.code, closed) == (143, [True])


def test_a_port_is_one_servers_from_the_moment_that_it_has_it() -> None:
    """The port is taken before the server serves: if two start at once, one gets an error."""
    with listen("127.0.0.1", 0) as first, pytest.raises(Invalid, match="Address already in use"):
        listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("bound", "address"),
    [
        (("127.0.0.1", 8420), "http://127.0.0.1:8420"),
        (("0.0.0.0", 8420), "http://127.0.0.1:8420"),
        (("::", 8420, 0, 0), "http://127.0.0.1:8420"),
        (("::1", 8420, 0, 0), "http://[::1]:8420"),
    ],
)
def test_the_address_that_is_told_can_be_called(bound: tuple[Any, ...], address: str) -> None:
    assert address_of(bound) == address


def test_what_a_command_prints_has_no_log_lines_in_it() -> None:
    code = (
        "from interlock.main import run_loop\nfrom interlock.telemetry import log\n"
        "async def work():\n    log.warning('database_retry')\n    log.error('went_wrong')\n    print('{}')\n"
        "run_loop(work())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "{}\n"
    assert "went_wrong" in ran.stderr and "database_retry" not in ran.stderr


def _interlock(tmp_path: Path, *args: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "interlock", *args],
        cwd=tmp_path, env=env | variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_taken_port_is_found_before_anything_is_made(tmp_path: Path) -> None:
    """new-user 25: the error came after the database was created and the admin key printed."""
    with listen("127.0.0.1", 0) as taken:
        ended = _interlock(tmp_path, "up", "--port", str(taken.getsockname()[1]))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Address already in use; choose another with --port" in ended.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """new-user 25: the command printed warnings for twenty seconds."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    ended = _interlock(tmp_path, "db", "status", INTERLOCK_DATABASE_URL=f"postgresql://127.0.0.1:{port}/x")
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    # The message says how long the command tried: not the twenty seconds of a server.
    assert line.startswith("interlock: The database is not reachable: the database did not answer for 3 s: ")
    assert "refused" in line


async def test_a_worker_waits_for_a_database_that_is_away_longer_each_time(
    url: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(f"postgresql://postgres@/none?host={tmp_path}", settings)
    waited: list[float] = []

    async def pause(_stop: asyncio.Event, seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 8:
            database.url = url

    logged = structlog.testing.CapturingLogger()
    monkeypatch.setattr("interlock.main.log", logged)
    assert await open_when_there(database, asyncio.Event(), pause=pause)
    assert await sql.work_is_waiting(database, pools=["default"], tenants=None) is False
    await database.close()
    longest = [0.5, 1, 2, 4, 8, 10, 10, 10]
    assert all(most / 2 <= seconds <= most for seconds, most in zip(waited, longest, strict=True)), waited
    assert {(call.method_name, call.args) for call in logged.calls} == {("warning", ("waits_for_database",))}
    assert len(logged.calls) == 8 and "No such file" in logged.calls[0].kwargs["error"]


@pytest.mark.parametrize("ends", ["told to stop", "left alone"])
async def test_a_worker_that_waits_for_the_database_can_be_ended(settings: Settings, tmp_path: Path, ends: str) -> None:
    database, stop, wanted = Database(f"postgresql://postgres@/none?host={tmp_path}", settings), asyncio.Event(), [True]

    async def pause(stop: asyncio.Event, _seconds: float) -> None:
        if ends == "left alone":
            wanted.clear()
        else:
            stop.set()

    assert not await open_when_there(database, stop, is_wanted=lambda: bool(wanted), pause=pause)


async def test_a_wrong_address_is_not_waited_for(url: str, settings: Settings) -> None:
    async def pause(_stop: asyncio.Event, _seconds: float) -> None:
        raise AssertionError("it waits")

    wrong = Database(url.replace("@/", "@/no_such_"), settings)
    with pytest.raises(Invalid, match="no_such_"):
        await open_when_there(wrong, asyncio.Event(), pause=pause)
