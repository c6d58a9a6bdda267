"""A fake for Slack and for webhook receivers, on a local port, and a dispatcher driven by hand."""

import asyncio
import contextlib
import socket
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson
import pytest
import uvicorn

from interlock.integrations import Dispatcher
from interlock.settings import Settings
from tests.integrations.people import SIGNING_SECRET
from tests.rig import Rig

Answer = tuple[int, dict[str, str], Any]


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        if self.headers.get("content-type", "").startswith("application/json"):
            return orjson.loads(self.body)
        return dict(parse_qsl(self.body.decode()))


@dataclass
class Stub:
    """Answers 200 unless a test scripted something else; records everything."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    answers: dict[str, deque[Answer]] = field(default_factory=lambda: defaultdict(deque))
    default: Callable[[str], Answer] = lambda path: (200, {}, {})
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    hold: asyncio.Event | None = None

    def script(self, path: str, *answers: Answer) -> None:
        self.answers[path].extend(answers)

    def at(self, path: str) -> list[Received]:
        return [request for request in self.received if request.path == path]

    async def until(self, path: str, times: int) -> None:
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(lambda: len(self.at(path)) >= times)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {k.decode().lower(): v.decode() for k, v in scope["headers"]}
        path = scope["path"]
        async with self.arrived:
            self.received.append(Received(path, headers, body))
            self.arrived.notify_all()
        if self.hold is not None:
            await self.hold.wait()
        status, extra, answer = self.answers[path].popleft() if self.answers[path] else self.default(path)
        sent = [(k.encode(), v.encode()) for k, v in ({"content-type": "application/json"} | extra).items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": orjson.dumps(answer)})


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    stub = Stub()
    listening = socket.create_server(("127.0.0.1", 0))
    stub.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(stub, log_config=None, access_log=False, lifespan="off"))
    serving = asyncio.create_task(server._serve(sockets=[listening]))
    yield stub
    serving.cancel()  # a graceful stop would take two tenths of a second
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    for each in (*server.servers, listening):
        each.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()


@pytest.fixture
def slack(stub: Stub) -> Stub:
    """Slack's side of chat.postMessage and chat.update."""
    numbers = iter(range(1, 1000))

    def answer(path: str) -> Answer:
        if path == "/api/chat.postMessage":
            return 200, {}, {"ok": True, "channel": "C0APPROVALS", "ts": f"1700000000.{next(numbers):06}"}
        return 200, {}, {"ok": True}

    stub.default = answer
    return stub


@pytest.fixture
def settings(stub: Stub, tmp_path: Path) -> Settings:
    return Settings(
        lease_seconds=5, poll_seconds=0.2, data_dir=tmp_path / "data", slack_token="xoxb-test",
        slack_signing_secret=SIGNING_SECRET, slack_channel="#approvals", slack_base_url=f"{stub.url}/api/",
        webhook_allow_private=True,
    )  # fmt: skip


@pytest.fixture
async def dispatcher(rig: Rig, settings: Settings) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(rig.database, settings)
    yield dispatcher
    await dispatcher.close()
