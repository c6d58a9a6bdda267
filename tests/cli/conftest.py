"""The stub on a real socket, so that commands reach it like a server."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.cli.stub import Stub


class Switch:
    """One socket for all tests; each test has its own stub behind it."""

    def __init__(self) -> None:
        self.stub = Stub()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.stub.app(scope, receive, send)


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[Switch, str]]:
    switch = Switch()
    server = uvicorn.Server(uvicorn.Config(switch, port=0, log_level="critical", lifespan="off", ws="none"))
    ready = threading.Event()
    startup = server.startup

    async def startup_and_tell(sockets: Any = None) -> None:
        await startup(sockets)
        ready.set()

    server.startup = startup_and_tell  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(10)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield switch, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def url(served: tuple[Switch, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    for name in ("INTERLOCK_DATA_DIR", "INTERLOCK_API_KEY", "INTERLOCK_TOOLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INTERLOCK_URL", served[1])
    return served[1]


@pytest.fixture
def stub(served: tuple[Switch, str], url: str) -> Stub:
    served[0].stub = Stub()
    return served[0].stub
