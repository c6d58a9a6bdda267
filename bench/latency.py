"""Latency on an idle system: one run from start to end as its client sees it, and from step to step."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise

from bench import ceiling, engine
from bench.calm import Pulse
from bench.figures import Figure, Goal, figure, percentile
from bench.session import Session
from bench.side import IdleSide, OpenIdleSide

_WARM_UP = 30
_PAUSE_SECONDS = 0.02
_LONG_RUN_STEPS = 20
_SAMPLES_PER_LONG_RUN = 10

Times = list[float]
Sample = Callable[[IdleSide, int], Awaitable[Times]]


async def measure_latency(session: Session) -> list[Figure]:
    base, ours = await _both(session, "latency", 1, _times_of_runs)
    pulses = session.take_pulses()
    return [
        _figure("1-step run, start to end, p50", base, ours, 50, Goal("≤", 2.5), pulses),
        _figure("1-step run, start to end, p95", base, ours, 95, None, pulses),
    ]


async def measure_handoff(session: Session) -> list[Figure]:
    base, ours = await _both(session, "hand-off", _LONG_RUN_STEPS, _times_between_steps)
    pulses = session.take_pulses()
    return [_figure("hand-off from step to step, p50", base, ours, 50, Goal("≤", 2.5), pulses)]


def _figure(
    name: str, base: list[Times], ours: list[Times], percent: float, goal: Goal | None, pulses: list[Pulse]
) -> Figure:
    def in_ms(side: list[Times]) -> list[float]:
        return [percentile(times, percent) * 1000 for times in side]

    return figure(name, "ms", in_ms(base), in_ms(ours), goal, pulses=pulses)


async def _both(session: Session, what: str, steps: int, sample: Sample) -> tuple[list[Times], list[Times]]:
    base, ours = [], []
    for number in range(session.effort.repetitions):
        base.append(await _one(session, f"{what}, round {number + 1}, ceiling", ceiling.opened_idle, steps, sample))
        ours.append(await _one(session, f"{what}, round {number + 1}, ours", engine.opened_idle, steps, sample))
    return base, ours


async def _one(session: Session, what: str, open_side: OpenIdleSide, steps: int, sample: Sample) -> Times:
    async with open_side(session.stage) as side:
        for _ in range(_WARM_UP):
            await side.run_one(steps)
        return await session.calmly(what, lambda: sample(side, session.effort.samples))


async def _times_of_runs(side: IdleSide, samples: int) -> Times:
    times = []
    for _ in range(samples):
        await asyncio.sleep(_PAUSE_SECONDS)
        began = time.perf_counter()
        await side.run_one(1)
        times.append(time.perf_counter() - began)
    return times


async def _times_between_steps(side: IdleSide, samples: int) -> Times:
    times: Times = []
    for _ in range(max(samples // _SAMPLES_PER_LONG_RUN, 3)):
        await asyncio.sleep(_PAUSE_SECONDS)
        moments = await side.run_one(_LONG_RUN_STEPS)
        times += [after - before for before, after in pairwise(moments)]
    return times
