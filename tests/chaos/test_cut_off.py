"""Workers that lose the database but still reach other systems, and blocking tools (reliability V2, V3, V6).

The tools record their effects outside the system, in a file. A proxy on loopback cuts off the database: it keeps
every connection open and forwards nothing.
"""

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from interlock.engine.queueing import workers
from interlock.engine.queueing.leases import WorkerIdentity
from interlock.lifecycle import WorkerEvent
from tests.chaos.oracles import Execution
from tests.chaos.processes import Yard, is_there, start_runs, until, until_all_ended, worker_of
from tests.rig import Rig

LEASE_SECONDS = 3.0
# Longer than the lease plus its detection by others: the effect would happen when another worker has the run.
EFFECT_SECONDS = 7.0


class Proxy:
    def __init__(self, socket_path: str) -> None:
        self._path, self._flows = socket_path, asyncio.Event()
        self._flows.set()
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        theirs = ours = None
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._flows.wait()
            theirs, ours = await asyncio.open_unix_connection(self._path)
            await asyncio.gather(self._pass(reader, ours), self._pass(theirs, writer))
        for end in (writer, ours):
            if end is not None:
                end.transport.abort()
        self._serving.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    def freeze(self) -> None:
        self._flows.clear()

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """Give a second route to the test's database, and its address."""
    name, directory = re.match(r"postgresql://\w+@/(\w+)\?host=([^&]+)", url).groups()  # type: ignore[union-attr]
    proxy = Proxy(f"{directory}/.s.PGSQL.5432")
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield proxy, f"postgresql://postgres@127.0.0.1:{port}/{name}?sslmode=disable"
    finally:
        server.close()
        await proxy.close()


def assert_each_effect_once(executions: list[Execution], runs: int) -> None:
    effects = Counter((line.run_id, line.step) for line in executions if line.what == "effect")
    assert len(effects) == runs and set(effects.values()) == {1}, effects


def most_bodies_at_once(executions: list[Execution], ended: dict[int, int]) -> int:
    """Return how many bodies ran at the same time. A body without an end line ended with its process."""
    lines = [(line.at, line.what == "begin") for line in executions if line.what in ("begin", "end")]
    now = most = 0
    begun = {(line.run_id, line.attempt): line.pid for line in executions if line.what == "begin"}
    for line in executions:
        if line.what == "end":
            begun.pop((line.run_id, line.attempt), None)
    for _, begins in sorted([*lines, *((ended[pid], False) for pid in begun.values() if pid in ended)]):
        now += 1 if begins else -1
        most = max(most, now)
    return most


@pytest.mark.chaos
@pytest.mark.parametrize("tool", ["chaos.pay", "chaos.pay_in_thread"])
async def test_a_worker_without_the_database_does_nothing_twice_and_keeps_the_cap(
    rig: Rig, yard: Yard, tool: str
) -> None:
    """`zombie`: cut off in the middle of writes, and `reconcile` is asked by another worker."""
    steps = f"[{{id: a, tool: {tool}, input: {{ms: {EFFECT_SECONDS * 2000}}}}}]"
    await rig.apply(f"{{name: pay, caps: {{max_concurrency: 3}}, steps: {steps}}}")
    async with proxied(rig.database.url) as (proxy, url):
        heir = await worker_of(rig, yard.worker(concurrency=10, lease_seconds=LEASE_SECONDS))
        await _order(rig, heir, WorkerEvent.PAUSE)
        victim = yard.worker(concurrency=10, lease_seconds=LEASE_SECONDS, database_url=url)
        await worker_of(rig, victim)
        await start_runs(rig, "pay", 3)
        await yard.until_begun(3)
        proxy.freeze()
        cut = time.monotonic()
        await _order(rig, heir, WorkerEvent.RESUME)
        died: dict[int, int] = {}
        while time.monotonic() - cut < 2 * LEASE_SECONDS and not died:
            if not victim.is_alive:
                died[victim.pid] = time.monotonic_ns()
            await asyncio.sleep(0.01)
        await until_all_ended(rig, 3, seconds=90)
        done = yard.executions()
        assert_each_effect_once(done, runs=3)
        assert most_bodies_at_once(done, died) <= 3
        assert (victim.pid in died) == (tool == "chaos.pay_in_thread"), victim.said()
        if died:
            assert await victim.ended() == 75 and "tools_outlive_lease" in victim.said()
        states = await rig.sql("SELECT status, count(*) FROM interlock.run GROUP BY 1")
        assert [tuple(row) for row in states] == [("succeeded", 3)]
        assert sum(line.what == "asked" for line in done) == 3


async def _order(rig: Rig, worker: WorkerIdentity, event: WorkerEvent) -> None:
    await rig.database.run_in_transaction(lambda tx: workers.order(tx, "test", worker.id, event))


