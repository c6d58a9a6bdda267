"""A database restored from an earlier dump, with real processes and an external ledger (V8, V9).

One case restores without `interlock db restored`: then workers do nothing at all, and say why.
"""

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from interlock.client import AsyncClient
from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.pool import Database
from interlock.testing import ManualClock, Scratch
from interlock.wire import Role
from tests.chaos.oracles import Execution
from tests.chaos.processes import Yard, ask, start_runs, steps_of, until, until_all_ended, workflow
from tests.rig import Rig

pytestmark = pytest.mark.chaos
RUNS, STEPS = 6, 5


def program(name: str) -> str:
    return str(embedded.find_binaries() / name)


async def copy(source: str, target: str, file: Path, *, dump: bool) -> None:
    """Dump one database into the file, or restore the file into the other."""
    command = [program("pg_dump"), "-Fc", "-f", str(file), source]
    if not dump:
        command = [program("pg_restore"), "-d", target, "--exit-on-error", str(file)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)


def effects(executions: list[Execution]) -> Counter[tuple[str, str]]:
    return Counter((line.run_id, line.step) for line in executions if line.what == "effect")


async def until_proven(rig: Rig, runs: int) -> None:
    async def proven() -> bool:
        [row] = await ask(rig, "SELECT count(*) AS n FROM interlock.evidence")
        return bool(row["n"] >= runs)

    await until(proven, f"{runs} runs have their evidence", 60)


async def until_sealed(rig: Rig) -> None:
    async def sealed() -> bool:
        return (await ask(rig, "SELECT max(number) AS n FROM interlock.checkpoint"))[0]["n"] is not None

    await until(sealed, "there is a checkpoint")


async def until_remembered(rig: Rig, yard: Yard) -> None:
    """Wait: the processes write the newest checkpoint to a file every few seconds."""
    [row] = await ask(rig, "SELECT max(number) AS n FROM interlock.checkpoint")
    file = yard.data_dir / "database.seen"
    await until(lambda: file.exists() and orjson.loads(file.read_bytes())["number"] >= row["n"], "it is remembered")


async def answer_truly(client: AsyncClient, yard: Yard) -> int:
    """A person looks into the ledger and says for each question whether the effect happened."""
    answered = 0
    for question in (await client.approvals(status="requested")).items:
        assert question.receipt_id is not None and question.step_key is not None
        done = effects(yard.executions())[str(question.run_id), question.step_key] > 0
        await client.resolve_receipt(question.receipt_id, "happened" if done else "did_not_happen")
        answered += 1
    return answered


async def test_a_restored_dump_repeats_no_effect_and_every_run_gets_its_evidence(
    rig: Rig, base: Path, yard: Yard, interlock_scratch: Scratch, settings: Settings
) -> None:
    await rig.apply(workflow("pay", STEPS, "chaos.once", "{ms: 300}"))
    key = await rig.key("person", Role.ADMIN)
    yard.server(workers=1, concurrency=2)
    await yard.address()
    await start_runs(rig, "pay", RUNS)
    await yard.until_begun(RUNS)
    await until_sealed(rig)
    await copy(rig.database.url, "", base / "dump", dump=True)
    at_dump = sum(effects(yard.executions()).values())
    await until_all_ended(rig, RUNS, seconds=60)
    await until_proven(rig, RUNS)
    await until_remembered(rig, yard)
    before = effects(yard.executions())
    assert len(before) == RUNS * STEPS > at_dump and set(before.values()) == {1}
    [server] = yard.processes
    server.ask_to_end()
    await server.ended(60)

    restored = interlock_scratch.url_of("restored_chaos")
    await interlock_scratch.create("restored_chaos")
    yard.url = restored
    try:
        await copy("", restored, base / "dump", dump=False)
        database = await Database(restored, settings, size=4).open()
        new = Rig(database, settings, ManualClock())
        new.admin, new.admin_key = rig.admin, rig.admin_key
        await _forgotten(new, yard, before)
        await _remembered(new, yard, key, base)
        await database.close()
    finally:
        for process in yard.processes:
            process.clear_away()
        await interlock_scratch.drop(restored)


async def _forgotten(rig: Rig, yard: Yard, before: Counter[tuple[str, str]]) -> None:
    """`interlock db restored` did not run: the runs wait in the queue, and no step starts."""
    server = yard.server(workers=1)
    address = await yard.address()
    [row] = await ask(rig, "SELECT count(*) AS n FROM interlock.run WHERE completed_at IS NULL")
    assert row["n"] > 0, "the dump came too late; the test showed nothing"

    async def all_wait() -> bool:
        waiting = "SELECT count(*) AS n FROM interlock.run WHERE completed_at IS NULL AND lease_worker IS NULL"
        alive = (
            "SELECT id FROM interlock.worker WHERE status = 'running' AND heartbeat_at > now() - interval '1 second'"
        )
        return (await ask(rig, waiting))[0]["n"] == row["n"] and bool(await ask(rig, alive))

    await until(all_wait, "the worker is there, and every run waits", 30)
    await asyncio.sleep(3)
    assert await all_wait() and effects(yard.executions()) == before
    assert "database_went_back" in server.said() and "claim no runs" in server.said()
    async with httpx2.AsyncClient() as http:
        health = (await http.get(f"{address}/readyz")).json()
    assert "interlock db restored" in health["warnings"][0]
    server.ask_to_end()
    await server.ended(60)


async def _remembered(rig: Rig, yard: Yard, key: str, base: Path) -> None:
    command = [sys.executable, "-m", "interlock", "db", "restored", "--yes"]
    done = await asyncio.to_thread(
        subprocess.run, command, env=yard._environment({}), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    server = yard.server(workers=1)
    answered = 0
    async with AsyncClient(await yard.address(), key) as client:

        async def all_ended() -> bool:
            nonlocal answered
            answered += await answer_truly(client, yard)
            [row] = await ask(rig, "SELECT count(*) AS n FROM interlock.run WHERE completed_at IS NULL")
            return bool(row["n"] == 0)

        await until(all_ended, "every run has ended", 60, pause=0.1)
        await until_proven(rig, RUNS)
        runs = [run.id for run in (await client.runs()).items]
        assert len(runs) == RUNS
        for run_id in runs:
            assert (await client.evidence(run_id)).startswith(b"{")
    done_now = effects(yard.executions())
    assert answered > 0
    assert len(done_now) == RUNS * len(steps_of(STEPS)) and set(done_now.values()) == {1}, "a write was done twice"
    assert "evidence_not_stored" not in server.said()
    states: list[Any] = await ask(rig, "SELECT status, count(*) FROM interlock.run GROUP BY 1")
    assert [tuple(row) for row in states] == [("succeeded", RUNS)]
