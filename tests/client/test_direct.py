"""The short way of the async client: over a real socket, byte by byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import pytest
from tests.client.test_client import RUN

from interlock.client import ApiError, AsyncClient, Unreachable
from interlock.client.direct import Direct, reaches

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
    """Each connection talks as the next one says, the last for all that follow."""
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
            while interlock._direct._idle:  # noqa: ASYNC110 — the end of a connection is nobody's event
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
        assert len(server.asked) == 1  # it may be at work: asking again would only take as long again


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


async def test_a_header_cannot_become_two() -> None:
    async with serving(polite) as server:
        direct = Direct(httpx2.URL(server.url), {})
        with pytest.raises(httpx2.LocalProtocolError):
            await direct.request("GET", "/x", {}, {"Idempotency-Key": "a\r\nX: y"}, None, 1, 1)
        assert server.asked == []


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
