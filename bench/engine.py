"""Interlock as in production: real `interlock worker` and `interlock up` processes with their default settings."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from bench.processes import running
from bench.stage import Stage
from interlock.client import AsyncClient
from interlock.definition.workflow import parse
from interlock.engine import workflows
from interlock.engine.access import tenants
from interlock.engine.access.principal import Principal
from interlock.engine.runs.runs import prepare, start_many
from interlock.engine.workflows import Plans
from interlock.ids import RunId, uuid7
from interlock.lifecycle import RunState
from interlock.settings import Settings
from interlock.store.migrate import migrate
from interlock.store.pool import Database

_TOOLS = str(Path(__file__).with_name("noop_tools.py"))
_MOST_AT_ONCE = 10_000
_LENGTHS = (1, 5, 20)
READS, WRITES = "reads", "writes"
STEPS_THAT_ACT = 5
KEY = "il_benchmark_only_not_a_secret"


class Engine:
    """The engine's own functions on the client side, worker processes on the other side."""

    def __init__(self, stage: Stage, url: str, database: Database, principal: Principal) -> None:
        self._stage, self.url = stage, url
        self.database, self.principal = database, principal
        self.plans = Plans(database)

    @contextlib.asynccontextmanager
    async def workers(self, count: int, counter: str | None = None) -> AsyncIterator[None]:
        environment = self.environment() | ({"BENCH_COUNTER": counter} if counter else {})
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                log = self._stage.new_file("log")
                await stack.enter_async_context(running(log, "-m", "interlock", "worker", **environment))
            await self.until_working(count)
            yield

    async def enqueue(self, runs: int, steps: int) -> None:
        await self.enqueue_of(f"noop{steps}", runs)

    async def enqueue_of(self, workflow: str, runs: int) -> None:
        first = await prepare(self.plans, self.principal, workflow, input={"charge": "ch_1", "amount": 250})
        for begun in range(0, runs, _MOST_AT_ONCE):
            size = min(_MOST_AT_ONCE, runs - begun)
            news = [dataclasses.replace(first, id=RunId(uuid7())) for _ in range(size)]
            await start_many(self.database, self.principal, news)

    async def completed(self) -> int:
        return int(await self.database.pool.fetchval("SELECT count(*) FROM interlock.run WHERE status = 'succeeded'"))

    async def tidy(self) -> None:
        await self.database.pool.execute("VACUUM ANALYZE")
        await self.database.pool.execute("CHECKPOINT")

    def environment(self) -> dict[str, str]:
        return {
            "INTERLOCK_DATABASE_URL": self.url,
            "INTERLOCK_TOOLS": _TOOLS,
            "INTERLOCK_DATA_DIR": str(self._stage.new_file("data")),
        }

    async def until_working(self, workers: int) -> None:
        live = "SELECT count(*) FROM interlock.worker WHERE status = 'running'"
        async with asyncio.timeout(60):
            while await self.database.pool.fetchval(live) < workers:  # noqa: ASYNC110 — other processes do it
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def opened(stage: Stage) -> AsyncIterator[Engine]:
    """Give a fresh database with the schema, a tenant and the workflows, and no worker."""
    async with stage.database() as url:
        database = await Database(url, Settings(statement_timeout_seconds=600)).open()
        try:
            await migrate(database)
            await tenants.bootstrap(database, KEY)
            engine = Engine(stage, url, database, await tenants.authenticate(database, KEY))
            for steps in _LENGTHS:
                await _apply(engine, f"noop{steps}", "{tool: bench.noop}", steps)
            for workflow, tool in ((READS, "bench.read"), (WRITES, "bench.write")):
                arguments = '{charge: "${input.charge}", amount: "${input.amount}"}'
                await _apply(engine, workflow, f"{{tool: {tool}, input: {arguments}}}", STEPS_THAT_ACT)
            yield engine
        finally:
            await database.close()


async def _apply(engine: Engine, name: str, step: str, steps: int) -> None:
    listed = "".join(f"  - {{id: s{number}, {step[1:]}\n" for number in range(steps))
    plan = parse(f"name: {name}\nsteps:\n{listed}")
    await engine.database.run_in_transaction(lambda tx: workflows.apply(tx, engine.database, engine.principal, plan))


class Served:
    """The complete path: client, HTTP, server, worker."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run_one(self, steps: int) -> list[float]:
        run = await self._client.start(f"noop{steps}", wait=10)
        if run.status is not RunState.SUCCEEDED:
            raise RuntimeError(f"a run of the benchmark is {run.status}: {run.error}")
        return [step.output["t"] for step in run.steps]


@contextlib.asynccontextmanager
async def opened_idle(stage: Stage) -> AsyncIterator[Served]:
    arguments = ("-m", "interlock", "up", "--workers", "1", "--port", "0")
    async with (
        opened(stage) as engine,
        running(stage.new_file("log"), *arguments, says="Interlock is at", **engine.environment()) as line,
        AsyncClient(line.split("Interlock is at ")[1].split(",")[0], KEY) as client,
    ):
        await engine.until_working(1)
        yield Served(client)
