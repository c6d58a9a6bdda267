"""The worker: holds runs and gives each a driver, stays alive with one heartbeat for all, and does what it is told."""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import UUID

from interlock.definition.plan import Plan
from interlock.engine import children, inbox, leases, sessions, workers
from interlock.engine.keyfiles import Salts
from interlock.engine.leases import Orders
from interlock.engine.policies import Policies
from interlock.engine.secrets import Secrets
from interlock.engine.workers import DEFAULT_LABEL, SWEEP
from interlock.engine.workflows import Plans
from interlock.errors import LeaseLost, Problem, Unavailable
from interlock.lifecycle import WORKER, WorkerEvent, WorkerState
from interlock.settings import Settings
from interlock.store.notify import INBOX, POLICY, READY, Listener
from interlock.store.notify import WORKER as ORDERS
from interlock.store.pool import FOREVER, TRANSIENT, Database, Row, Tx
from interlock.telemetry import log, metrics
from interlock.tools import Registry, registry
from interlock.waiting import either
from interlock.worker.call import Workshop
from interlock.worker.claim import Claimer
from interlock.worker.drive import Driver
from interlock.worker.flush import Flusher
from interlock.worker.gate import Gate
from interlock.worker.held import HeldRun
from interlock.worker.memory import MemoryLimit

_SLOW_STEP_SECONDS = 0.3


