"""SIGKILL ends a worker process between intent and settle: the next worker repeats nothing that may have happened."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.fixed_time import machine_time as _fixed_time  # noqa: F401
from tests.governed import doomed
from tests.governed.conftest import Shop
from tests.governed.test_crash import KINDS
from tests.rig import Rig

# Each place with one kind of tool. `make chaos` runs all combinations; test_crash.py covers every line for all kinds.
ONE_EACH = {(place, KINDS[n % len(KINDS)]) for n, place in enumerate(doomed.PLACES)}
EACH = [
    pytest.param(place, kind, marks=[] if (place, kind) in ONE_EACH else pytest.mark.chaos)
    for place in doomed.PLACES
    for kind in KINDS
]


@pytest.mark.parametrize(("place", "kind"), EACH)
async def test_a_killed_worker_leaves_an_effect_done_once_or_in_doubt(
    place: str, kind: str, shop: Shop, rig: Rig, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOOMED_LEDGER", str(tmp_path / "ledger"))
    doomed.stock(rig.tools)
    await rig.apply(f"name: f\nsteps:\n  - {{id: a, tool: doomed.{kind}}}")
    run_id = await rig.start("f", {})
    environment = os.environ | {
        "DOOMED_AT": place, "INTERLOCK_DATABASE_URL": url, "INTERLOCK_TOOLS": doomed.__file__,
        "INTERLOCK_DATA_DIR": str(tmp_path / "data"), "INTERLOCK_LOG_LEVEL": "error",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "interlock", "worker", env=environment, cwd=tmp_path
    )
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL

    happened = len(doomed.lines()) == 1
    assert happened == (place in ("after", "settle", "uncommitted"))
    intended = place != "declared"
    assert len(await rig.sql("SELECT * FROM interlock.receipt WHERE status = 'attempted'")) == intended
    await rig.sql("UPDATE interlock.worker SET heartbeat_at = heartbeat_at - interval '1 hour'")
    await rig.sweep()
    if kind == "neither" and intended:
        question = await shop.held(run_id)
        assert question["kind"] == "in_doubt" and len(doomed.lines()) == happened
        said = {"outcome": "happened", "output": "done"} if happened else {"outcome": "did_not_happen"}
        path = f"/api/receipts/{question['receipt_id']}/resolve"
        assert (await (await shop.person("finder")).post(path, said))[0] == 200
    run = await shop.ended(run_id)
    assert (run["status"], run["result"]) == ("succeeded", "done")
    assert len(doomed.lines()) == 1
    (receipt,) = await shop.receipts(run_id)
    assert (receipt["status"], receipt["idempotency_key"]) == ("succeeded", doomed.lines()[0])
