"""Worker processes killed with SIGKILL in the middle of a conversation of three turns."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest

from tests.agents import doomed
from tests.agents.conftest import Talk


@pytest.mark.chaos
async def test_a_conversation_is_killed_at_its_steps_and_comes_to_the_same_end(
    talk: Talk, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOOMED_LEDGER", str(tmp_path / "ledger"))
    doomed.stock(talk.rig.tools)
    policy = '@id("all") permit(principal, action in Action::"doomed", resource);'
    assert (await talk.http.put("/api/policy", content=policy)).is_success
    await talk.http.post("/api/agents", content=doomed.AGENT)
    sent = await talk.told("go", agent="doomed")
    for point in doomed.POINTS:
        environment = os.environ | {
            "DOOMED_AT": point, "INTERLOCK_DATABASE_URL": url, "INTERLOCK_TOOLS": doomed.__file__,
            "INTERLOCK_DATA_DIR": str(tmp_path / "data"), "INTERLOCK_LOG_LEVEL": "error",
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "interlock", "worker", env=environment, cwd=tmp_path
        )
        assert await asyncio.wait_for(process.wait(), 90) == -signal.SIGKILL
        await talk.rig.sql("UPDATE worker SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE stopped_at IS NULL")
        await talk.rig.sweep()
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["result"]) == ("succeeded", {"text": "It is paid."}), run["error"]
    lines = Counter(doomed.ledger())
    [paid] = [line for line in lines if line.startswith("paid")]
    assert lines[paid] == 1
    # What was killed after the model had answered, and before that was stored, is the only thing to be asked again;
    # the last of it in this process, which takes no notes.
    assert {step: lines[f"asked {step}"] for step in doomed.STEPS[::2]} == {"model": 2, "model#2": 2, "model#3": 1}
    receipts = await talk.rig.sql("SELECT status FROM receipt WHERE run_id = $1", UUID(sent["run_id"]))
    assert [receipt["status"] for receipt in receipts] == ["succeeded"]
