"""The fast path of the async client: over a real socket, byte by byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest
from tests.client.test_client import RUN

from interlock.client import ApiError, AsyncClient, Unreachable
from interlock.client.raw_http import Direct, Told, _Wire, reaches

Talk = Callable[["Line"], Awaitable[None]]
BODY = httpx2.Response(200, json=RUN).content
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Line:
    """The server's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def asked(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
        return head + await self.reader.readexactly(length)

    def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)


class Server:
    def __init__(self) -> None:
        self.url = ""
        self.asked: list[bytes] = []
        self.lines = 0


@contextlib.asynccontextmanager
async def serving(*talks: Talk) -> AsyncIterator[Server]:
    """Each connection follows the next script; the last script serves all further connections."""
    server, left = Server(), list(talks)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.lines += 1
        talk = left.pop(0) if len(left) > 1 else left[0]
        line = Line(reader, writer)
        really = line.asked

        async def asked() -> bytes:
            server.asked.append(await really())
            return server.asked[-1]

        line.asked = asked
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await talk(line)
        finally:
            writer.close()

    talking: set[asyncio.Task[None]] = set()

    def on_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talking.add(asyncio.create_task(serve(reader, writer)))

    listening = await asyncio.start_server(on_line, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)


async def polite(line: Line) -> None:
    while True:
        await line.asked()
        line.say(OK)


def client(url: str) -> AsyncClient:
    made = AsyncClient(url, "il_secret", 5)

    async def no_pause(_: float) -> None:
        pass

    made._sleep = no_pause
    return made


async def test_calls_share_a_connection_and_say_who_they_are() -> None:
    async with serving(polite) as server, client(server.url + "/base/") as interlock:
        for _ in range(3):
            assert (await interlock.start("refund", {"amount": 5}, wait=2)).workflow == "refund"
        assert (server.lines, len(server.asked)) == (1, 3)
    head, _, body = server.asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/api/runs?wait=2 HTTP/1.1\r\n")
    for said in (b"Authorization: Bearer il_secret", b"Content-Type: application/json", b"Idempotency-Key: "):
        assert said in head
    assert body == b'{"workflow":"refund","input":{"amount":5}}'
    assert b"Content-Length" not in (await _asked_by_get())


async def _asked_by_get() -> bytes:
    async with serving(polite) as server, client(server.url) as interlock:
        await interlock.run("0198-run")
    return server.asked[0]


async def test_calls_at_the_same_time_have_a_connection_each() -> None:
    async with serving(polite) as server, client(server.url) as interlock:
        await asyncio.gather(*(interlock.run("0198-run") for _ in range(5)))
        assert server.lines == 5
        await asyncio.gather(*(interlock.run("0198-run") for _ in range(5)))
        assert server.lines == 5


async def test_an_answer_may_come_in_pieces_and_after_a_hint() -> None:
    async def in_pieces(line: Line) -> None:
        await line.asked()
        line.say(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        line.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(BODY), 7):
            part = BODY[at : at + 7]
            line.say(b"%x\r\n%s\r\n" % (len(part), part))
            await line.writer.drain()
        line.say(b"0\r\n\r\n")

    async with serving(in_pieces) as server, client(server.url) as interlock:
        assert (await interlock.run("0198-run")).id == "0198-run"


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_used_again() -> None:
    async def once(line: Line) -> None:
        await line.asked()
        line.say(OK)

    async with serving(once) as server, client(server.url) as interlock:
        await interlock.run("0198-run")
        assert interlock._direct is not None
        async with asyncio.timeout(10):
            while interlock._direct._idle:  # noqa: ASYNC110 — the end of a connection has no event
                await asyncio.sleep(0.001)
        await interlock.run("0198-run")
        assert (server.lines, len(server.asked)) == (2, 2)


