"""The console with a million runs: how long the server takes for a page that a browser requests."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from bench import engine
from bench.figures import Figure, Goal, Spread, percentile
from bench.session import Session
from interlock import console
from interlock.api import AppContext, create_app
from interlock.api.limits import COOKIE
from interlock.api.run_watcher import Follower
from interlock.engine.access import console_sessions
from interlock.engine.access.key_store import Salts, Signing
from interlock.engine.access.tenants import Principals
from interlock.engine.policies import Policies
from interlock.engine.proof.evidence import EvidenceSigner
from interlock.integrations.artifacts import Artifacts
from interlock.tools import registry

_GOAL = Goal("≤", 100)
_ASKED, _WARM_UP = 15, 3
_AT_ONCE = 50_000

# Ended runs of the last thirty days: one in a thousand failed, one in ten thousand belongs to a rarely used workflow,
# and a schedule started one in a thousand.
_FILL = """
INSERT INTO interlock.run (id, tenant_id, queue_id, workflow, workflow_version, status, reason, input, trigger,
                 requested_by, seq, created_at, started_at, completed_at)
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7000' || '8' ||
        lpad(to_hex(n), 15, '0'))::uuid,
       $1::uuid, $1::uuid, CASE WHEN n % 10000 = 0 THEN 'rare' ELSE 'noop5' END, 1,
       CASE WHEN n % 1000 = 0 THEN 'failed' ELSE 'succeeded' END,
       CASE WHEN n % 1000 = 0 THEN 'terminal_error' ELSE 'completed' END,
       jsonb_build_object('charge', 'ch_' || n, 'amount', n % 500),
       jsonb_build_object('source', CASE WHEN n % 1000 = 1 THEN 'schedule' ELSE 'api' END, 'ref', NULL),
       'somebody:' || $1::uuid, 12, at, at, at + interval '180 milliseconds'
  FROM generate_series($2::int, $3::int) AS n
 CROSS JOIN LATERAL (SELECT now() - interval '30 days' * (1 - n::float8 / $4::int) AS at) AS _
"""


async def measure(session: Session) -> list[Figure]:
    async with engine.opened(session.stage) as side:
        runs = session.effort.console_runs
        for first in range(1, runs + 1, _AT_ONCE):
            session.tell(f"console, {first - 1:,} of {runs:,} runs")
            last = min(first + _AT_ONCE - 1, runs)
            await side.database.pool.execute(_FILL, side.principal.tenant_id, first, last, runs)
        async with side.workers(1):
            await side.enqueue_of("noop5", 1)
            shown = await _ended(side)
        await side.tidy()
        async with _visitor(side) as http:
            return [await _figure(session, http, what, path) for what, path in _pages(shown).items()]


def _pages(run_id: Any) -> dict[str, str]:
    return {
        "first page of runs": "/runs",
        "runs that failed": "/runs?status=failed",
        "runs of a rare workflow": "/runs?workflow=rare",
        "failed runs of a rare workflow": "/runs?status=failed&workflow=rare",
        "runs of a trigger": "/runs?trigger=schedule",
        "runs with a word": "/runs?q=ch_77",
        "runs with a word that none has": "/runs?q=nowhere",
        "runs of the last day": "/runs?since=24h",
        "a run": f"/runs/{run_id}",
        "inbox": "/inbox",
        "usage": "/usage",
        "audit": "/audit",
    }


async def _ended(side: engine.Engine) -> Any:
    ended = "SELECT id FROM interlock.run WHERE workflow = 'noop5' AND status = 'succeeded' AND seq <> 12 LIMIT 1"
    async with asyncio.timeout(60):
        while (found := await side.database.pool.fetchval(ended)) is None:  # noqa: ASYNC110 — other processes do it
            await asyncio.sleep(0.2)
    return found


@contextlib.asynccontextmanager
async def _visitor(side: engine.Engine) -> AsyncIterator[httpx2.AsyncClient]:
    """Sign in to an in-process server: the measurement is of the server's time."""
    database, settings = side.database, side.database.settings
    notary = EvidenceSigner(Signing(settings), Salts(settings), Artifacts(settings.data_dir.absolute().as_uri()))
    principals = Principals(database)
    follower = Follower(database, principals)
    services = AppContext(database, settings, side.plans, principals, Policies(database, registry), follower, notary)
    app = create_app(services)
    console.mount(app)
    token = await console_sessions.begin(database, engine.KEY)
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url="http://console", cookies={COOKIE: token}
    ) as http:
        yield http


async def _figure(session: Session, http: httpx2.AsyncClient, what: str, path: str) -> Figure:
    async def ask() -> list[float]:
        times = []
        for number in range(_ASKED + _WARM_UP):
            began = time.perf_counter()
            answer = await http.get(path)
            if answer.status_code != 200 or len(answer.content) > 100_000:
                raise RuntimeError(f"{path} is answered {answer.status_code} with {len(answer.content):,} bytes")
            if number >= _WARM_UP:
                times.append((time.perf_counter() - began) * 1000)
        return times

    times = await session.calmly(f"console, {what}", ask)
    slow, usual = percentile(times, 95), percentile(times, 50)
    return Figure(
        f"console: {what}, p50 | p95", "ms", Spread([usual]), Spread([slow]), Spread([slow]), _GOAL,
        session.take_pulses(),
    )  # fmt: skip