@pytest.mark.chaos
async def test_twenty_writes_beside_a_blocking_tool_are_done_once_and_ask_nobody(rig: Rig, yard: Yard) -> None:
    """`collateral`: 20 of 20 were in doubt."""
    await rig.apply("{name: once, steps: [{id: a, tool: chaos.pay, input: {ms: 4000}}]}")
    await rig.apply(f"{{name: hog, steps: [{{id: a, tool: chaos.hog, input: {{ms: {LEASE_SECONDS * 2500}}}}}]}}")
    supervisor = yard.supervisor(1, lease_seconds=LEASE_SECONDS)
    await start_runs(rig, "once", 20)
    await yard.until_begun(20, seconds=60)
    await start_runs(rig, "hog", 1)
    await until_all_ended(rig, 21, seconds=90)
    assert_each_effect_once(yard.executions(), runs=20)
    states = await rig.sql("SELECT status, count(*) FROM interlock.run GROUP BY 1")
    assert [tuple(row) for row in states] == [("succeeded", 21)]
    assert await rig.sql("SELECT 1 FROM interlock.approval") == []
    assert len(await rig.sql("SELECT 1 FROM interlock.worker")) == 1, supervisor.said()
    assert "step_blocks_event_loop" in supervisor.said()


@pytest.mark.chaos
async def test_twenty_writes_beside_a_tool_that_holds_the_interpreter_keep_their_lease(rig: Rig, yard: Yard) -> None:
    """No thread of the worker runs for two and a half leases, so its supervisor sends the heartbeats."""
    await rig.apply("{name: once, steps: [{id: a, tool: chaos.pay, input: {ms: 4000}}]}")
    hold = f"{{ms: {LEASE_SECONDS * 2500}}}"
    await rig.apply(f"{{name: hog, steps: [{{id: a, tool: chaos.hold_interpreter, input: {hold}}}]}}")
    supervisor = yard.supervisor(1, lease_seconds=LEASE_SECONDS)
    await start_runs(rig, "once", 20)
    await yard.until_begun(20, seconds=60)
    await start_runs(rig, "hog", 1)
    await until_all_ended(rig, 21, seconds=90)
    assert_each_effect_once(yard.executions(), runs=20)
    states = await rig.sql("SELECT status, count(*) FROM interlock.run GROUP BY 1")
    assert [tuple(row) for row in states] == [("succeeded", 21)]
    assert len(await rig.sql("SELECT 1 FROM interlock.worker")) == 1, supervisor.said()
    assert "worker_silent" in supervisor.said() and "in hold_interpreter" in supervisor.said(), "its stack is shown"
    [named] = [line for line in supervisor.said().splitlines() if "step_holds_interpreter" in line]
    assert "chaos.hold_interpreter" in named


@pytest.mark.chaos
async def test_a_tool_that_holds_the_interpreter_without_a_database_does_nothing_twice(rig: Rig, yard: Yard) -> None:
    """The supervisor kills the worker before the lease ends, because nothing in the worker can stop the tool."""
    hold = f"{{ms: {EFFECT_SECONDS * 1000}}}"
    await rig.apply(f"{{name: pay, steps: [{{id: a, tool: chaos.hold_and_pay, input: {hold}}}]}}")
    async with proxied(rig.database.url) as (proxy, url):
        supervisor = yard.supervisor(1, lease_seconds=LEASE_SECONDS, database_url=url)
        await start_runs(rig, "pay", 1)
        await yard.until_begun(1, seconds=60)
        proxy.freeze()
        yard.supervisor(1, lease_seconds=60, database_url=rig.database.url)
        await until_all_ended(rig, 1, seconds=90)
        assert_each_effect_once(yard.executions(), runs=1)
        assert "worker_stays_silent" in supervisor.said()


@pytest.mark.chaos
async def test_what_tools_left_behind_ends_with_their_worker(rig: Rig, yard: Yard) -> None:
    """V11c: the child process of a tool that timed out kept running for ever."""
    step = "{id: a, tool: chaos.leave_process, timeout: 0.5, retry: {max_attempts: 1}, input: {ms: 60000}}"
    await rig.apply(f"{{name: leave, steps: [{step}]}}")
    supervisor = yard.supervisor(1, lease_seconds=LEASE_SECONDS)
    await start_runs(rig, "leave", 1)
    await until_all_ended(rig, 1, seconds=60)

    def sleepers() -> list[int]:
        return [pid for pid in yard.left_behind() if is_there(pid, "sleep")]

    assert sleepers()
    supervisor.ask_to_end()
    assert await supervisor.ended(60) == 0
    await until(lambda: not sleepers(), "what the tool started has ended", 5)
