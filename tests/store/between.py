"""Intermediaries between us and the server: a pooler without session state, a silent host."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PASSED_ON = {"user", "database", "client_encoding", "application_name"}


class Between:
    """Listens on a free port for as long as the block lasts."""

    def __init__(self, url: str, answer: "Callable[[Between, Any, Any], Awaitable[None]]") -> None:
        parts = urlsplit(url)
        self.socket = f"{parse_qs(parts.query)['host'][0]}/.s.PGSQL.5432"
        self._user, self._database = parts.username, parts.path
        self._answer = answer
        self._ends = AsyncExitStack()
        self.asked = 0

    async def __aenter__(self) -> "Between":
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ends.callback(server.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()

    @property
    def url(self) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self.port}{self._database}?sslmode=disable"

    async def _meet(self, reader: Any, writer: Any) -> None:
        self.asked += 1
        self._ends.callback(writer.close)
        await self._answer(self, reader, writer)

    async def relay(self, reader: Any, writer: Any, begin: bytes) -> None:
        theirs, to_them = await asyncio.open_unix_connection(self.socket)
        self._ends.callback(to_them.close)
        to_them.write(begin)
        await asyncio.gather(_pump(reader, to_them), _pump(theirs, writer))


async def _pump(reader: Any, writer: Any) -> None:
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    writer.close()


async def _first_words(reader: Any) -> dict[str, str]:
    size, _ = struct.unpack("!II", await reader.readexactly(8))
    words = (await reader.readexactly(size - 8)).decode().split("\0")
    return dict(zip(words[::2], words[1::2], strict=False))


async def refuses_settings(_: Between, reader: Any, writer: Any) -> None:
    """Behave like PgBouncer."""
    await _first_words(reader)
    said = b"SFATAL\0C08P01\0Munsupported startup parameter: statement_timeout\0\0"
    writer.write(b"E" + struct.pack("!I", len(said) + 4) + said)
    writer.close()


async def drops_settings(between: Between, reader: Any, writer: Any) -> None:
    """Behave like PgBouncer with the settings in ignore_startup_parameters."""
    kept = {name: value for name, value in (await _first_words(reader)).items() if name in _PASSED_ON}
    words = "".join(f"{name}\0{value}\0" for name, value in kept.items()).encode() + b"\0"
    await between.relay(reader, writer, struct.pack("!II", len(words) + 8, 196608) + words)


async def passes_on(between: Between, reader: Any, writer: Any) -> None:
    await between.relay(reader, writer, b"")


async def is_silent(_: Between, reader: Any, writer: Any) -> None:
    """Behave like a host that drops all packets."""
    await asyncio.Event().wait()