class Worker:
    """`adopt`: the worker that a supervisor started this process for. Its life is the life of the process."""

    def __init__(
        self, database: Database, settings: Settings, *, tools: Registry = registry, capacity: int | None = None,
        labels: tuple[str, ...] = (DEFAULT_LABEL,), tenants: tuple[UUID, ...] | None = None, adopt: UUID | None = None,
    ) -> None:  # fmt: skip
        self.database = database
        self.settings = settings
        self.capacity = capacity or settings.concurrency
        self.labels, self.tenants = labels, tenants
        self.adopts = adopt
        self.orders = Orders(WorkerState.RUNNING)
        self._parent = os.getppid()
        self._memory = MemoryLimit(self)
        self._label_lanes: set[tuple[UUID, str]] = set()
        self.plans = Plans(database, tools)
        self.policies = Policies(database, tools)
        self.gate = Gate(database, self.policies)
        threads = ThreadPoolExecutor(self.capacity, "step")
        self.shop = Workshop(tools, threads, settings.max_output_bytes, Salts(settings), Secrets(database))
        self.drivers: dict[UUID, Driver] = {}
        self.draining = False
        self.abandoning = False
        # Whether it is registered and can write. A run that comes by the seat between two lives is for neither.
        self.is_alive = False
        self.crowded = False
        self._alone = False
        self.on_trial: HeldRun | None = None
        self.me = leases.NOBODY
        self.flusher: Flusher
        self.claimer = Claimer(self)
        self._idle = asyncio.Event()
        self._idle.set()
        self._suspicious = asyncio.Event()
        self._errands = asyncio.Event()
        self._listener: Listener | None = None
        self._side_tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ life

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop. A worker that was declared lost begins again under a new id, unless it was told to end or
        has a supervisor, which starts another process.
        """
        self._listener = Listener(
            self.database,
            {
                READY: lambda _: self.claimer.look(), INBOX: self._on_mail, POLICY: self.policies.forget,
                ORDERS: self._on_orders, self.claimer.channel: self.claimer.on_seated,
            },
        )  # fmt: skip
        await self._listener.start()
        try:
            while not stop.is_set():
                try:
                    goes_on = await self._live(stop)
                except Exception as error:
                    log.error("worker_failed", worker=self.me.name, exc_info=error)
                    await self._begin_again(error)
                    goes_on = True
                if self.adopts is not None or not goes_on:
                    break
        finally:
            await self._listener.stop()
            self.shop.threads.shutdown(wait=False, cancel_futures=True)

    async def _live(self, stop: asyncio.Event) -> bool:
        """One life as one worker. False: it was told to end."""
        self.me = await self._register()
        ordered_to_end = False
        self.flusher = Flusher(self.database, self.me, self.claimer.seat_after, self.claimer.forget_seat)
        self.is_alive = True
        self._errands.set()  # a life before this one may have ended while it ran them
        gc.freeze()
        tasks = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in {
                "flush": self.flusher.run(),
                "claim": self.claimer.run(),
                "beat": self._beat_forever(),
                "tick": self._tick_forever(stop),
                "errands": self._run_errands_forever(),
            }.items()
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                await self._drain(tasks[1])
                await workers.end(self.database, self.me.id, WorkerEvent.COMPLETE, f"worker:{self.me.id}", "drained")
                log.info("worker_drained", worker=self.me.name)
            for task in done - {stopping}:
                task.result()
        except LeaseLost as lost:
            ordered_to_end = await self._was_ordered_to_end()
            log.warning("worker_lost", worker=self.me.name, detail=lost.detail, ordered=ordered_to_end)
        finally:
            self.is_alive = False
            self.abandoning = True
            self._cancel_drivers()
            for task in [*tasks, stopping, *self._side_tasks]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await either(self._idle, 10)
            self.drivers.clear()
            self.abandoning = False
        return not ordered_to_end

    async def _was_ordered_to_end(self) -> bool:
        with contextlib.suppress(Unavailable):
            row = await self.database.row("orders_of", self.me.id, patience=2)
            return row is not None and row["status"] in WORKER.terminal and row["stopped_by"] != SWEEP
        return False

    async def _begin_again(self, error: Exception) -> None:
        """Something failed that should not. This worker ends and its runs go to others; the process goes on under a new
        id."""
        with contextlib.suppress(Problem):
            await leases.move_worker(self.database, self.me.id, WorkerEvent.FAIL, str(error)[:500])
        if self.adopts is not None:
            raise error  # the process ends with it, and its supervisor knows what to do
        await asyncio.sleep(self.settings.poll_seconds)

    async def _register(self) -> leases.Me:
        while True:
            try:
                if self.adopts is not None:
                    return await self._adopt(self.adopts)
                me = await leases.register(
                    self.database, capacity=self.capacity, lease_seconds=self.settings.lease_seconds,
                    labels=self.labels, tenants=self.tenants,
                )  # fmt: skip
                await leases.move_worker(self.database, me.id, WorkerEvent.START)
                self.orders = Orders(WorkerState.RUNNING)
                return me
            except (Unavailable, LeaseLost) as error:
                if self.adopts is not None and isinstance(error, LeaseLost):
                    raise
                log.warning("register_retry", detail=error.detail)

    async def _adopt(self, worker_id: UUID) -> leases.Me:
        me, row = await leases.adopt(self.database, worker_id)
        if row["status"] == WORKER.initial:
            row = await leases.move_worker(self.database, me.id, WorkerEvent.START)
        self.capacity, self.labels = row["capacity"], tuple(row["labels"])
        self.tenants = tuple(row["tenants"]) if row["tenants"] is not None else None
        self.orders = Orders(WorkerState(row["status"]), row["job_id"])
        return me

    async def _drain(self, claiming: "asyncio.Task[None]") -> None:
        """Steps that are under way may finish; each run is given back at its next step."""
        self.draining = True
        self.claimer.stir()
        # A claim that is under way is let through: its runs are ours, and have to be given back too.
        await asyncio.wait([claiming], timeout=5)
        claiming.cancel()
        with contextlib.suppress(*TRANSIENT):
            await self.claimer.leave()
        for driver in self.drivers.values():
            driver.run.wake.set()
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
        """Alive, and claiming only when `work_off` says so; for whoever wants nothing to happen by itself.

        There is no other worker then, so it does what steps ask of workers with other labels too.
        """
        self._alone = True
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
                self.take_up(claim.runs)
                await self.idle()
                worked += len(claim.runs)
            if stuck := await leases.leases_of(Tx(connection), self.database.clock(), self.me):
                raise RuntimeError(f"run {stuck[0]['id']} could not be driven; the log says why")
        return worked

    # ------------------------------------------------------------ the runs that it holds

    def take_up(self, rows: list[Row]) -> None:
        for row in rows:
            self.policies.seen(row["tenant_id"], row["policy_version"])
            if row["id"] in self.drivers:
                # Given back and claimed again before its driver heard that it was given back. It is taken up later,
                # when that driver has left.
                asyncio.get_running_loop().call_later(self.settings.poll_seconds, self.claimer.remember)
                continue
            self.claimer.took(row["id"])
            driver = Driver(self, row)
            self.drivers[row["id"]] = driver
            driver.task = asyncio.create_task(driver.drive())
            driver.task.add_done_callback(partial(self._let_out, driver))
        if rows:
            self._idle.clear()

    async def idle(self) -> None:
        """Wait until this worker holds no run."""
        await self._idle.wait()

    def _let_out(self, driver: Driver, task: "asyncio.Task[None]") -> None:
        if self.drivers.get(driver.run.lease.run_id) is driver:
            del self.drivers[driver.run.lease.run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("drive_failed", run_id=str(driver.run.lease.run_id), exc_info=error)
            # Its lease is still ours, so it is taken up again; but not at once, in case it fails every time.
            asyncio.get_running_loop().call_later(self.settings.poll_seconds, self.claimer.remember)
        if not self.drivers:
            self._idle.set()
        self.claimer.stir()

    # ------------------------------------------------------------ staying alive

    async def _beat_forever(self) -> None:
        """Raises LeaseLost when the database says so, or when we could not ask for so long that it must have."""
        interval = min(self.settings.lease_seconds / 3, self.settings.heartbeat_seconds)
        last = time.monotonic()
        while True:
            await either(self._suspicious, interval)
            self._suspicious.clear()
            try:
                self._obey(await leases.beat(self.database, self.me))
                last = time.monotonic()
            except Unavailable:
                if time.monotonic() - last > self.settings.lease_seconds:
                    raise LeaseLost("the database was out of reach for longer than the lease") from None

    def suspect(self) -> None:
        """A write was refused: ask at once whether we are still alive."""
        self._suspicious.set()

    # ------------------------------------------------------------ orders

    def _on_orders(self, payload: str) -> None:
        """The answer to a heartbeat is what the database wants of us."""
        if self.me is not leases.NOBODY and payload in ("", str(self.me.id)):
            self._suspicious.set()

    def _obey(self, orders: Orders) -> None:
        if orders == self.orders:
            return
        log.info("worker_orders", worker=self.me.name, status=orders.status, job_id=str(orders.job_id or "") or None)
        self.orders = orders
        self.claimer.forget_seat()  # whoever gave the order took it
        self.claimer.look()
        for driver in self.drivers.values():
            driver.run.wake.set()

    def gives_back(self, run: HeldRun) -> bool:
        """Steps that are under way may finish, and no other is begun: the run is for somebody else."""
        if self.draining or self.orders.status != WorkerState.RUNNING:
            return True
        return self.orders.job_id is not None and run.row["job_id"] != self.orders.job_id

    @property
    def hears(self) -> bool:
        """Notifications reach it."""
        return self._listener is not None and self._listener.listening.is_set()

    def pools(self) -> tuple[str, ...]:
        """What it claims from."""
        return (str(self.orders.job_id),) if self.orders.job_id is not None else self.labels

    def serves(self, label: str) -> bool:
        return self._alone or label in self.labels

    async def lane_for(self, tenant_id: UUID, label: str) -> UUID:
        lane = leases.label_lane(tenant_id, label)
        if (tenant_id, label) not in self._label_lanes:
            await self.database.fetch("add_label_lane", lane, tenant_id, label, patience=FOREVER)
            self._label_lanes.add((tenant_id, label))
        return lane

    # ------------------------------------------------------------ the slow poll

    async def _tick_forever(self, stop: asyncio.Event) -> None:
        next_check = 0.0
        while True:
            await asyncio.sleep(_SLOW_STEP_SECONDS / 2)
            metrics.held.set(len(self.drivers))
            for driver in list(self.drivers.values()):
                driver.note_slow_steps(_SLOW_STEP_SECONDS)
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + self.settings.poll_seconds
                await self._check()
                if self.adopts is not None and os.getppid() != self._parent:
                    log.warning("supervisor_gone", worker=self.me.name)
                    stop.set()

    async def _check(self) -> None:
        """The slow poll beneath the notifications: mail, orders, and whether others wait for our slots."""
        with contextlib.suppress(Unavailable):
            pools = list(self.pools())
            takes_more = self.orders.status == WorkerState.RUNNING and not self.draining
            if takes_more and (room := self.claimer.room) > 0 and (flows := self.shop.tools.flows.all()):
                awaited = [flow.plan.awaited for flow in flows]
                await children.wake_awaiting(self.database, awaited, self.me.actor, pools, self.tenants, most=room)
            self.crowded = self.claimer.is_full and await self.database.value("work_is_waiting_in", pools, self.tenants)
            if self.drivers:
                await self._nudge_all()
            await self._memory.mind()
            changes = self.claimer.changes
            now = await self.database.row("orders_of", self.me.id)
            if now is None or now["status"] in WORKER.terminal:
                self._suspicious.set()
                return
            self._obey(Orders(WorkerState(now["status"]), now["job_id"]))
            # A claim that was cut off can be committed after we asked what it gave us.
            if now["leases"] > len(self.drivers):
                self.claimer.remember()
            else:
                self.claimer.seat_is(now["seated"], changes)

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
