"""One key or one address cannot exhaust a server: security H2 (streams), L5 and L6."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from interlock.api.limits import Failures, KeyUsage, LimitedRequest, TooManyFailures, TooManyRequests, limited_request
from interlock.engine.access import console_sessions
from interlock.main import serving
from interlock.settings import Settings
from interlock.store.pool import Database
from interlock.wire import Role
from tests.rig import Rig


async def test_a_key_has_so_many_streams_and_another_key_has_its_own(rig: Rig) -> None:
    rig.settings.max_streams_per_key = 3
    rig.tool("t.ping", writes=False)(_ping)
    await rig.apply("name: ping\nsteps: [{id: a, approval: {summary: go}}]")
    run_id = await rig.start("ping")
    viewer, other = [await rig.key(name, Role.VIEWER) for name in ("viewer", "other")]
    path, accepts = f"/api/runs/{run_id}/events", {"Accept": "text/event-stream"}
    async with AsyncExitStack() as open_streams:
        for _ in range(3):
            frames = await open_streams.enter_async_context(rig.stream(path, key=viewer))
            await anext(frames)
        refused = await rig.http(viewer).get(path, headers=accepts)
        assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_STREAMS")
        assert int(refused.headers["Retry-After"]) > 0
        assert "INTERLOCK_MAX_STREAMS_PER_KEY" in refused.json()["detail"]
        assert (await rig.http(viewer).get(path)).status_code == 200, "other requests are no streams"
        async with rig.stream(path, key=other) as frames:
            await anext(frames)
    async with rig.stream(path, key=viewer) as frames:
        await anext(frames)


async def _ping() -> str:
    return "pong"


async def test_a_key_has_so_many_requests_and_bytes_under_way(rig: Rig) -> None:
    rig.settings.max_requests_per_key, rig.settings.max_bytes_per_key = 2, 1000
    await rig.apply("name: ask\nsteps: [{id: a, wait: {duration: 1h}}]")
    client = rig.http()
    run_id = await rig.start("ask")
    waiting = [asyncio.create_task(client.get(f"/api/runs/{run_id}?wait=20")) for _ in range(2)]
    counted = rig.services.limits._requests
    async with asyncio.timeout(10):
        while sum(counted.values()) < 2:  # noqa: ASYNC110  both tasks are in this loop
            await asyncio.sleep(0)
    refused = await client.get("/api/runs")
    assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_REQUESTS")
    assert (await rig.http("").get("/healthz")).status_code == 200
    rig.follower.close()
    await asyncio.gather(*waiting)
    assert not counted
    large = await client.post("/api/runs", json={"workflow": "ask", "input": {"s": "x" * 2000}})
    assert (large.status_code, large.json()["code"]) == (429, "TOO_MANY_REQUESTS")
    assert not rig.services.limits._bytes


# Every way to write the same key, and what else a request may carry beside it.
_SPELLINGS = (
    [("Authorization", "Bearer il_one")],
    [("authorization", "bEARER   il_one  ")],
    [("Authorization", "Bearer il_one"), ("Authorization", "Bearer il_two")],
    [("Authorization", "Bearer il_one"), ("Cookie", "interlock_session=junk")],
)
_COOKIES = (
    [("Cookie", "interlock_session=one")],
    [("Cookie", "xinterlock_session=other; interlock_session=one")],
    [("Cookie", 'interlock_session="one"')],
    [("Cookie", "a=b"), ("Cookie", "interlock_session=one")],
    [("Cookie", "interlock_session=one"), ("Authorization", "Basic junk")],
    [("Cookie", "interlock_session=one"), ("Authorization", "Bearer junk")],
)


@pytest.mark.parametrize("spellings", [_SPELLINGS, _COOKIES], ids=["key", "sign-in"])
def test_a_key_written_in_another_way_is_the_same_key(spellings: Sequence[list[tuple[str, str]]]) -> None:
    limits = KeyUsage(Settings(max_requests_per_key=len(spellings)))
    for headers in spellings:
        limits.begin(_asked(headers))
    for headers in spellings:
        with pytest.raises(TooManyRequests):
            limits.begin(_asked(headers))
    for headers in spellings:
        limits.end(_asked(headers))
    assert not limits._requests


def _asked(headers: list[tuple[str, str]]) -> LimitedRequest:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    request = limited_request({"type": "http", "path": "/live/inbox", "headers": raw}, 1000)
    assert request is not None
    return request


async def test_a_tool_call_has_so_many_arguments(rig: Rig) -> None:
    args = {f"a{number}": 1 for number in range(201)}
    answer = await rig.http().post("/api/tool-calls", json={"tool": "t.ping", "args": args, "wait": 0})
    assert answer.status_code == 422 and "at most 200" in answer.text, answer.text
    assert (await rig.http().get("/api/runs")).json()["items"] == []


async def test_a_key_has_so_many_sign_ins_and_the_oldest_ends(rig: Rig) -> None:
    key = await rig.key("eva", Role.VIEWER)
    tokens = []
    for _ in range(console_sessions.MOST_PER_KEY + 1):
        tokens.append(await console_sessions.begin(rig.database, key))
        rig.clock.advance(1)
    found = [await console_sessions.behind(rig.database, token) is not None for token in tokens]
    assert found == [False] + [True] * console_sessions.MOST_PER_KEY


async def test_all_keys_of_a_tenant_share_its_limit_of_requests_and_bytes(rig: Rig) -> None:
    rig.settings.max_requests_per_tenant, rig.settings.max_bytes_per_tenant = 3, 1000
    await rig.apply("name: ask\nsteps: [{id: a, wait: {duration: 1h}}]")
    run_id = await rig.start("ask")
    clients = [rig.http(await rig.key(f"viewer{n}", Role.VIEWER)) for n in range(3)]
    waiting = [asyncio.create_task(client.get(f"/api/runs/{run_id}?wait=20")) for client in clients]
    counted = rig.services.limits.tenants._requests
    async with asyncio.timeout(10):
        while sum(counted.values()) < 3:  # noqa: ASYNC110  all tasks are in this loop
            await asyncio.sleep(0)
    refused = await rig.http().get("/api/runs")
    assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_REQUESTS")
    assert "INTERLOCK_MAX_REQUESTS_PER_TENANT" in refused.json()["detail"]
    assert int(refused.headers["Retry-After"]) > 0
    other = await rig.tenant("other")
    theirs = rig.http(await rig.key("viewer", Role.VIEWER, other.tenant_id))
    assert (await theirs.get("/api/runs")).status_code == 200, "another tenant has its own limit"
    rig.follower.close()
    await asyncio.gather(*waiting)
    large = await rig.http().post("/api/runs", json={"workflow": "ask", "input": {"s": "x" * 2000}})
    assert (large.status_code, large.json()["code"]) == (429, "TOO_MANY_REQUESTS")
    assert "INTERLOCK_MAX_BYTES_PER_TENANT" in large.json()["detail"]
    assert not counted and not rig.services.limits.tenants._bytes, "what has ended is not counted"


async def test_all_keys_and_sign_ins_of_a_tenant_share_its_limit_of_streams(rig: Rig) -> None:
    rig.settings.max_streams_per_tenant = 2
    rig.mount_console()
    await rig.apply("name: ping\nsteps: [{id: a, approval: {summary: go}}]")
    run_id = await rig.start("ping")
    keys = [await rig.key(f"viewer{n}", Role.VIEWER) for n in range(3)]
    browser = rig.http("")
    assert (await browser.post("/signin", data={"key": keys[0]})).status_code == 303
    path = f"/api/runs/{run_id}/events"
    async with AsyncExitStack() as open_streams, asyncio.timeout(10):
        for key in keys[:2]:
            await anext(await open_streams.enter_async_context(rig.stream(path, key=key)))
        refused = await rig.http(keys[2]).get(path, headers={"Accept": "text/event-stream"})
        assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_STREAMS")
        assert (await browser.get(f"/live/run/{run_id}")).status_code == 429
    async with rig.stream(path, key=keys[2]) as frames:
        await anext(frames)


def _stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing expires while a test tries keys, however slow the machine is."""
    now = time.monotonic()
    monkeypatch.setattr("interlock.api.limits.monotonic", lambda: now)


