"""The event stream of a session: every event once and in order, however often a reader reconnects."""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.agents.conftest import Talk
from tests.rig import Rig

GOLDEN = Path(__file__).parent / "golden"


async def until_idle(rig: Rig, session: str, after: str | None = None) -> list[dict[str, Any]]:
    """Return all frames until the run in progress ends."""
    path = f"/api/sessions/{session}/events?until_idle=true" + (f"&after={after}" if after else "")
    async with rig.stream(path) as frames:
        return [frame async for frame in frames]


def types(frames: list[dict[str, Any]]) -> str:
    """Return one line per event: its type and target state.

    Leaves out what depends on timing: the number of model deltas, and whether a short step appears as running.
    """
    lines: list[str] = []
    for frame in frames:
        data = frame["data"].get("data", {})
        moved = f" {data.get('step_key', 'run')} {data['to_state']}" if data.get("to_state") else ""
        line = f"{frame['event']}{moved}"
        if line.startswith("step_transition") and line.endswith(" running"):
            continue
        if line != "message_delta" or lines[-1] != line:
            lines.append(line)
    return "\n".join(lines) + "\n"


async def hear(talk: Talk, message: str, act: Any) -> tuple[list[dict[str, Any]], str]:
    """Send the message, run `act`, and read the stream to its end."""
    sent = await talk.told(message)
    async with talk.rig.worker():
        listening = asyncio.create_task(until_idle(talk.rig, sent["session_id"]))
        await act(sent)
        return await asyncio.wait_for(listening, 20), sent["session_id"]


async def approves(talk: Talk, sent: Any) -> None:
    await talk.rig.until(UUID(sent["run_id"]), "waiting_approval")
    [question] = await talk.questions(sent["run_id"])
    await talk.post(f"/api/approvals/{question['id']}/approve")


async def rejects(talk: Talk, sent: Any) -> None:
    await talk.rig.until(UUID(sent["run_id"]), "waiting_approval")
    [question] = await talk.questions(sent["run_id"])
    await talk.post(f"/api/approvals/{question['id']}/reject", {"reason": "no"})


async def interrupts_asking(talk: Talk, sent: Any) -> None:
    await talk.rig.until(UUID(sent["run_id"]), "waiting_approval")
    await talk.post(f"/api/runs/{sent['run_id']}/interrupt")


async def interrupts_speaking(talk: Talk, sent: Any) -> None:
    await talk.rig.until_journal(UUID(sent["run_id"]), "message_delta")
    await talk.post(f"/api/runs/{sent['run_id']}/interrupt")


async def interrupts_doing(talk: Talk, sent: Any) -> None:
    await talk.hold.inside()
    await talk.rig.until_journal(UUID(sent["run_id"]), "shop.hold: pending -claim-> running")
    await talk.post(f"/api/runs/{sent['run_id']}/interrupt")


@pytest.mark.parametrize(
    ("name", "message", "act"),
    [
        ("approved", "refund ch_1 40", approves),
        ("rejected", "refund ch_1 40", rejects),
        ("interrupted_while_asking", "refund ch_1 40", interrupts_asking),
        ("interrupted_while_speaking", "slowly", interrupts_speaking),
        ("interrupted_while_doing", "hold", interrupts_doing),
    ],
)
async def test_a_conversation_is_heard_as_it_always_was(talk: Talk, name: str, message: str, act: Any) -> None:
    frames, session = await hear(talk, message, lambda sent: act(talk, sent))
    assert types(frames) == (GOLDEN / f"{name}.txt").read_text()
    events = [frame["data"] for frame in frames if frame["event"] != "end"]
    assert {event["session_id"] for event in events} == {session}
    assert len({event["run_id"] for event in events}) == 1
    assert [frame["id"] for frame in frames[:-1]] == [f"1.{n}" for n in range(1, len(frames))]


async def test_a_stream_goes_on_after_its_last_event_also_on_another_server(rig: Rig, talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40", auto_approve=True)
    await talk.ended(sent["run_id"])
    again = await talk.told("hello", session_id=sent["session_id"])
    await talk.ended(again["run_id"])
    whole = await until_idle(rig, sent["session_id"])
    other = Rig(rig.database, rig.settings, rig.clock)
    other.admin_key = rig.admin_key
    await other.follower.start()
    try:
        for at in range(0, len(whole) - 1, 3):
            rest = await until_idle(other, sent["session_id"], after=whole[at]["id"])
            assert rest == whole[at + 1 :]
    finally:
        await other.close()
    assert {frame["data"]["run_id"] for frame in whole[:-1]} == {sent["run_id"], again["run_id"]}


@pytest.mark.parametrize("readers", [20, pytest.param(500, marks=pytest.mark.chaos)])
async def test_readers_that_come_and_go_all_hear_the_same(rig: Rig, talk: Talk, readers: int) -> None:
    """Each reader disconnects at random and returns with its last event id. It gets every event exactly once."""
    rig.settings.max_streams_per_key = rig.settings.max_streams_per_tenant = readers
    rig.settings.max_requests_per_key = 2 * readers
    session = (await talk.post("/api/sessions", {"agent": "support"}))[1]["id"]

    async def read(seed: int) -> list[str]:
        chance, heard, last = random.Random(seed), [], ""
        while True:
            path = f"/api/sessions/{session}/events" + (f"?after={last}" if last else "")
            patience = chance.randint(1, 12)
            async with rig.stream(path) as frames:
                async for frame in frames:
                    heard.append(f"{frame['id']} {frame['event']}")
                    if frame["event"] == "run_completed" and frame["id"].startswith("2."):
                        return heard
                    last, patience = frame["id"], patience - 1
                    if not patience:
                        break

    first = await talk.told("refund ch_1 40", session_id=session, auto_approve=True)
    async with rig.worker():
        reading = [asyncio.create_task(read(seed)) for seed in range(readers)]
        await rig.until(UUID(first["run_id"]))
        second = await talk.told("both", session_id=session, auto_approve=True)
        await rig.until(UUID(second["run_id"]), seconds=60)
        heard = await asyncio.wait_for(asyncio.gather(*reading), 120)
    whole = [f"{frame['id']} {frame['event']}" for frame in (await until_idle(rig, session))[:-1]]
    assert all(one == whole for one in heard)
    assert whole[0].startswith("1.1 ") and whole[-1].split()[1] == "run_completed"


async def test_a_reader_that_does_not_read_holds_up_nobody(rig: Rig, talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40", auto_approve=True)
    stuck, began = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        began.set()
        await stuck.wait()

    async def receive() -> Any:
        await stuck.wait()
        return {"type": "http.disconnect"}

    headers = [(b"accept", b"text/event-stream"), (b"authorization", f"Bearer {rig.admin_key}".encode())]
    path = f"/api/sessions/{sent['session_id']}/events"
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    reader = asyncio.create_task(rig.app(scope, receive, send))
    await asyncio.wait_for(began.wait(), 10)
    assert (await talk.ended(sent["run_id"]))["status"] == "succeeded"
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
