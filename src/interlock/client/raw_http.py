"""A fast HTTP client for a plain address without a proxy: one write for the request, one piece for the answer.

Through the layers of a general client, a call took a millisecond, most of it before the first byte was sent.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode
from urllib.request import getproxies, proxy_bypass

import httptools
import httpx2

# A proxy is for other hosts; a server on this machine is reached directly.
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def reaches(url: httpx2.URL) -> bool:
    if url.scheme != "http":
        return False
    if url.host in THIS_MACHINE:
        return True
    return not ({"http", "all"} & getproxies().keys()) or bool(proxy_bypass(url.host))


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, with the attributes that the client reads."""

    status_code: int
    content: bytes
    url: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    @property
    def reason_phrase(self) -> str:
        return HTTPStatus(self.status_code).phrase if self.status_code in HTTPStatus._value2member_map_ else ""


class Direct:
    def __init__(self, url: httpx2.URL, headers: Mapping[str, str]) -> None:
        self._url = str(url).rstrip("/")
        self._base = url.raw_path.rstrip(b"/")
        self._host, self._port = url.host, url.port or 80
        said = {"Host": url.netloc.decode(), "Accept": "*/*", **headers}
        self._head = b"".join(_line(name, value) for name, value in said.items())
        self._idle: list[_Wire] = []
        self._is_closed = False

    async def request(
        self, method: str, path: str, query: Mapping[str, Any], headers: Mapping[str, str], content: bytes | None,
        timeout: float, silence: float,
    ) -> Told:  # fmt: skip
        """Send a request. `silence` is how long the server may send nothing."""
        target = self._base + path.encode() + (b"?" + urlencode(query).encode() if query else b"")
        own = b"".join(_line(name, value) for name, value in headers.items())
        length = b"Content-Length: %d\r\n" % len(content) if content is not None else b""
        said = b"%s %s HTTP/1.1\r\n%s%s%s\r\n%s" % (
            method.encode(), target, self._head, own, length, content or b"",
        )  # fmt: skip
        wire = self._idle.pop() if self._idle else await self._connect(timeout)
        try:
            status, body = await wire.ask(said, silence)
        except BaseException:
            wire.close()
            raise
        if wire.stays and not self._is_closed:
            self._idle.append(wire)
        else:
            wire.close()
        return Told(status, body, self._url + path)

    async def _connect(self, timeout: float) -> "_Wire":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, wire = await loop.create_connection(lambda: _Wire(self._idle), self._host, self._port)
        except TimeoutError as error:
            raise httpx2.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx2.ConnectError(str(error)) from error
        return wire

    def close(self) -> None:
        self._is_closed = True
        for wire in list(self._idle):
            wire.close()
        self._idle.clear()


def _line(name: str, value: str) -> bytes:
    if "\r" in value or "\n" in value:
        raise httpx2.LocalProtocolError(f"a line break in header {name}")
    return b"%s: %s\r\n" % (name.encode("ascii"), value.encode("latin-1"))


class _Wire(asyncio.Protocol):
    """One connection that carries one request at a time.

    `idle` is the list in which it waits for the next request; a broken connection removes itself from the list.
    """

    def __init__(self, idle: "list[_Wire]") -> None:
        self._idle = idle
        self._transport: Any = None
        self._parser: Any = None
        self._body: list[bytes] = []
        self._stir = asyncio.Event()
        self._status = 0
        self._has_length = self._ends_by_closing = False
        self._is_whole = False
        self._broke: Exception | None = None
        self._may_stay = False

    @property
    def stays(self) -> bool:
        """Return whether the connection can carry another request."""
        return self._may_stay and self._broke is None

    async def ask(self, said: bytes, silence: float) -> tuple[int, bytes]:
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._is_whole, self._may_stay = [], False, False
        self._has_length = self._ends_by_closing = False
        self._transport.write(said)
        while not self._is_whole:
            if self._broke is not None:
                raise self._broke
            self._stir.clear()
            try:
                async with asyncio.timeout(silence):
                    await self._stir.wait()
            except TimeoutError as error:
                raise httpx2.ReadTimeout("no answer in time") from error
        self._parser = None
        return self._status, b"".join(self._body)

    def close(self) -> None:
        self._transport.close()

    # ------------------------------------------------------------ callbacks of the socket and the parser

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self._break(httpx2.RemoteProtocolError("an answer to no question"))
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(httpx2.RemoteProtocolError(str(error)))
        self._stir.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self._ends_by_closing and error is None and self._broke is None:
            self._is_whole = True
        self._break(httpx2.ReadError(str(error)) if error else httpx2.RemoteProtocolError("the server closed it"))

    def _break(self, error: Exception) -> None:
        self._broke = self._broke or error
        if self in self._idle:
            self._idle.remove(self)
        self._stir.set()
        self._transport.close()

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise httpx2.RemoteProtocolError("a second answer to one question")

    def on_header(self, name: bytes, _: bytes) -> None:
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        # The parser knows by itself that the answers of statuses without a body are complete.
        self._ends_by_closing = self._status >= 200 and not self._has_length

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._status >= 200:  # a 1xx status is not the answer yet
            self._is_whole, self._may_stay = True, self._parser.should_keep_alive()
