"""The ceiling: the rate that this server and driver reach with nothing but claims and appends.

Workers claim runs in batches, append all steps that finished since the last append in one statement, and notify only
waiting listeners. There are no retries, no versions, no lanes, no approvals and no history except the outputs. The
difference to this rate is the price of an engine's guarantees.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import asyncpg

from bench.processes import running
from bench.stage import Stage

SCHEMA = """
CREATE TABLE run (
  id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  steps    int NOT NULL,
  state    "char" NOT NULL DEFAULT 'r',  -- ready, leased, done
  owner    int,
  watched  boolean NOT NULL DEFAULT false,
  output   jsonb,
  created  timestamptz NOT NULL DEFAULT now(),
  ended    timestamptz
) WITH (fillfactor = 70);
CREATE INDEX run_ready ON run (id) WHERE state = 'r';
CREATE TABLE step (
  run_id  bigint NOT NULL,
  seq     int NOT NULL,
  output  jsonb,
  at      timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (run_id, seq)
);
"""

CLAIM = """
WITH top AS (SELECT id FROM run WHERE state = 'r' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE run SET state = 'l', owner = $2 FROM top WHERE run.id = top.id
RETURNING run.id, run.steps
"""

# A step is one row in `step`. The run's own row changes only with its last step.
APPEND = """
WITH written AS (
  SELECT * FROM unnest($1::bigint[], $2::int[], $3::text[]) AS w (run_id, seq, output)
), held AS (
  SELECT w.run_id, w.seq, w.output, w.seq = run.steps AS is_last
    FROM written AS w JOIN run ON run.id = w.run_id AND run.owner = $4 AND run.state = 'l'
), appended AS (
  INSERT INTO step (run_id, seq, output) SELECT run_id, seq, output::jsonb FROM held ON CONFLICT DO NOTHING
), ended AS (
  UPDATE run SET state = 'd', output = held.output::jsonb, ended = now()
    FROM held WHERE run.id = held.run_id AND held.is_last
  RETURNING run.id, run.watched
)
SELECT run_id, NULL::text FROM held WHERE NOT is_last
UNION ALL
SELECT id, pg_notify('done', id::text)::text FROM ended WHERE watched
"""

_ENQUEUE = """
WITH started AS (INSERT INTO run (steps) SELECT $2 FROM generate_series(1, $1))
SELECT pg_notify('ready', '')
"""
_ENQUEUE_WATCHED = """
WITH started AS (INSERT INTO run (steps, watched) VALUES ($1, true) RETURNING id)
SELECT id, pg_notify('ready', '')::text FROM started
"""


class Ceiling:
    def __init__(self, stage: Stage, url: str, connection: Any) -> None:
        self._stage, self._url, self._connection = stage, url, connection
        self._ended: dict[int, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def workers(self, count: int, counter: str | None = None) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(count):
                arguments = ("-m", "bench.ceiling_worker", self._url, str(number), counter or "")
                await stack.enter_async_context(running(self._stage.new_file("log"), *arguments, says="ready"))
            yield

    async def enqueue(self, runs: int, steps: int) -> None:
        await self._connection.execute(_ENQUEUE, runs, steps)

    async def completed(self) -> int:
        return int(await self._connection.fetchval("SELECT count(*) FROM run WHERE state = 'd'"))

    async def tidy(self) -> None:
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.execute("CHECKPOINT")

    async def run_one(self, steps: int) -> list[float]:
        run_id = (await self._connection.fetchrow(_ENQUEUE_WATCHED, steps))["id"]
        await self._event_of(run_id).wait()
        del self._ended[run_id]
        rows = await self._connection.fetch(
            "SELECT (output->>'t')::float8 AS t FROM step WHERE run_id = $1 ORDER BY seq", run_id
        )
        return [row["t"] for row in rows]

    def on_done(self, *event: Any) -> None:
        self._event_of(int(event[-1])).set()

    def _event_of(self, run_id: int) -> asyncio.Event:
        """The notification of a run may arrive before its id."""
        return self._ended.setdefault(run_id, asyncio.Event())


@contextlib.asynccontextmanager
async def opened(stage: Stage) -> AsyncIterator[Ceiling]:
    async with stage.database() as url:
        connection: Any = await asyncpg.connect(url)
        listening: Any = await asyncpg.connect(url)
        try:
            await connection.execute(SCHEMA)
            ceiling = Ceiling(stage, url, connection)
            await listening.add_listener("done", ceiling.on_done)
            yield ceiling
        finally:
            await connection.close()
            await listening.close()


@contextlib.asynccontextmanager
async def opened_idle(stage: Stage) -> AsyncIterator[Ceiling]:
    async with opened(stage) as ceiling, ceiling.workers(1):
        yield ceiling
