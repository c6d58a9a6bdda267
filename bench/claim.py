"""The cost of a claim must grow neither with the number of tenants that have work nor with the length of the queue."""

import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from bench import engine
from bench.figures import Figure, Goal, figure
from bench.session import Session
from interlock.engine.queueing.leases import WorkerIdentity, claim, register
from interlock.store.pool import Database, Tx

_BATCH = 50
_WARM_UP = 10
_GOAL = Goal("≤", 2.0)

# Make ids like uuid7, without requiring a server that has the function.
_ID = """(lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint + n / 4096), 12, '0') || '7' ||
  lpad(to_hex(n % 4096), 3, '0') || '8' || left(md5(n::text), 15))::uuid"""
_TENANTS = f"""
WITH made AS (
  INSERT INTO interlock.tenant (id, name, created_at)
  SELECT {_ID}, 'tenant-' || n, now() FROM generate_series(1, $1::int) AS n
  RETURNING id
), limited AS (
  INSERT INTO interlock.tenant_limits (tenant_id) SELECT id FROM made
)
INSERT INTO interlock.queue (id, tenant_id, kind, has_work, virtual_time)
SELECT id, id, 'tenant', true, random() FROM made
"""
_RUNS = f"""
WITH numbered AS MATERIALIZED (
  SELECT tenant_id, row_number() OVER (ORDER BY tenant_id) - 1 AS number FROM interlock.queue WHERE has_work
), made AS MATERIALIZED (
  SELECT {_ID} AS id, tenant_id
    FROM generate_series(1, $1::int) AS n JOIN numbered ON number = n % (SELECT count(*) FROM numbered)
), queued AS (
  INSERT INTO interlock.ready_run (tenant_id, run_id, queue_id, priority, is_new)
  SELECT tenant_id, id, tenant_id, 1, true FROM made
), journaled AS (
  INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, event, to_state, token, actor)
  SELECT id, 1, tenant_id, now(), 'run_created', 'create', 'pending', 0, 'bench' FROM made
)
INSERT INTO interlock.run (id, tenant_id, queue_id, workflow, workflow_version, status, input, trigger, requested_by,
                           seq, created_at)
SELECT id, tenant_id, tenant_id, 'noop1', 1, 'pending', '{{}}', '{{"source": "bench"}}', 'bench', 1, now() FROM made
"""


async def measure(session: Session) -> list[Figure]:
    many, long = session.effort.tenants, session.effort.ready
    return [
        await _compare(session, f"claim of {_BATCH}, 10 | {many:,} tenants", (10, 10 * many), (many, 10 * many)),
        await _compare(session, f"claim of {_BATCH}, 1,000 | {long:,} ready", (10, 1000), (10, long)),
    ]


async def _compare(session: Session, name: str, small: tuple[int, int], large: tuple[int, int]) -> Figure:
    """Alternate the claims of the two cases, and their repetitions."""
    session.tell(f"{name}: filling two databases")
    async with _filled(session, *small) as few, _filled(session, *large) as much:
        for claimer in (few, much):
            for _ in range(_WARM_UP):
                await claimer.claim()
        base, ours = [], []
        for number in range(session.effort.repetitions):
            a, b = await session.calmly(f"{name}, round {number + 1}", lambda: _take_turns(session, few, much))
            base.append(a)
            ours.append(b)
    return figure(name, "ms", base, ours, _GOAL, pulses=session.take_pulses())


async def _take_turns(session: Session, few: "_Claimer", much: "_Claimer") -> tuple[float, float]:
    times = [(await few.claim(), await much.claim()) for _ in range(session.effort.claims)]
    return statistics.median(t for t, _ in times) * 1000, statistics.median(t for _, t in times) * 1000


class _Claimer:
    def __init__(self, connection: Any, me: WorkerIdentity) -> None:
        self._connection, self._me = connection, me

    async def claim(self) -> float:
        """Return the seconds of the statements alone. Roll the claim back, so that every claim finds the same queue."""
        undone = self._connection.transaction()
        await undone.start()
        began = time.perf_counter()
        runs = await claim(Tx(self._connection), self._me, _BATCH)
        took = time.perf_counter() - began
        await undone.rollback()
        if len(runs or ()) != _BATCH:
            raise RuntimeError("a claim of the benchmark was not filled")
        return took


@contextlib.asynccontextmanager
async def _filled(session: Session, tenants: int, runs: int) -> AsyncIterator[_Claimer]:
    async with engine.opened(session.stage) as opened:
        await opened.database.pool.execute(_TENANTS, tenants)
        await opened.database.pool.execute(_RUNS, runs)
        await opened.tidy()
        me = await _working(opened.database)
        async with opened.database.pool.acquire() as connection:
            yield _Claimer(connection, me)


async def _working(database: Database) -> WorkerIdentity:
    me = await register(database, capacity=_BATCH, lease_seconds=3600)
    await database.pool.execute("UPDATE interlock.worker SET status = 'running' WHERE id = $1", me.id)
    return me