async def test_a_server_that_wants_to_close_is_asked_on_a_new_connection() -> None:
    async def closing(line: Line) -> None:
        await line.asked()
        line.say(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        await line.reader.read()

    async with serving(closing) as server, client(server.url) as interlock:
        await interlock.run("0198-run")
        await interlock.run("0198-run")
        assert server.lines == 2


@pytest.mark.parametrize("said", [b"", OK[:60], b"nonsense\r\n\r\n"], ids=["nothing", "half", "nonsense"])
async def test_a_connection_that_breaks_is_asked_again_with_the_same_key(said: bytes) -> None:
    async def breaking(line: Line) -> None:
        await line.asked()
        line.say(said)

    async with serving(breaking, polite) as server, client(server.url) as interlock:
        assert (await interlock.start("refund")).id == "0198-run"
    keys = [line for asked in server.asked for line in asked.split(b"\r\n") if line.startswith(b"Idempotency-Key")]
    assert len(keys) == 2 and keys[0] == keys[1]


async def test_a_server_that_says_nothing_has_as_long_as_it_was_given() -> None:
    async def silent(line: Line) -> None:
        await line.asked()
        await line.reader.read()

    async with serving(silent) as server, client(server.url) as interlock:
        interlock.timeout = 0.05
        with pytest.raises(Unreachable, match="did not answer in time"):
            await interlock.run("0198-run")
        assert len(server.asked) == 1  # the request may be in progress: a repeated one would take just as long


async def test_nobody_there_is_said_in_words() -> None:
    async with serving(polite) as server:
        pass
    async with client(server.url) as interlock:
        with pytest.raises(Unreachable, match="start one with `interlock up`"):
            await interlock.run("0198-run")


async def test_a_problem_is_a_problem_and_a_strange_page_is_named() -> None:
    problem = b'{"type":"urn:x","title":"Not found","status":404,"detail":"no run x","code":"RUN_NOT_FOUND"}'

    async def refusing(line: Line) -> None:
        for status, body in ((b"404 Not Found", problem), (b"502 Bad Gateway", b"<html>"), (b"200 OK", b"<html>")):
            await line.asked()
            line.say(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        await line.reader.read()

    async with serving(refusing) as server, client(server.url) as interlock:
        with pytest.raises(ApiError) as found:
            await interlock.run("x")
        assert (found.value.code, found.value.detail) == ("RUN_NOT_FOUND", "no run x")
        with pytest.raises(ApiError, match=f"{server.url}/api/runs/x answered 502 Bad Gateway"):
            await interlock.run("x")
        with pytest.raises(ApiError, match="is not Interlock's") as odd:
            await interlock.run("x")
        assert odd.value.code == "UNREADABLE_ANSWER"


async def test_who_is_cancelled_leaves_no_connection_with_half_an_answer() -> None:
    async def slow_then_polite(line: Line) -> None:
        await line.asked()
        await line.reader.read()

    async with serving(slow_then_polite, polite) as server, client(server.url) as interlock:
        waiting = asyncio.create_task(interlock.run("0198-run"))
        async with asyncio.timeout(10):
            while not server.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await interlock.run("0198-run")).id == "0198-run"
        assert server.lines == 2


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
async def test_a_header_cannot_become_two(end: str) -> None:
    async with serving(polite) as server:
        direct = Direct(httpx2.URL(server.url), {})
        with pytest.raises(httpx2.LocalProtocolError):
            await direct.request("GET", "/x", {}, {"Idempotency-Key": f"a{end}X: y"}, None, 1, 1)
        assert server.asked == []


# ---------------------------------------------------------------- the state of a connection after a call


@pytest.mark.parametrize("how", ["cancelled", "too late", "nonsense"])
async def test_a_connection_that_is_of_no_more_use_is_closed(how: str) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def until_closed(line: Line) -> None:
        await line.asked()
        asked.set()
        if how == "nonsense":
            line.say(b"nonsense\r\n\r\n")
        await line.reader.read()
        closed.set()

    async with serving(until_closed) as server:
        direct = Direct(httpx2.URL(server.url), {})
        asking = asyncio.create_task(direct.request("GET", "/x", {}, {}, None, 5, 0.05 if how == "too late" else 30))
        await asyncio.wait_for(asked.wait(), 10)
        if how == "cancelled":
            asking.cancel()
        with pytest.raises((httpx2.TransportError, asyncio.CancelledError)):
            await asking
        await asyncio.wait_for(closed.wait(), 10)


async def test_a_client_that_is_closed_leaves_no_connection() -> None:
    closed = asyncio.Event()

    async def until_closed(line: Line) -> None:
        await line.asked()
        line.say(OK)
        await line.reader.read()
        closed.set()

    async with serving(until_closed) as server:
        async with client(server.url) as interlock:
            await interlock.run("0198-run")
        await asyncio.wait_for(closed.wait(), 10)


async def test_a_server_that_lets_nobody_in_is_given_up_after_some_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def for_ever(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", for_ever)
    async with client("http://127.0.0.1:1") as interlock:
        interlock.timeout = 0.01
        with pytest.raises(Unreachable, match="start one with `interlock up`"):
            await asyncio.wait_for(interlock.run("0198-run"), 10)
    assert tries == 4


async def test_who_waits_for_a_run_gives_the_server_that_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, float]] = []

    async def request(*args: Any) -> Told:
        given.append(args[-2:])
        return Told(200, BODY, "")

    async with client("http://127.0.0.1:1") as interlock:
        monkeypatch.setattr(interlock._direct, "request", request)
        await interlock.run("0198-run", wait=60)
        await interlock.run("0198-run")
    assert given == [(5, 65), (5, 5)]


# ---------------------------------------------------------------- the protocol in detail


class Transport:
    """A transport without a peer."""

    def __init__(self) -> None:
        self.said, self.is_closed = b"", False

    def write(self, data: bytes) -> None:
        self.said += data

    def close(self) -> None:
        self.is_closed = True


