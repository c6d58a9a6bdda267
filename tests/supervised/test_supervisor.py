"""The supervisor with real processes: desired workers run, ended ones are gone, and no process remains."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock.engine.queueing import jobs, leases
from interlock.settings import Settings, worker_log
from interlock.worker import supervisor as module
from interlock.worker.supervisor import Supervisor
from tests.fixed_time import machine_time as _fixed_time  # noqa: F401
from tests.rig import Rig
from tests.supervised.conftest import until

SLEEPY = """
import asyncio, os
from interlock import tool

@tool("t.sleep")
async def sleep(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()
"""
POISON = """
@tool("t.poison")
async def poison() -> int:
    os.kill(os.getpid(), 9)
"""
WORKFLOW = '{name: sleep, steps: [{id: a, tool: t.sleep, input: {seconds: "${input.seconds}"}}]}'


@pytest.fixture
def base() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="interlock-supervised-"))
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def settings(base: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (base / "sleepy.py").write_text(SLEEPY)
    given = {"lease_seconds": 5, "poll_seconds": 0.2, "data_dir": base / "data", "tools": base / "sleepy.py"}
    for name, value in given.items():
        monkeypatch.setenv(f"INTERLOCK_{name.upper()}", str(value))
    return Settings()


@asynccontextmanager
async def supervised(rig: Rig, desired_workers: int, **more: Any) -> AsyncIterator[Supervisor]:
    stop = asyncio.Event()
    supervisor = Supervisor(rig.database, rig.settings, rig.database.url, desired_workers=desired_workers, **more)
    task = asyncio.create_task(supervisor.run(stop))
    try:
        yield supervisor
    finally:
        stop.set()
        await asyncio.wait_for(task, 30)


async def working(rig: Rig, number: int, seconds: float = 40) -> list[Any]:
    """Return this many workers with a process."""

    async def there() -> list[Any]:
        rows = await rig.sql("SELECT * FROM interlock.worker WHERE status = 'running' AND pid IS NOT NULL ORDER BY id")
        return rows if len(rows) == number else []

    found: list[Any] = await until(there, seconds)
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_what_was_ended_is_gone_what_crashed_is_replaced_and_nothing_is_left(rig: Rig) -> None:
    """One scenario, because processes are slow: a supervisor with two workers."""
    await rig.apply(WORKFLOW)
    http = rig.http()
    async with supervised(rig, 2):
        first, second = await working(rig, 2)
        assert (await http.get("/api/supervisor")).json()["items"][0]["workers"] == 2

        # A step takes ten minutes, and its worker is terminated: within three seconds another worker has the run.
        run_id = await rig.start("sleep", {"seconds": 600})

        async def holder() -> Any:
            (run,) = await rig.sql("SELECT lease_worker FROM interlock.run WHERE id = $1", run_id)
            return run["lease_worker"]

        holds = await until(holder)
        began = time.monotonic()
        answer = await http.post(f"/api/supervisor/workers/{holds}/terminate", json={"reason": "stuck"})
        assert answer.json()["status"] == "terminated"

        async def elsewhere() -> bool:
            return await holder() not in (None, holds)

        await until(elsewhere, 3)
        assert time.monotonic() - began < 3
        pid = next(row["pid"] for row in (first, second) if row["id"] == holds)
        await until(lambda: _gone(pid), 5)
        await rig.cancel(run_id)

        # A crash: the worker has failed, and a new one replaces it.
        survivor = next(row for row in (first, second) if row["id"] != holds)
        await working(rig, 2)
        os.kill(survivor["pid"], signal.SIGKILL)

        async def failed() -> bool:
            (row,) = await rig.sql("SELECT status, reason FROM interlock.worker WHERE id = $1", survivor["id"])
            return (row["status"], row["reason"]) == ("failed", "killed by signal 9")

        await until(failed, 5)
        third, fourth = await working(rig, 2)
        assert len({third["id"], fourth["id"]} & {first["id"], second["id"]}) == 0
        assert worker_log(rig.settings, third["id"]).exists()

        last = await working(rig, 2)
    for row in await rig.sql("SELECT pid FROM interlock.worker WHERE pid IS NOT NULL"):
        assert not is_alive(row["pid"])
    assert {await _status(rig, row["id"]) for row in last} == {"completed"}
    (row,) = await rig.sql("SELECT stopped_at FROM interlock.supervisor")
    assert row["stopped_at"] is not None


@pytest.mark.chaos
async def test_a_worker_that_stands_still_is_lost_ended_and_replaced(rig: Rig) -> None:
    async with supervised(rig, 1):
        (first,) = await working(rig, 1)
        os.kill(first["pid"], signal.SIGSTOP)

        async def lost() -> bool:
            await leases.reclaim_lost(rig.database)
            return await _status(rig, first["id"]) in ("terminated", "failed")

        await until(lost, 20)
        await until(lambda: _gone(first["pid"]), 10)
        (second,) = await working(rig, 1)
        assert second["id"] != first["id"]


async def _status(rig: Rig, worker_id: Any) -> str:
    (row,) = await rig.sql("SELECT status FROM interlock.worker WHERE id = $1", worker_id)
    return str(row["status"])


async def _gone(pid: int) -> bool:
    return not is_alive(pid)


async def test_a_worker_that_was_asked_for_gets_a_process_and_obeys(rig: Rig) -> None:
    """The two integration tests of a worker's lifecycle, with a real process; then a job on that worker."""
    http = rig.http()
    await rig.apply(WORKFLOW)
    async with supervised(rig, 0):
        made = await http.post("/api/workers", json={"workspace_id": "ws_test"})
        worker_id = made.json()["id"]

        async def supervisor() -> bool:
            return bool((await http.get("/api/supervisor")).json()["items"])

        await until(supervisor)
        started = await http.post(f"/api/workers/{worker_id}/start")
        assert started.json()["status"] == "running"
        paused = await http.post(f"/api/supervisor/workers/{worker_id}/pause", json={"reason": "Test pause"})
        assert (paused.status_code, paused.json()["status"]) == (200, "paused")

        async def has_process() -> Any:
            return (await http.get(f"/api/workers/{worker_id}")).json()["pid"]

        pid = await until(has_process, 30)
        assert is_alive(pid)
        run_id = await rig.start("sleep", {"seconds": 0})
        body = {"request_id": "req_abc123"}
        first = await http.post(f"/api/supervisor/workers/{worker_id}/resume", json=body)
        second = await http.post(f"/api/supervisor/workers/{worker_id}/resume", json=body)
        assert (first.status_code, first.content) == (200, second.content)
        run = await rig.until(run_id)
        assert (run["status"], run["step"]["a"]["output"]) == ("succeeded", pid)

        submitted = await http.post(
            "/api/jobs", json={"task_description": "t", "workflow": "sleep", "inputs": [{"seconds": 0}] * 3}
        )

        async def completed() -> bool:
            await jobs.tend(rig.database, rig.plans)
            return (await http.get(f"/api/jobs/{submitted.json()['id']}")).json()["status"] == "completed"

        await until(completed)
        await http.post(f"/api/supervisor/workers/{worker_id}/terminate")
        await until(lambda: _gone(pid), 5)
        # The worker was requested and then asked to end: no other worker replaces it.
        assert await rig.sql("SELECT id FROM interlock.worker WHERE stopped_at IS NULL") == []


@pytest.mark.chaos
async def test_a_step_that_kills_its_worker_is_given_up_and_others_are_done(
    rig: Rig, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_DELAY", 0.2)
    monkeypatch.setattr(module, "MOST_CRASHES", 2)
    monkeypatch.setenv("INTERLOCK_MAX_RECLAIMS", "2")
    rig.settings = rig.settings.model_copy(update={"max_reclaims": 2})
    (base / "sleepy.py").write_text(SLEEPY + POISON)
    await rig.apply(WORKFLOW)
    await rig.apply("{name: poison, steps: [{id: a, tool: t.poison}]}")
    async with supervised(rig, 1) as supervisor:
        poison, harmless = await rig.start("poison"), await rig.start("sleep", {"seconds": 0})

        async def over() -> Any:
            return [
                row
                for row in await rig.sql("SELECT id, status, reason FROM interlock.run")
                if row["status"] == "failed"
            ]

        [row] = await until(over, 90)
        assert (row["id"], row["reason"]) == (poison, "orphaned")
        assert (await rig.until(harmless, "succeeded", seconds=60))["status"] == "succeeded"
        assert supervisor.slots[0].gave_up is None


def test_a_file_in_the_working_directory_takes_no_librarys_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit('not that one')")
    monkeypatch.chdir(tmp_path)
    assert subprocess.run([*module.python_as_ours(), "-c", "import yaml"], check=False).returncode == 0
    monkeypatch.syspath_prepend(str(tmp_path))  # as after `python -m interlock`: then the directory is on our path too
    assert subprocess.run([*module.python_as_ours(), "-c", "import yaml"], check=False).returncode == 1


def test_only_crashes_without_work_and_soon_after_the_start_are_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = module.Slot(module.Terms(1))
    for _ in range(30):
        slot.note_crash(1.0, "killed", at_work=True)
    assert slot.gave_up is None and slot.not_before > time.monotonic() + 5
    for _ in range(module.MOST_CRASHES - 1):
        slot.note_crash(1.0, "killed")
    slot.note_crash(60.0, "killed")
    assert slot.gave_up is None
    for _ in range(module.MOST_CRASHES):
        slot.note_crash(1.0, "killed")
    assert slot.gave_up is not None


def test_a_starved_worker_is_replaced_later_and_is_no_crash_loop() -> None:
    """Cold starts took the little processor time from the live workers (reliability 5)."""
    slot = module.Slot(module.Terms(1))
    slot.note_crash(1.0, "killed", at_work=True)
    assert slot.not_before < time.monotonic() + 0.3
    waits = []
    for _ in range(30):
        slot.note_crash(60.0, "too slow", starved=True)
        waits.append(slot.not_before - time.monotonic())
    assert waits[0] > 3 and waits[-1] > 9 and slot.gave_up is None


async def test_a_crash_loop_is_ended_and_says_why(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CRASHES", 3)
    monkeypatch.setattr(module, "_LONGEST_DELAY", 0.01)

    async def spawn(self: Supervisor, worker_id: Any, *outputs: Any, **_: Any) -> asyncio.subprocess.Process:
        output = outputs[0]
        return await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", "echo 'no module named shop' >&2; exit 3", stdout=output, stderr=output
        )

    monkeypatch.setattr(Supervisor, "_spawn", spawn)
    async with supervised(rig, 1) as supervisor:

        async def gave_up() -> Any:
            items = (await rig.http().get("/api/supervisor")).json()["items"]
            return items and items[0]["reason"]

        why = await until(gave_up)
        assert why == (
            "crash loop: 3 processes ended soon after their start, the last exited with code 3: no module named shop"
        )
        assert supervisor.slots[0].process is None
        rows = await rig.sql("SELECT status, reason FROM interlock.worker")
        assert [row["status"] for row in rows] == ["failed"] * 3
        assert {row["reason"] for row in rows} == {"exited with code 3: no module named shop"}
