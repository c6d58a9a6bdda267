"""The oracle of the attacks fails when an endpoint blocks the event loop, but not because the machine is busy."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.attacks.neighbour import MOST_HELD_SECONDS, LoopWatch, Neighbour
from tests.rig import Rig


async def _watched(rig: Rig, attack: Callable[[], Awaitable[object]]) -> Neighbour:
    client = rig.http()

    async def healthz() -> None:
        assert (await client.get("/healthz")).status_code == 200

    neighbour = Neighbour({"healthz": healthz})
    await neighbour.rest()
    async with neighbour.watching():
        for _ in range(20):
            await healthz()
        await attack()
        for _ in range(20):
            await healthz()
    return neighbour


def _sleep() -> None:
    time.sleep(0.7)


def _compute() -> None:
    ends = time.thread_time() + 0.7
    while time.thread_time() < ends:
        pass


@pytest.mark.parametrize("freeze", [_sleep, _compute], ids=["sleeps", "computes"])
async def test_a_handler_that_holds_the_event_loop_once_is_found(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, freeze: Callable[[], None]
) -> None:
    known = rig.principals.known
    monkeypatch.setattr(rig.principals, "known", lambda key: (freeze(), known(key))[1])
    neighbour = await _watched(rig, lambda: rig.http().get("/api/runs"))
    with pytest.raises(AssertionError, match="the event loop was held for"):
        neighbour.notices_nothing()


async def test_a_freeze_in_the_last_moment_of_the_attack_is_found(rig: Rig) -> None:
    neighbour = Neighbour({})
    async with neighbour.watching():
        await rig.http().get("/healthz")
        _sleep()
    with pytest.raises(AssertionError, match="the event loop was held for"):
        neighbour.notices_nothing()


async def test_time_in_which_the_thread_had_no_processor_is_no_freeze(tmp_path: Path) -> None:
    watch = LoopWatch()
    watch.waited_file = tmp_path / "schedstat"
    watch.waited_file.write_text("0 0 1")
    task = asyncio.create_task(watch.watch())
    await asyncio.sleep(0.05)
    _sleep()
    watch.waited_file.write_text("0 700000000 1")
    await asyncio.sleep(0.05)
    task.cancel()
    assert watch.longest < MOST_HELD_SECONDS
