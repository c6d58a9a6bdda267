"""One client with hundreds of half-sent requests and a thousand streams, and the delay for another tenant."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx2
import pytest

from interlock.client import AsyncClient
from interlock.wire import Role
from tests.attacks.neighbour import Neighbour
from tests.attacks.test_limits import HALF
from tests.chaos.processes import Yard, until, worker_of
from tests.rig import Rig

pytestmark = pytest.mark.chaos
HALF_SENT, STREAMS = 300, 1000
ONE = "{name: one, steps: [{id: a, tool: chaos.nothing}]}"
LONG = "{name: long, steps: [{id: a, approval: {summary: go}}]}"


@pytest.fixture(autouse=True)
def _many_files() -> None:
    least, most = 4 * STREAMS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < least:
        pytest.skip(f"a process may open only {most} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(least, resource.getrlimit(resource.RLIMIT_NOFILE)[0]), most))


@asynccontextmanager
async def neighbour(address: str, key: str) -> AsyncIterator[Neighbour]:
    async with httpx2.AsyncClient(timeout=30) as http, AsyncClient(address, key) as client:

        async def healthz() -> None:
            assert (await http.get(f"{address}/healthz")).status_code == 200

        async def run() -> None:
            assert (await client.start("one", wait=30)).status == "succeeded"

        yield Neighbour({"healthz": healthz, "a run of one step": run})


class Attacker:
    """Raw connections, and the server's first answer on each."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._place = (parts.hostname, parts.port)
        self._writers: list[asyncio.StreamWriter] = []
        self.answers: list[int] = []

    async def send(self, request: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*self._place)
        self._writers.append(writer)
        writer.write(request)
        return reader

    async def stream(self, path: str, key: str) -> None:
        head = f"GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\naccept: text/event-stream\r\n\r\n"
        reader = await self.send(head.encode())
        self.answers.append(int((await reader.readline()).split()[1]))

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@pytest.mark.parametrize("allowed", [STREAMS, None], ids=["all are let in", "the usual limit"])
async def test_streams_and_half_sent_requests_of_one_client_delay_no_other_tenant(
    rig: Rig, yard: Yard, allowed: int | None
) -> None:
    """`allowed`: how many streams a key may open; without it the server rejects most of them."""
    other = await rig.tenant("other")
    await rig.apply(ONE, other)
    await rig.apply(LONG)
    limits = {"max_streams_per_tenant": STREAMS}
    if allowed is not None:
        limits |= {"max_streams_per_key": allowed, "max_requests_per_key": allowed + 100}
    yard.server(lease_seconds=30, **limits)
    await worker_of(rig, yard.worker(lease_seconds=30))
    address = await yard.address()
    run_id = await rig.start("long")
    async with neighbour(address, await rig.key("other", Role.OPERATOR, other.tenant_id)) as beside:
        await beside.rest()
        attacker, viewer = Attacker(address), await rig.key("viewer", Role.VIEWER)
        try:
            async with beside.watching():
                halves = list(HALF.values())
                for number in range(HALF_SENT):
                    await attacker.send(halves[number % len(halves)])
                for _ in range(STREAMS // 50):
                    await asyncio.gather(*(attacker.stream(f"/api/runs/{run_id}/events", viewer) for _ in range(50)))
                await until(lambda: len(attacker.answers) == STREAMS, "every stream was answered")
                await asyncio.sleep(3)
        finally:
            attacker.close()
    let_in = attacker.answers.count(200)
    print(f"{let_in} of {STREAMS} streams let in; idle {beside.idle}")
    assert let_in == (STREAMS if allowed else 100) and set(attacker.answers) <= {200, 429}
    beside.notices_nothing()
