"""Throughput: 1,000 runs of 5 no-op steps, from the first enqueue until the store shows the last run ended."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from bench import ceiling, engine
from bench.figures import Figure, Goal, figure
from bench.session import Session
from bench.side import OpenSide, Side

_RUNS, _STEPS = 1000, 5
_WARM_UP = 200
_BURSTS = 3
_POLL_SECONDS = 0.02
_LONGEST_SECONDS = 120
GOALS = {1: Goal("≥", 0.25), 2: None}


async def measure(session: Session) -> list[Figure]:
    return [await _with_workers(session, workers, goal) for workers, goal in GOALS.items()]


async def _with_workers(session: Session, workers: int, goal: Goal | None) -> Figure:
    base, ours = [], []
    for number in range(session.effort.repetitions):
        round_ = f"throughput, {workers} worker{'s' * (workers > 1)}, round {number + 1}"
        base.append(await _steps_per_second(session, f"{round_}, ceiling", ceiling.opened, workers))
        ours.append(await _steps_per_second(session, f"{round_}, ours", engine.opened, workers))
    name = f"5-step runs, {workers} worker{'s' * (workers > 1)}"
    return figure(name, "steps/s", base, ours, goal, pulses=session.take_pulses())


async def _steps_per_second(session: Session, what: str, open_side: OpenSide, workers: int) -> float:
    async with open_side(session.stage) as side, side.workers(workers):
        await _drain(side, _WARM_UP)
        bursts = [await session.calmly(what, lambda: _drain(side, _RUNS)) for _ in range(_BURSTS)]
        return _RUNS * _STEPS / statistics.median(bursts)


async def _drain(side: Side, runs: int) -> float:
    return await seconds_to_end(side, runs, lambda more: side.enqueue(more, _STEPS))


async def seconds_to_end(side: Side, runs: int, enqueue: Callable[[int], Awaitable[None]]) -> float:
    """Return how long it takes until this many more runs have ended."""
    target = await side.completed() + runs
    began = time.perf_counter()
    await enqueue(runs)
    async with asyncio.timeout(_LONGEST_SECONDS):
        while await side.completed() < target:  # noqa: ASYNC110 — only the store shows it
            await asyncio.sleep(_POLL_SECONDS)
    return time.perf_counter() - began
