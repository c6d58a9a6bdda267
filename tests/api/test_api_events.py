"""A run's journal over HTTP: pages of JSON, and a stream of server-sent events."""

import asyncio
from typing import Any
from uuid import UUID

import httpx2
import pytest
from tests.rig import Hold, Rig

from interlock.wire import Event, Page

LIST = "{name: list, steps: [{id: a, tool: t.hold}, {id: b, tool: t.echo}, {id: ask, approval: {}}]}"


@pytest.fixture
def hold(rig: Rig) -> Hold:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> str:
        await hold()
        return "held"

    @rig.tool("t.echo")
    async def echo() -> dict[str, str]:
        return {"text": "two\nlines\n\nand more"}

    return hold


@pytest.fixture
async def http(rig: Rig, hold: Hold) -> httpx2.AsyncClient:
    await rig.apply(LIST)
    return rig.http()


async def finished(rig: Rig, hold: Hold) -> UUID:
    run_id = await rig.start("list")
    hold.release.set()
    async with rig.worker():
        await rig.until(run_id, "waiting_approval")
    await rig.approve(run_id)
    return run_id


async def read_to_end(rig: Rig, run_id: UUID, **options: Any) -> list[dict[str, Any]]:
    async with rig.stream(f"/api/runs/{run_id}/events", **options) as frames:
        return [frame async for frame in frames]


async def test_events_are_the_journal_in_order(rig: Rig, http: httpx2.AsyncClient, hold: Hold) -> None:
    run_id = await finished(rig, hold)
    page = Page[Event].model_validate((await http.get(f"/api/runs/{run_id}/events")).json())
    assert [event.type for event in page.items] == [
        "run_created", "run_transition", "step_transition", "step_transition", "approval_requested", "run_transition",
        "approval_resolved", "run_completed",
    ]  # fmt: skip
    assert [event.seq for event in page.items] == list(range(1, 9))
    assert all(event.run_id == str(run_id) and event.data["actor"] for event in page.items)
    done = page.items[2].data
    assert (done["step_key"], done["from_state"], done["event"], done["to_state"], done["output"]) == (
        "a", "running", "succeed", "succeeded", "held",
    )  # fmt: skip
    assert page.items[-1].data["reason"] == "completed"


@pytest.mark.parametrize("by", ["after", "cursor"])
async def test_events_come_in_pages(rig: Rig, http: httpx2.AsyncClient, hold: Hold, by: str) -> None:
    run_id = await finished(rig, hold)
    seen: list[int] = []
    params: dict[str, Any] = {"limit": 3}
    while True:
        page = (await http.get(f"/api/runs/{run_id}/events", params=params)).json()
        seen += [event["seq"] for event in page["items"]]
        params[by] = seen[-1] if by == "after" else page["next_cursor"]
        assert len(page["items"]) <= 3
        if page["next_cursor"] is None:
            break
    assert seen == list(range(1, 9))
    assert (await http.get(f"/api/runs/{run_id}/events", params={"after": 8})).json() == {
        "items": [], "next_cursor": None,
    }  # fmt: skip


async def test_a_stream_that_is_opened_after_the_end_has_everything_and_ends(rig: Rig, http: Any, hold: Hold) -> None:
    run_id = await finished(rig, hold)
    frames = await read_to_end(rig, run_id)
    assert [int(frame["id"]) for frame in frames[:-1]] == list(range(1, 9))
    assert (frames[-1]["event"], "id" in frames[-1]) == ("end", False)
    events = [Event.model_validate(frame["data"]) for frame in frames[:-1]]
    assert [(frame["event"], int(frame["id"])) for frame in frames[:-1]] == [(e.type, e.seq) for e in events]
    listed = (await http.get(f"/api/runs/{run_id}/events")).json()["items"]
    assert [frame["data"] for frame in frames[:-1]] == listed
    assert events[3].data["output"] == {"text": "two\nlines\n\nand more"}