class ByHand:
    """One request, with a hand-written answer."""

    def __init__(self, silence: float = 30) -> None:
        self.direct = Direct(httpx2.URL("http://interlock.test"), {})
        self.transport = Transport()
        self.wire = _Wire(self.direct._idle)
        self.wire.connection_made(self.transport)
        self.direct._idle.append(self.wire)
        self.asking = self.ask(silence)

    def ask(self, silence: float = 30) -> "asyncio.Task[Told]":
        return asyncio.create_task(self.direct.request("GET", "/x", {}, {}, None, 5, silence))

    async def hear(self, *parts: bytes) -> None:
        """Deliver all of them before the client can read any."""
        await asyncio.sleep(0)
        for part in parts:
            self.wire.data_received(part)
        for _ in range(5):
            await asyncio.sleep(0)

    async def answer(self) -> tuple[int, bytes]:
        told = await asyncio.wait_for(self.asking, 10)
        return told.status_code, told.content


@pytest.fixture
async def talk() -> AsyncIterator[ByHand]:
    made = ByHand()
    yield made
    made.asking.cancel()
    await asyncio.gather(made.asking, return_exceptions=True)


async def test_a_hint_is_no_answer_and_neither_is_a_part_of_one(talk: ByHand) -> None:
    for hint in (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"):
        await talk.hear(hint)
        assert not talk.asking.done()
    for byte in OK[:-1]:
        await talk.hear(bytes([byte]))
    assert not talk.asking.done()
    await talk.hear(OK[-1:])
    assert await talk.answer() == (200, BODY)
    assert talk.direct._idle == [talk.wire]


async def test_the_server_may_be_silent_for_so_long_after_each_word(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, passed = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed)
    talk = ByHand(silence=1000)
    for at in range(0, len(OK), 40):
        await talk.hear(OK[at : at + 40])
        passed += 900
    assert await talk.answer() == (200, BODY)
    talk.asking = talk.ask(silence=1000)
    await talk.hear(OK[:40])
    passed += 1001
    with pytest.raises(httpx2.ReadTimeout):
        await talk.answer()


@pytest.mark.parametrize("more", [OK, b"nonsense", b"HTTP/1.1 500 Oh\r\nContent-Length: 1\r\n\r\nx"])
@pytest.mark.parametrize("when", ["in one piece", "at once", "later"])
async def test_who_answers_more_than_was_asked_is_asked_nothing_more(talk: ByHand, more: bytes, when: str) -> None:
    await talk.hear(*{"in one piece": [OK + more], "at once": [OK, more], "later": [OK]}[when])
    if when == "later":
        await talk.hear(more)
    assert await talk.answer() == (200, BODY)
    assert talk.direct._idle == [] and talk.transport.is_closed


async def test_a_connection_that_breaks_behind_its_answer_is_not_used_again(talk: ByHand) -> None:
    await asyncio.sleep(0)
    talk.wire.data_received(OK)
    talk.wire.connection_lost(None)
    assert await talk.answer() == (200, BODY)
    assert talk.direct._idle == []


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nServer: old\r\n\r\n"])
async def test_an_answer_without_a_length_ends_with_its_connection(talk: ByHand, head: bytes) -> None:
    await talk.hear(head + BODY[:9], BODY[9:])
    assert not talk.asking.done()
    talk.wire.connection_lost(None)
    assert await talk.answer() == (200, BODY)
    assert talk.direct._idle == []


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Le", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", None),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", ConnectionResetError("reset")),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", None),
    ],
    ids=["head", "length", "chunks", "reset", "hint"],
)
async def test_half_an_answer_is_none(talk: ByHand, said: bytes, error: Exception | None) -> None:
    await talk.hear(said)
    talk.wire.connection_lost(error)
    with pytest.raises(httpx2.TransportError):
        await talk.answer()


async def test_a_server_that_wants_to_talk_otherwise_is_not_understood(talk: ByHand) -> None:
    await talk.hear(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n")
    with pytest.raises(httpx2.RemoteProtocolError):
        await talk.answer()
    assert talk.transport.is_closed


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_that_has_no_body_is_whole_without_one(talk: ByHand, status: bytes) -> None:
    await talk.hear(b"HTTP/1.1 %s\r\n\r\n" % status)
    assert await talk.answer() == (int(status[:3]), b"")
    assert talk.direct._idle == [talk.wire]


async def test_a_client_closed_meanwhile_keeps_no_connection(talk: ByHand) -> None:
    await asyncio.sleep(0)
    talk.direct.close()
    await talk.hear(OK)
    assert await talk.answer() == (200, BODY)
    assert talk.direct._idle == [] and talk.transport.is_closed


def test_only_a_plain_address_without_a_proxy_is_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert reaches(httpx2.URL("http://interlock.internal:8420"))
    assert not reaches(httpx2.URL("https://interlock.internal"))
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert not reaches(httpx2.URL("http://interlock.internal:8420"))
    assert all(reaches(httpx2.URL(f"http://{host}:8420")) for host in ("127.0.0.1", "localhost", "[::1]"))
    monkeypatch.setenv("no_proxy", "interlock.internal")
    assert reaches(httpx2.URL("http://interlock.internal:8420"))
