"""SIGKILL ends workers and servers in the middle of a conversation of three turns."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from uuid import UUID

import httpx2
import pytest

from tests.agents import doomed
from tests.agents.conftest import Talk
from tests.fixed_time import machine_time as _fixed_time  # noqa: F401


async def doom(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the agent, and a policy that allows all its calls."""
    monkeypatch.setenv("DOOMED_LEDGER", str(tmp_path / "ledger"))
    doomed.stock(talk.rig.tools)
    policy = '@id("all") permit(principal, action in Action::"doomed", resource);'
    assert (await talk.http.put("/api/policy", content=policy)).is_success
    assert (await talk.http.post("/api/agents", content=doomed.AGENT)).is_success


def surroundings(url: str, tmp_path: Path, point: str, **more: str) -> dict[str, str]:
    return os.environ | {
        "DOOMED_AT": point, "INTERLOCK_DATABASE_URL": url, "INTERLOCK_TOOLS": doomed.__file__,
        "INTERLOCK_DATA_DIR": str(tmp_path / "data"), "INTERLOCK_LOG_LEVEL": "error", **more,
    }  # fmt: skip


async def notice_the_dead(talk: Talk) -> None:
    await talk.rig.sql(
        "UPDATE interlock.worker SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE stopped_at IS NULL"
    )


@pytest.mark.chaos
async def test_a_conversation_is_killed_at_its_steps_and_comes_to_the_same_end(
    talk: Talk, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await doom(talk, tmp_path, monkeypatch)
    sent = await talk.told("go", agent="doomed")
    for point in doomed.POINTS:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "interlock", "worker", env=surroundings(url, tmp_path, point), cwd=tmp_path
        )
        assert await asyncio.wait_for(process.wait(), 90) == -signal.SIGKILL
        await notice_the_dead(talk)
        await talk.rig.sweep()
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["result"]) == ("succeeded", {"text": "It is paid."}), run["error"]
    lines = Counter(doomed.ledger())
    [paid] = [line for line in lines if line.startswith("paid")]
    assert lines[paid] == 1
    # Only the step that was killed between the model's answer and its storage asks the model again. The last such
    # request is in this process, which takes no notes.
    assert {step: lines[f"asked {step}"] for step in doomed.STEPS[::2]} == {"model": 2, "model#2": 2, "model#3": 1}
    receipts = await talk.rig.sql("SELECT status FROM interlock.receipt WHERE run_id = $1", UUID(sent["run_id"]))
    assert [receipt["status"] for receipt in receipts] == ["succeeded"]


@pytest.mark.parametrize("points", [("after doomed.pay",), pytest.param(doomed.POINTS, marks=pytest.mark.chaos)])
async def test_a_reader_misses_and_repeats_nothing_over_servers_that_are_killed(
    talk: Talk, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: tuple[str, ...]
) -> None:
    """`interlock up` dies with its worker at each point; the reader reconnects with the last event id it received."""
    await doom(talk, tmp_path, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sent = await talk.told("go", agent="doomed")
    session, heard = f"/api/sessions/{sent['session_id']}/events", list[str]()
    reading = asyncio.create_task(hear_out(f"http://127.0.0.1:{port}{session}", talk.rig.admin_key, heard))
    for point in (*points, "never"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "interlock", "up", "--workers", "1", cwd=tmp_path, start_new_session=True,
            env=surroundings(url, tmp_path, point, DOOMED_ALL="1", INTERLOCK_PORT=str(port)),
        )  # fmt: skip
        try:
            if point == "never":
                await asyncio.wait_for(reading, 90)
            else:
                assert await asyncio.wait_for(process.wait(), 90) == -signal.SIGKILL
                await notice_the_dead(talk)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    whole = [f"1.{event['seq']} {event['type']}" for event in await talk.events(sent["session_id"])]
    assert heard == whole
    assert sum(line.endswith("orphan_detected") for line in heard) == len(points)
    run = await talk.rig.run(UUID(sent["run_id"]))
    assert (run["status"], run["result"]) == ("succeeded", {"text": "It is paid."}), run["error"]
    assert sum(line.startswith("paid") for line in doomed.ledger()) == 1


async def hear_out(url: str, key: str, heard: list[str]) -> None:
    """Read like a browser's EventSource: reconnect after the last id until the run has ended."""
    last: dict[str, str] = {}
    headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
    async with httpx2.AsyncClient(timeout=30) as http:
        while True:
            try:
                async with http.stream("GET", url, headers=headers | last) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            place = line.removeprefix("id: ")
                        elif line.startswith("event: ") and line != "event: end":
                            name = line.removeprefix("event: ")
                        elif line.startswith("data: ") and line != "data: {}":
                            # Only now is the frame complete; the server sends an interrupted frame again.
                            last = {"Last-Event-ID": place}
                            heard.append(f"{place} {name}")
                            if name == "run_completed":
                                return
            except httpx2.TransportError:
                await asyncio.sleep(0.05)
