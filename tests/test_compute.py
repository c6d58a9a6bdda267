"""Computations on users' text cannot block other users: security H2."""

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from interlock.compute import ProcessPool, Stopped, TooMany
from interlock.errors import Conflict, Invalid
from interlock.policy.policy import PolicyInvalid, check_policy


def add(one: int, other: int) -> int:
    return one + other


def spin(seconds: float = 60) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def devour() -> int:
    return len(bytearray(8 << 30))


def crash() -> None:
    os.abort()


def refuse() -> None:
    raise Conflict("no", code="NO", retry_after=3)


def raise_a_lambda() -> None:
    raise ValueError(lambda: None)


def environment() -> dict[str, str]:
    return dict(os.environ)


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(children=2, cpu_seconds=1.0)
    yield pool
    pool.close()


async def test_a_computation_returns_and_raises_as_if_it_ran_here(pool: ProcessPool) -> None:
    assert await pool.run("a", add, 1, 2) == 3
    with pytest.raises(Conflict) as refused:
        await pool.run("a", refuse)
    assert (refused.value.code, refused.value.headers) == ("NO", {"Retry-After": "3"})
    with pytest.raises(RuntimeError, match="ValueError"):
        await pool.run("a", raise_a_lambda)
    with pytest.raises(PolicyInvalid) as wrong:
        await pool.run("a", check_policy, "permit (principal, action, resource;", [])
    assert wrong.value.fields["errors"]


async def test_a_computation_that_takes_too_long_is_killed_and_the_event_loop_runs_on(pool: ProcessPool) -> None:
    await pool.run("a", add, 1, 2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    with pytest.raises(Stopped, match="took more than 1 seconds"):
        await pool.run("a", spin)
    ticking.cancel()
    assert ticks > 10
    assert await pool.run("a", add, 1, 2) == 3, "another child does the next one"


@pytest.mark.parametrize("function", [devour, crash])
async def test_a_computation_that_ends_its_process_fails_alone(pool: ProcessPool, function: object) -> None:
    with pytest.raises((Stopped, MemoryError)):
        await pool.run("a", function)  # type: ignore[arg-type]
    assert await pool.run("a", add, 1, 2) == 3


async def test_a_tenant_has_one_computation_at_a_time_and_others_do_not_wait_for_it(pool: ProcessPool) -> None:
    await pool.run("a", add, 1, 2)
    long = [asyncio.create_task(pool.run("hostile", spin)) for _ in range(4)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(pool.run("other", add, 1, 2), 10) == 3
    assert not any(task.done() for task in long[1:])
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)


async def test_too_many_computations_of_one_tenant_are_refused(pool: ProcessPool) -> None:
    tasks = [asyncio.create_task(pool.run("hostile", spin, 0.01)) for _ in range(40)]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [each for each in found if isinstance(each, TooMany)]
    assert len(refused) == 40 - 11
    assert (refused[0].status, refused[0].code) == (429, "TOO_MANY_COMPUTATIONS")
    assert int(refused[0].headers["Retry-After"]) > 0
    assert await pool.run("hostile", spin, 0.01, must_wait=True) is None


async def test_a_child_knows_no_secrets(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATABASE_URL", "postgresql://secret")
    assert not any("secret" in value for value in (await pool.run("a", environment)).values())


async def test_a_stopped_computation_is_an_invalid_request(pool: ProcessPool) -> None:
    with pytest.raises(Invalid) as stopped:
        await pool.run("a", spin)
    assert (stopped.value.status, stopped.value.code) == (422, "COMPUTATION_STOPPED")
