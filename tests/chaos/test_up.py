"""`interlock up` on the embedded database: it keeps its workers alive and leaves no process behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.client import Client
from tests.chaos.processes import KEY, Yard, postmaster, until, workflow


@pytest.fixture
def embedded_yard(base: Path) -> Iterator[Yard]:
    yard = Yard(base, None)
    yield yard
    yard.close()


def live_workers(client: Client) -> set[int]:
    return {worker.pid for worker in client.workers().items if worker.status == "running"}


def is_alive(pid: int) -> bool:
    """A zombie does not count: it only waits for init to reap it."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no /proc here, or the process ended between the two calls
        return not Path("/proc/self").exists()


@pytest.mark.chaos
async def test_up_replaces_a_worker_that_was_killed_and_leaves_nothing_behind(embedded_yard: Yard) -> None:
    yard = embedded_yard
    server = yard.server(workers=1)
    with Client(await yard.address(), KEY) as client:
        client.apply_workflow(workflow("one", 1))
        (first,) = await until(lambda: live_workers(client), "its worker is there")
        os.kill(first, signal.SIGKILL)
        second = await until(lambda: live_workers(client) - {first}, "another worker is there")
        assert client.start("one", {"ms": 1}, wait=20).status == "succeeded"
    database = postmaster(yard.data_dir)
    assert database is not None

    server.ask_to_end()
    assert await server.ended() == 0, server.said()
    assert not any(is_alive(pid) for pid in second)
    assert not is_alive(database)
    assert yard.left_behind() == []


@pytest.mark.chaos
async def test_a_worker_without_an_address_joins_the_embedded_server_and_keeps_it(embedded_yard: Yard) -> None:
    yard = embedded_yard
    server = yard.server(workers=0)
    with Client(await yard.address(), KEY) as client:
        client.apply_workflow(workflow("one", 1))
        database = postmaster(yard.data_dir)
        assert database is not None
        worker = yard.worker()
        await until(lambda: live_workers(client) == {worker.pid}, "the second process is a worker of the same server")
        assert client.start("one", {"ms": 1}, wait=20).status == "succeeded"
    assert postmaster(yard.data_dir) == database

    server.ask_to_end()
    assert await server.ended() == 0, server.said()
    assert postmaster(yard.data_dir) == database, "it was stopped while a worker still used it"
    worker.ask_to_end()
    assert await worker.ended() == 0, worker.said()
    assert not is_alive(database)


@pytest.mark.chaos
async def test_up_starts_its_database_again_when_that_was_killed(embedded_yard: Yard) -> None:
    yard = embedded_yard
    server = yard.server(workers=1)
    with Client(await yard.address(), KEY) as client:
        client.apply_workflow(workflow("one", 1))
        assert client.start("one", {"ms": 1}, wait=20).status == "succeeded"
        killed = postmaster(yard.data_dir)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: postmaster(yard.data_dir) not in (None, killed), "another postmaster is there")
        assert client.start("one", {"ms": 1}, wait=20).status == "succeeded"
    server.ask_to_end()
    assert await server.ended() == 0, server.said()


@pytest.mark.chaos
async def test_a_second_up_is_found_when_the_first_has_ended(embedded_yard: Yard) -> None:
    yard = embedded_yard
    first = yard.server()
    address = await yard.address()
    second = yard._start("up", "--workers", "0", "--port", "0")
    await until(lambda: "Interlock is at" in second.said(), "the second listens")
    assert await yard.address() == address, "the second took the place of the first"
    first.ask_to_end()
    assert await first.ended() == 0, first.said()
    with Client(await yard.address(), KEY) as client:
        assert client.workers().items == []
    second.ask_to_end()
    assert await second.ended() == 0, second.said()
    assert not (yard.data_dir / "url").exists()
