"""A hundred thousand sleeping flows cost a worker nothing."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.chaos.processes import start_runs, until
from tests.fixed_time import machine_time as _fixed_time  # noqa: F401
from tests.flows import sleepers
from tests.rig import Rig

SLEEPERS = 100_000
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    return Path(path).read_text()


async def _idle(pid: int, seconds: float = 10) -> tuple[float, float]:
    """Return a process's memory in megabytes, and its share of a core while idle."""

    def cpu() -> int:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = cpu()
    await asyncio.sleep(seconds)
    resident = int(_read(f"/proc/{pid}/statm").split()[1])
    return resident * _PAGE / 1e6, (cpu() - before) / _TICK / seconds


@pytest.mark.chaos
async def test_sleeping_flows_cost_the_worker_nothing(rig: Rig, url: str, tmp_path: Path) -> None:
    sleepers.stock(rig.tools)
    environment = os.environ | {
        "SLEEPERS": "1", "INTERLOCK_DATABASE_URL": url, "INTERLOCK_TOOLS": sleepers.__file__,
        "INTERLOCK_DATA_DIR": str(tmp_path / "data"), "INTERLOCK_LOG_LEVEL": "error",
    }  # fmt: skip
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "interlock", "worker", env=environment, cwd=tmp_path
    )

    async def asleep(number: int) -> bool:
        query = "SELECT count(*) AS n FROM interlock.run WHERE status = 'waiting_external' AND lease_worker IS NULL"
        return bool((await rig.sql(query))[0]["n"] == number)

    try:
        await start_runs(rig, "sleeper", 1000)
        await until(lambda: asleep(1000), "the first sleep", 120)
        megabytes, cpu = await _idle(worker.pid)
        await start_runs(rig, "sleeper", SLEEPERS - 1000)
        await until(lambda: asleep(SLEEPERS), "all sleep", 900, pause=0.5)
        more_megabytes, more_cpu = await _idle(worker.pid)
    finally:
        worker.terminate()
        await worker.wait()
    print(f"{megabytes:.0f} MB, {cpu:.1%} of a core; with {SLEEPERS:,}: {more_megabytes:.0f} MB, {more_cpu:.1%}")
    assert more_megabytes < megabytes + 15
    assert more_cpu < cpu + 0.03
