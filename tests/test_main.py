"""Where commands on this machine find their server, and how they end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Invalid
from interlock.main import address_of, announce, listen, run_loop, withdraw

MINE = "http://127.0.0.1:9"


@pytest.fixture
async def other() -> AsyncIterator[str]:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


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
    """Not only from when it serves: of two that are started at once, one is told."""
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
        "async def work():\n    log.warning('database_retry')\n    print('{}')\nrun_loop(work())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "{}\n"
    assert "database_retry" in ran.stderr