async def test_wrong_keys_of_an_address_are_refused_and_known_keys_are_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_still(monkeypatch)
    good, wrong = rig.http(), rig.http("il_wrong")
    assert (await good.get("/api/runs")).status_code == 200
    most = rig.settings.max_failed_sign_ins
    statuses = [(await wrong.get("/api/runs")).status_code for _ in range(most + 3)]
    assert statuses[:most] == [401] * most and statuses[-1] == 429
    refused = await wrong.get("/api/runs")
    assert refused.json()["code"] == "TOO_MANY_FAILED_SIGN_INS" and int(refused.headers["Retry-After"]) > 0
    rig.principals.forget()
    assert (await good.get("/api/runs")).status_code == 200, "looked up again, and not locked out"


async def test_the_console_counts_wrong_keys_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_still(monkeypatch)
    rig.mount_console()
    client = rig.http("")
    most = rig.settings.max_failed_sign_ins
    for _ in range(most):
        assert (await client.post("/signin", data={"key": "il_wrong"})).status_code == 401
    refused = await client.post("/signin", data={"key": "il_wrong"})
    assert refused.status_code == 429 and "Retry-After" in refused.headers


def test_failures_of_one_address_are_not_those_of_another_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("interlock.api.limits.monotonic", lambda: now)
    failures = Failures(10)
    for _ in range(10):
        failures.check("2001:db8:1:2::1")
        failures.add("2001:db8:1:2::1")
    for address in ("2001:db8:1:2::1", "2001:db8:1:2:ffff::2"):
        with pytest.raises(TooManyFailures):
            failures.check(address)
    failures.check("2001:db8:1:3::1")
    failures.check("192.0.2.1")
    now += 7
    failures.check("2001:db8:1:2::1")


# ---------------------------------------------------------------- half-sent requests


@pytest.fixture
async def address(database: Database, settings: Settings) -> AsyncIterator[tuple[str, int]]:
    settings.port, settings.request_read_seconds = 0, 1.0
    async with serving(settings, database) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)


HALF = {
    "nothing": b"",
    "half a line": b"GET /heal",
    "half its headers": b"POST /api/runs HTTP/1.1\r\nhost: a\r\n",
    "half a body": b"POST /api/runs HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{",
    "half a chunk": b"POST /api/runs HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nff\r\n{",
}


async def test_half_sent_requests_are_disconnected(address: tuple[str, int]) -> None:
    opened = []
    for sent in list(HALF.values()) * 20:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        opened.append((reader, writer))
    whole, asking = await asyncio.open_connection(*address)
    asking.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b"200 OK" in await asyncio.wait_for(whole.readline(), 10)
    async with asyncio.timeout(30):
        for reader, writer in opened:
            await reader.read()  # read to the end: the server closed it
            writer.close()
    asking.close()


async def test_a_client_that_sends_slowly_and_never_stops_is_disconnected(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    closed = asyncio.create_task(reader.read())
    async with asyncio.timeout(30):
        while not closed.done():
            writer.write(b"x-more: 1\r\n")
            await asyncio.sleep(0.1)
    assert b"408" in closed.result()
    writer.close()


async def test_a_request_that_waits_for_its_answer_is_not_disconnected(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), 10)
    writer.close()
