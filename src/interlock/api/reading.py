"""Reading requests from slow clients: one that does not send the rest of its request is disconnected.

Uvicorn waits without limit for the rest of a request, so a few hundred half-sent ones would use up its connections.
"""

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LOOK_SECONDS = 1.0
# A larger body may take longer: each second allows this many bytes.
_BYTES_PER_SECOND = 10_000

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ReadingProtocol(HttpToolsProtocol):
    """Records when the reading of a request began.

    Requests have no timers of their own; `disconnect_slow` checks them all.
    """

    # When the connection was made or the request began; None while the application has a whole request.
    reading_since: float | None = None
    received = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.reading_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self.reading_since, self.received = self.loop.time(), 0
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self.reading_since = None
        super().on_message_complete()

    def disconnect_if_slow(self, seconds: float) -> None:
        if self.reading_since is None or self.flow.read_paused:
            return
        if self.loop.time() - self.reading_since > seconds + self.received / _BYTES_PER_SECOND:
            self.reading_since = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_SLOW)
            self.transport.close()


async def disconnect_slow(server: uvicorn.Server, seconds: float) -> None:
    """Disconnect clients that take longer than this to send a request. Runs until canceled."""
    while True:
        await asyncio.sleep(min(_LOOK_SECONDS, seconds / 2))
        for connection in list(server.server_state.connections):
            if isinstance(connection, ReadingProtocol):
                connection.disconnect_if_slow(seconds)
