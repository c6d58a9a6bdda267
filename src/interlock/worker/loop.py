"""The worker: claims runs in batches and drives each of them; one heartbeat for all."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import asyncpg

from interlock.definition.plan import Plan
from interlock.engine import children, inbox, leases, sessions
from interlock.engine.keyfiles import Salts
from interlock.engine.policies import Policies
from interlock.engine.secrets import Secrets
from interlock.engine.workflows import Plans
from interlock.errors import LeaseLost, Problem, Unavailable
from interlock.lifecycle import WorkerEvent
from interlock.settings import Settings
from interlock.store.notify import INBOX, POLICY, READY, Listener
from interlock.store.pool import TRANSIENT, Database, Row, Tx, connection_options
from interlock.telemetry import log, metrics
from interlock.tools import Registry, registry
from interlock.waiting import either
from interlock.worker.drive import Driver
from interlock.worker.executor import Workshop
from interlock.worker.flush import Flusher
from interlock.worker.gate import Gate

FOREVER = float("inf")
_SLOW_STEP_SECONDS = 0.3
_BUSY_RETRY_SECONDS = 0.003
# Rounds of the loop in which runs that were just claimed get to their tools, before anything else is asked.
_HEAD_START = 4


class Worker:
    def __init__(
        self, database: Database, settings: Settings, *, tools: Registry = registry, capacity: int | None = None
    ) -> None:
        self.database = database
        self.settings = settings
        self.capacity = capacity or settings.concurrency
        self.plans = Plans(database, tools)
        self.policies = Policies(database, tools)
        self.gate = Gate(database, self.policies)
        threads = ThreadPoolExecutor(self.capacity, "step")
        self.shop = Workshop(tools, threads, settings.max_output_bytes, Salts(settings), Secrets(database))
        self.drivers: dict[UUID, Driver] = {}
        self.draining = False
        self.abandoning = False
        self.crowded = False
        self.on_trial: Driver | None = None
        self._forgot = False
        self.me: leases.Me
        self.flusher: Flusher
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._suspicious = asyncio.Event()
        self._errands = asyncio.Event()
        self._side_tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ life

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop; a worker that was declared lost begins again under a new id."""
        listener = Listener(
            self.database, {READY: lambda _: self._wake.set(), INBOX: self._on_mail, POLICY: self.policies.forget}
        )
        await listener.start()
        try:
            while not stop.is_set():
                try:
                    await self._live(stop)
                except Exception as error:
                    log.error("worker_failed", worker=self.me.name, exc_info=error)
                    await self._begin_again(error)
        finally:
            await listener.stop()
            self.shop.threads.shutdown(wait=False, cancel_futures=True)

    async def _live(self, stop: asyncio.Event) -> None:
        self.me = await self._register()
        self.flusher = Flusher(self.database, self.me)
        gc.freeze()
        tasks = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in {
                "flush": self.flusher.run(),
                "claim": self._claim_forever(),
                "beat": self._beat_forever(),
                "tick": self._tick_forever(),
                "errands": self._run_errands_forever(),
            }.items()
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                await self._drain(tasks[1])
                await leases.move_worker(self.database, self.me.id, WorkerEvent.COMPLETE, "drained")
                log.info("worker_drained", worker=self.me.name)
            for task in done - {stopping}:
                task.result()
        except LeaseLost as lost:
            log.warning("worker_lost", worker=self.me.name, detail=lost.detail)
        finally:
            self.abandoning = True
            self._cancel_drivers()
            for task in [*tasks, stopping, *self._side_tasks]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await either(self._idle, 10)
            self.drivers.clear()
            self.abandoning = False

    async def _begin_again(self, error: Exception) -> None:
        """What should not happen did. This worker is over, its runs are others'; the process goes on under a new id."""
        with contextlib.suppress(Problem):
            await leases.move_worker(self.database, self.me.id, WorkerEvent.FAIL, str(error)[:500])
        await asyncio.sleep(self.settings.poll_seconds)

    async def _register(self) -> leases.Me:
        while True:
            try:
                me = await leases.register(
                    self.database, capacity=self.capacity, lease_seconds=self.settings.lease_seconds
                )
                await leases.move_worker(self.database, me.id, WorkerEvent.START)
                return me
            except (Unavailable, LeaseLost) as error:
                log.warning("register_retry", detail=error.detail)

    async def _drain(self, claiming: "asyncio.Task[None]") -> None:
        """Steps that are under way may finish; each run is given back at its next step."""
        self.draining = True
        self._wake.set()
        # A claim that is under way is let through: its runs are ours, and have to be given back too.
        await asyncio.wait([claiming], timeout=5)
        claiming.cancel()
        for driver in self.drivers.values():
            driver._wake.set()
        await either(self._idle, self.settings.drain_seconds)
        self.abandoning = True
        self._cancel_drivers()
        await either(self._idle, 10)

    def _cancel_drivers(self) -> None:
        for driver in list(self.drivers.values()):
            if driver.task is not None:
                driver.task.cancel()

    # ------------------------------------------------------------ by hand

    @contextlib.asynccontextmanager
    async def by_hand(self) -> AsyncIterator[None]:
        """Alive, and claiming only when `work_off` says so; for whoever wants nothing to happen by itself."""
        self.me = await self._register()
        self.flusher = Flusher(self.database, self.me)
        flushing = asyncio.create_task(self.flusher.run())
        try:
            yield
        finally:
            self.abandoning = True
            self._cancel_drivers()
            flushing.cancel()
            await asyncio.gather(flushing, return_exceptions=True)
            self.shop.threads.shutdown(wait=False, cancel_futures=True)

    async def work_off(self) -> int:
        """Do all that can be claimed, and say how many runs that were."""
        worked = 0
        async with self.database.connection() as connection:
            while (claim := await leases.claim(Tx(connection), self.database.clock(), self.me, self.capacity)).runs:
                self._take_up(claim.runs)
                await self.idle()
                worked += len(claim.runs)
            if stuck := await leases.leases_of(Tx(connection), self.database.clock(), self.me):
                raise RuntimeError(f"run {stuck[0]['id']} could not be driven; the log says why")
        return worked

    # ------------------------------------------------------------ claiming

    async def _claim_forever(self) -> None:
        connection: Any = None
        unsure = False
        while not self.draining:
            try:
                if connection is None or connection.is_closed():
                    connection = await asyncpg.connect(**connection_options(self.database))
                while not self.draining:
                    if unsure or self._forgot:
                        self._forgot = False
                        await self._take_up_forgotten(Tx(connection))
                        unsure = False
                    if not await self._room():
                        break
                    unsure = True
                    pause = await self._claim_once(Tx(connection))
                    unsure = False
                    if pause:
                        await either(self._wake, pause)
            except TRANSIENT as error:
                log.warning("claim_retry", error=str(error) or type(error).__name__)
                if connection is not None:
                    connection.terminate()
                connection = None
                await asyncio.sleep(0.2)
            except BaseException:
                if connection is not None:
                    connection.terminate()
                raise
        if connection is not None:
            connection.terminate()

    async def _room(self) -> bool:
        """Top up in large bites: a claim costs nearly the same for one run as for many. False: no more claims."""
        bite = max(1, self.capacity // 4)
        while not self.draining and self.drivers and self.capacity - len(self.drivers) < bite:
            self._wake.clear()
            await self._wake.wait()
        return not self.draining

    async def _claim_once(self, tx: Tx) -> float:
        """Claim, and say how long to sleep: not at all while there may be more, else until a notification."""
        self._wake.clear()
        claim = await leases.claim(tx, self.database.clock(), self.me, self.capacity - len(self.drivers))
        self._take_up(claim.runs)
        if claim.dry:
            for _ in range(_HEAD_START):
                await asyncio.sleep(0)
            rested = await leases.rest(tx, claim.dry)
            if rested and len(claim.dry) == claim.lanes:
                return self.settings.poll_seconds
            return 0.0 if claim.runs else _BUSY_RETRY_SECONDS
        if claim.runs:
            return 0.0
        # No lane was free to look at: either there is no work, or another worker is claiming at this moment.
        waiting = await tx.value("work_is_waiting")
        return _BUSY_RETRY_SECONDS if waiting else self.settings.poll_seconds

    async def _take_up_forgotten(self, tx: Tx) -> None:
        """What the database thinks that we hold and we do not: an answer was lost on its way, or a driver failed."""
        known = set(self.drivers)  # before we ask: one of them may be leaving at this moment
        held = await leases.leases_of(tx, self.database.clock(), self.me)
        self._take_up([row for row in held if row["id"] not in known])

    def _take_up(self, rows: list[Row]) -> None:
        for row in rows:
            self.policies.seen(row["tenant_id"], row["policy_version"])
            if row["id"] in self.drivers:
                # Given back and claimed again before its driver was told: it is taken up when that one has left.
                asyncio.get_running_loop().call_later(self.settings.poll_seconds, self._remember)
                continue
            driver = Driver(self, row)
            self.drivers[row["id"]] = driver
            driver.task = asyncio.create_task(driver.drive())
            driver.task.add_done_callback(lambda task, driver=driver: self._let_out(driver, task))  # type: ignore[misc]
        if rows:
            self._idle.clear()

    async def idle(self) -> None:
        """Wait until this worker holds no run."""
        await self._idle.wait()

    def _let_out(self, driver: Driver, task: "asyncio.Task[None]") -> None:
        if self.drivers.get(driver.lease.run_id) is driver:
            del self.drivers[driver.lease.run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("drive_failed", run_id=str(driver.lease.run_id), exc_info=error)
            # Its lease is still ours. Not at once: what fails every time must not keep us busy.
            asyncio.get_running_loop().call_later(self.settings.poll_seconds, self._remember)
        if not self.drivers:
            self._idle.set()
        self._wake.set()

    def _remember(self) -> None:
        self._forgot = True
        self._wake.set()

    # ------------------------------------------------------------ staying alive

    async def _beat_forever(self) -> None:
        """Raises LeaseLost when the database says so, or when we could not ask for so long that it must have."""
        interval = min(self.settings.lease_seconds / 3, self.settings.heartbeat_seconds)
        last = time.monotonic()
        while True:
            await either(self._suspicious, interval)
            self._suspicious.clear()
            try:
                await leases.beat(self.database, self.me)
                last = time.monotonic()
            except Unavailable:
                if time.monotonic() - last > self.settings.lease_seconds:
                    raise LeaseLost("the database was out of reach for longer than the lease") from None

    def suspect(self) -> None:
        """A write was refused: ask at once whether we are still alive."""
        self._suspicious.set()

    async def _tick_forever(self) -> None:
        next_check = 0.0
        while True:
            await asyncio.sleep(_SLOW_STEP_SECONDS / 2)
            metrics.held.set(len(self.drivers))
            for driver in list(self.drivers.values()):
                driver.note_slow_steps(_SLOW_STEP_SECONDS)
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + self.settings.poll_seconds
                await self._check()

    async def _check(self) -> None:
        """The slow poll beneath the notifications: mail, and whether others wait for our slots."""
        with contextlib.suppress(Unavailable):
            if flows := self.shop.tools.flows.all():
                awaited = [flow.plan.awaited for flow in flows]
                await children.wake_awaiting(self.database, awaited, self.me.actor)
            full = len(self.drivers) >= self.capacity
            self.crowded = full and await self.database.value("work_is_waiting")
            if self.drivers:
                await self._nudge_all()
            # A claim that was cut off can be committed after we asked what it gave us.
            if await self.database.value("count_leases", self.me.id) > len(self.drivers):
                self._remember()

    # ------------------------------------------------------------ mail

    def _on_mail(self, payload: str) -> None:
        if self.drivers and payload in ("", str(self.me.id)):
            self.spawn(self._nudge_all())

    async def _nudge_all(self) -> None:
        for run_id in await inbox.runs_with_mail(self.database, self.me):
            if driver := self.drivers.get(run_id):
                driver.nudge()

    def run_errands(self) -> None:
        """Parents and children need not wait for the next sweep."""
        self._errands.set()

    async def _run_errands_forever(self) -> None:
        while True:
            await self._errands.wait()
            self._errands.clear()
            with contextlib.suppress(Unavailable):
                await children.deliver(self.database, self.plans)
                await sessions.start_waiting(self.database, self.plans)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)

    async def plan_of(self, row: Row) -> Plan:
        tenant, name, version = row["tenant_id"], row["workflow"], row["workflow_version"]
        return self.plans.known(tenant, name, version) or await self.plans.get(tenant, name, version)
