"""SIGKILL ends worker processes, one after the other, under one flow of two hundred steps."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fixed_time import machine_time as _fixed_time  # noqa: F401
from tests.flows import doomed
from tests.rig import Rig


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((1, 100, 199), id="some"),
        pytest.param(tuple(range(doomed.STEPS)), id="every", marks=pytest.mark.chaos),
    ],
)
async def test_a_flow_is_killed_at_its_steps_and_does_each_of_them(
    steps: tuple[int, ...], rig: Rig, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOOMED_LEDGER", str(tmp_path / "ledger"))
    doomed.stock(rig.tools)
    run_id = await rig.start("doomed")
    for n in steps:
        environment = os.environ | {
            "DOOMED_STEP": str(n), "INTERLOCK_DATABASE_URL": url, "INTERLOCK_TOOLS": doomed.__file__,
            "INTERLOCK_DATA_DIR": str(tmp_path / "data"), "INTERLOCK_LOG_LEVEL": "error",
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "interlock", "worker", env=environment, cwd=tmp_path
        )
        assert await asyncio.wait_for(process.wait(), 90) == -signal.SIGKILL
        await rig.sql(
            "UPDATE interlock.worker SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE stopped_at IS NULL"
        )
        await rig.sweep()
    run = await rig.work_until(run_id)
    assert (run["status"], run["result"]) == ("succeeded", list(range(doomed.STEPS))), run["error"]
    twice = {str(n) for n in steps if doomed.dies_inside(n)}
    assert Counter(doomed.ledger()) == {str(n): 1 + (str(n) in twice) for n in range(doomed.STEPS)}
    assert run["resume_count"] == len(steps)
