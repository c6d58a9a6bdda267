"""The backlog: workers drain a long queue of 1-step runs, and its last part must drain as fast as its first part."""

import asyncio
import statistics
import time
from itertools import pairwise

from bench import ceiling, engine
from bench.calm import Pulse
from bench.counter import Counter
from bench.figures import Figure, Goal, figure
from bench.session import Session
from bench.side import OpenSide

_LOOK_SECONDS = 0.05
_STALLED_SECONDS = 30.0
_HEAD, _TAIL = (0.02, 0.25), (0.75, 0.98)

Samples = list[tuple[float, int]]


async def measure(session: Session) -> list[Figure]:
    base, ours = [], []
    for number in range(session.effort.drains):
        base.append(await _drain(session, f"backlog, drain {number + 1}, ceiling", ceiling.opened))
        ours.append(await _drain(session, f"backlog, drain {number + 1}, ours", engine.opened))
    pulses = session.take_pulses()
    title = f"drain of {session.effort.backlog:,}: head | tail"
    return [
        _figure(f"{title}, ceiling", base, session.effort.backlog, None, pulses),
        _figure(f"{title}, ours", ours, session.effort.backlog, Goal("≥", 0.9), pulses),
    ]


def _figure(name: str, drains: list[Samples], backlog: int, goal: Goal | None, pulses: list[Pulse]) -> Figure:
    heads = [_rate(samples, backlog, *_HEAD) for samples in drains]
    tails = [_rate(samples, backlog, *_TAIL) for samples in drains]
    notes = {"seconds": [samples[-1][0] for samples in drains]}
    return figure(name, "runs/s", heads, tails, goal, pulses=pulses, notes=notes)


async def _drain(session: Session, what: str, open_side: OpenSide) -> Samples:
    path = session.stage.new_file("counter")
    counter = Counter(path)
    async with open_side(session.stage) as side:
        session.tell(f"{what}: filling the queue")
        # Enqueue before the worker starts, as after a night without a worker.
        await side.enqueue(session.effort.backlog, 1)
        await side.tidy()

        async def drain() -> Samples:
            async with side.workers(1, str(path)):
                return await _watch(counter, session.effort.backlog)

        return await session.calmly(what, drain)


async def _watch(counter: Counter, target: int) -> Samples:
    samples: Samples = []
    began = moved = time.perf_counter()
    while (count := counter.value()) < target:
        now = time.perf_counter()
        if not samples or count > samples[-1][1]:
            moved = now
        if now - moved > _STALLED_SECONDS:
            raise TimeoutError(f"the drain stands still at {count:,} of {target:,}")
        samples.append((now - began, count))
        await asyncio.sleep(_LOOK_SECONDS)
    return samples


def _rate(samples: Samples, target: int, low: float, high: float) -> float:
    """Return the median of the rates between samples, so that one disturbed second does not decide."""
    part = [(at, count) for at, count in samples if low * target <= count <= high * target]
    return statistics.median((c2 - c1) / (t2 - t1) for (t1, c1), (t2, c2) in pairwise(part))