async def test_the_stream_has_the_headers_that_proxies_need(rig: Rig, http: httpx2.AsyncClient, hold: Hold) -> None:
    run_id = await finished(rig, hold)
    answer = await http.get(f"/api/runs/{run_id}/events", headers={"Accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.startswith("retry: ")


@pytest.mark.parametrize("after", [0, 1, 5, 7, 8, 99])
async def test_a_reader_that_comes_back_misses_nothing_and_gets_nothing_twice(
    rig: Rig, http: httpx2.AsyncClient, hold: Hold, after: int
) -> None:
    run_id = await finished(rig, hold)
    frames = await read_to_end(rig, run_id, last_event_id=after)
    assert [int(frame["id"]) for frame in frames[:-1]] == list(range(after + 1, 9))
    assert frames[-1]["event"] == "end"


async def test_a_last_event_id_that_is_none_of_ours_is_ignored(rig: Rig, http: httpx2.AsyncClient, hold: Hold) -> None:
    run_id = await finished(rig, hold)
    for given in (b"abc", b"-5", b"\xb2", b"1.5", b""):
        headers = {"Accept": b"text/event-stream", "Last-Event-ID": given}
        answer = await http.get(f"/api/runs/{run_id}/events", headers=headers)
        assert (answer.status_code, "\nid: 1\n" in answer.text) == (200, True)
        assert answer.text.endswith("event: end\ndata: {}\n\n"), given
    for given in (b"99999999999999999999", b"9" * 5000):
        headers = {"Accept": b"text/event-stream", "Last-Event-ID": given}
        answer = await http.get(f"/api/runs/{run_id}/events", headers=headers)
        assert answer.text.endswith("event: end\ndata: {}\n\n"), given


async def test_a_stream_follows_a_run_as_it_happens(rig: Rig, http: httpx2.AsyncClient, hold: Hold) -> None:
    run_id = await rig.start("list")
    async with rig.stream(f"/api/runs/{run_id}/events") as frames, asyncio.timeout(20):
        types = []

        async def next_one() -> str:
            frame = await anext(frames)
            types.append(frame["event"])
            assert int(frame["id"]) == len(types)
            line: str = frame["data"]["data"].get("to_state", "")
            return line

        assert await next_one() == "pending"
        async with rig.worker():
            assert await next_one() == "running"
            await hold.inside()
            hold.release.set()
            assert [await next_one() for _ in range(4)] == [
                "succeeded", "succeeded", "waiting_approval", "waiting_approval",
            ]  # fmt: skip
        await http.post(f"/api/runs/{run_id}/approve")
        assert [await next_one() for _ in range(2)] == ["succeeded", "succeeded"]
        assert (await anext(frames))["event"] == "end"
        assert [frame async for frame in frames] == []
    assert types[-2:] == ["approval_resolved", "run_completed"]


async def test_many_readers_follow_one_run_each_in_full(rig: Rig, http: httpx2.AsyncClient, hold: Hold) -> None:
    run_id = await rig.start("list")
    readers = [asyncio.create_task(read_to_end(rig, run_id)) for _ in range(10)]
    hold.release.set()
    async with rig.worker():
        await rig.until(run_id, "waiting_approval")
        await rig.cancel(run_id)
    for frames in await asyncio.wait_for(asyncio.gather(*readers), 20):
        assert [int(frame["id"]) for frame in frames[:-1]] == list(range(1, len(frames)))
        assert (frames[-2]["data"]["data"]["to_state"], frames[-1]["event"]) == ("canceled", "end")
    assert rig.follower._waiting == {}


async def test_a_stream_ends_without_an_end_frame_when_the_server_stops(
    rig: Rig, http: httpx2.AsyncClient, hold: Hold
) -> None:
    """A client that sees no `end` reconnects with its last id."""
    run_id = await rig.start("list")
    async with rig.stream(f"/api/runs/{run_id}/events") as frames:
        assert (await anext(frames))["event"] == "run_created"
        rig.follower.close()
        assert [frame async for frame in frames] == []


async def test_a_stream_ends_when_the_key_that_it_is_read_with_is_revoked(
    rig: Rig, http: httpx2.AsyncClient, hold: Hold
) -> None:
    run_id = await rig.start("list")
    made = (await http.post("/api/keys", json={"name": "reader", "role": "viewer"})).json()
    async with rig.stream(f"/api/runs/{run_id}/events", key=made["key"]) as frames, asyncio.timeout(10):
        assert (await anext(frames))["event"] == "run_created"
        assert (await http.delete(f"/api/keys/{made['id']}")).status_code == 200
        await rig.cancel(run_id)
        assert [frame async for frame in frames] == [], "neither what happened since nor that it ended"
    assert rig.follower._waiting == {}
