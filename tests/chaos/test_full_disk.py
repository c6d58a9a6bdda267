"""PostgreSQL on a full disk: workers wait, and no accepted run is lost (reliability V7).

Needs root, because the disk is a small tmpfs for this test.
"""

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from interlock.settings import Settings
from interlock.store.migrate import migrate
from interlock.store.pool import Database
from interlock.testing import ManualClock
from tests.chaos.processes import Outages, Yard, postmaster, until
from tests.chaos.test_database_restarts import hurt_under_load
from tests.rig import Rig

pytestmark = pytest.mark.chaos
MEGABYTES = 400
FULL_SECONDS = 8.0
_END_SESSIONS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@pytest.fixture
def disk(base: Path) -> Iterator[Path]:
    disk = base / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m,mode=0755", "interlock-chaos", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
async def outages(disk: Path) -> AsyncIterator[Outages]:
    outages = await asyncio.to_thread(Outages, disk / "own")
    yield outages
    await asyncio.to_thread(outages.close)


def fill(disk: Path) -> Path:
    """Write a file until the disk has no room for another page."""
    file = disk / "filling"
    with file.open("wb", buffering=0) as output:
        for size in (1 << 20, 4096):
            try:
                while True:
                    output.write(b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return file


async def is_full(url: str) -> bool:
    """Return whether PostgreSQL itself reports a full disk for a statement that grows a table."""
    try:
        connection = await asyncpg.connect(url, timeout=5)
    except (asyncpg.PostgresError, OSError, TimeoutError):
        return True
    try:
        await connection.execute("CREATE TEMP TABLE large AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
    except (asyncpg.PostgresError, OSError, asyncpg.InterfaceError):
        return True
    finally:
        connection.terminate()
    return False


async def test_a_full_disk_of_the_database_ends_no_worker_and_loses_nothing(
    disk: Path, outages: Outages, settings: Settings, base: Path
) -> None:
    database = await Database(outages.url, settings, size=4).open()
    await migrate(database)
    rig = await Rig.make(database, settings, ManualClock())

    async def hurt() -> None:
        operator: Any = await asyncpg.connect(outages.url)
        file = await asyncio.to_thread(fill, disk)
        await until(lambda: is_full(outages.url), "the disk is full")
        # Every session has to reconnect, and PostgreSQL rejects it: it cannot write a file that a new session needs.
        for init in (disk / "own").glob("postgres/**/pg_internal.init"):
            init.unlink()
        await operator.execute(_END_SESSIONS)
        await asyncio.sleep(FULL_SECONDS)
        assert await is_full(outages.url)
        file.unlink()
        operator.terminate()
        if postmaster(disk / "own") is None:
            await outages.start()  # PostgreSQL exits if it cannot write its start-up files

    yard = Yard(base, outages.url)
    try:
        await hurt_under_load(rig, yard, hurt, seconds=FULL_SECONDS + 4, clients=4)
        said = "".join(process.said() for process in yard.processes)
        assert "worker_failed" not in said and "sweep_failed" not in said
        assert "could not write init file" in said, "no new connection was refused; the test showed nothing"
    finally:
        yard.close()
        await rig.close()
        await database.close()
