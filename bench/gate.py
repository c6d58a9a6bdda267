"""The gate: the cost of judging a write, and how much more a writing step costs than a reading step.

The writes are low in risk, and a tenant's initial policy allows them. A write is proposed, digested and judged, its
intent is on disk before it starts, and it leaves a receipt. The difference to a read includes all of that.
"""

import statistics
import time
from datetime import UTC, datetime
from functools import partial

import bench.noop_tools  # noqa: F401 — registers its tools
from bench import engine
from bench.figures import Figure, Goal, Spread, figure
from bench.session import Session
from bench.throughput import seconds_to_end
from interlock.engine.policies import Policies
from interlock.engine.runs.runs import cancel, get, prepare, start_many
from interlock.journal import Journal
from interlock.tools import registry
from interlock.worker.gate import Allow, PolicyGate

_RUNS, _WARM_UP, _BURSTS = 600, 100, 3
_JUDGED = 2000
_GOAL = Goal("≤", 300)


async def measure(session: Session) -> list[Figure]:
    judged: list[float] = []
    reads: list[float] = []
    writes: list[float] = []
    for number in range(session.effort.repetitions):
        async with engine.opened(session.stage) as side:
            judged.append(await session.calmly(f"gate, round {number + 1}, judging", partial(_judge, side)))
            async with side.workers(1):
                for workflow, times in ((engine.READS, reads), (engine.WRITES, writes)):
                    what = f"gate, round {number + 1}, {workflow}"
                    times.append(await _microseconds_per_step(session, what, side, workflow))
    pulses = session.take_pulses()
    return [
        Figure("gate: propose, digest, judge", "µs", Spread(judged), Spread(judged), Spread(judged), _GOAL, pulses),
        figure("step that reads | writes, receipt and all", "µs", reads, writes, pulses=pulses),
    ]


async def _judge(side: engine.Engine) -> float:
    """Return the microseconds of each judgment, in the caller's process, as in a worker."""
    gate = PolicyGate(side.database, Policies(side.database, registry))
    new = await prepare(side.plans, side.principal, engine.WRITES)
    [fold, *_] = Journal(new.id, new.plan, input=None, trigger=None, run={}).steps.values()
    async with side.database.transaction() as tx:
        # A run that no worker sees: it is canceled in the transaction that starts it.
        await start_many(tx, side.principal, [new])
        row = await get(tx, side.principal, new.id)
        await cancel(tx, side.plans, side.principal, new.id)
    tool, now = registry.find("bench.write"), datetime.now(UTC)
    assert tool is not None
    began = 0.0
    for number in range(_JUDGED + _WARM_UP):
        if number == _WARM_UP:
            began = time.perf_counter()
        arguments = {"charge": f"ch_{number}", "amount": number}
        verdict = await gate.judge(row, fold, tool.propose(arguments, arguments, {}), now)
        assert isinstance(verdict, Allow), verdict
    return (time.perf_counter() - began) / _JUDGED * 1e6


async def _microseconds_per_step(session: Session, what: str, side: engine.Engine, workflow: str) -> float:
    await seconds_to_end(side, _WARM_UP, partial(side.enqueue_of, workflow))
    bursts = [
        await session.calmly(what, lambda: seconds_to_end(side, _RUNS, partial(side.enqueue_of, workflow)))
        for _ in range(_BURSTS)
    ]
    return statistics.median(bursts) / (_RUNS * engine.STEPS_THAT_ACT) * 1e6
