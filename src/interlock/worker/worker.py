"""The worker: gives each leased run a driver, renews all leases with one heartbeat, and obeys orders."""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from interlock.definition.plan import Plan
from interlock.engine import sessions
from interlock.engine.access.key_store import Salts
from interlock.engine.access.secrets import Secrets
from interlock.engine.policies import Policies
from interlock.engine.queueing import leases, workers
from interlock.engine.queueing.leases import DesiredState
from interlock.engine.queueing.workers import DEFAULT_LABEL, SWEEP
from interlock.engine.runs import flow_deployments, run_signals
from interlock.engine.workflows import Plans
from interlock.errors import InterlockError, LeaseLost, Unavailable
from interlock.ids import QueueId, RunId, TenantId, WorkerId
from interlock.lifecycle import WORKER, WorkerEvent, WorkerState
from interlock.settings import Settings
from interlock.store import sql
from interlock.store.notify import POLICY, READY, RUN_COMMAND, Listener
from interlock.store.notify import WORKER as ORDERS
from interlock.store.pool import NO_TIMEOUT, TRANSIENT, Database, Tx
from interlock.store.records import ClaimedRun
from interlock.telemetry import log, metrics
from interlock.timeouts import wait_for_event
from interlock.tools import Registry, registry
from interlock.worker.batch_committer import Flusher
from interlock.worker.claimer import Claimer
from interlock.worker.crash_quarantine import Trials
from interlock.worker.gate import PolicyGate
from interlock.worker.heartbeat import Heartbeat, Listeners
from interlock.worker.leased_run import LeasedRun
from interlock.worker.local_lease import LocalLease
from interlock.worker.memory import MemoryLimit
from interlock.worker.pulse import Pulse
from interlock.worker.run_driver import Driver
from interlock.worker.tool_call import ExecutionResources

_SLOW_STEP_SECONDS = 0.3


class Worker:
    """Claims runs and drives them.

    `adopt`: the worker for which a supervisor started this process. It lives as long as the process.
    `end_process` ends this process at once, for a tool that cannot otherwise be stopped before the lease ends.
    `after_loss`: it replaces a lost worker, see `SlowStart`.
    `look_back` finds out whether the database was restored to an earlier moment, see `engine/proof/restore.py`. It is
    called before the first claim on each connection.
    """

    def __init__(
        self, database: Database, settings: Settings, *, tools: Registry = registry, capacity: int | None = None,
        labels: tuple[str, ...] = (DEFAULT_LABEL,), tenants: tuple[TenantId, ...] | None = None,
        adopt: WorkerId | None = None, end_process: Callable[[], None] | None = None, after_loss: bool = False,
        look_back: Callable[[], Awaitable[None]] | None = None, pulse: Pulse | None = None,
    ) -> None:  # fmt: skip
        self.database = database
        self.look_back, self._pulse = look_back, pulse
        self.settings = settings
        self.capacity = capacity or settings.concurrency
        self.labels, self.tenants = labels, tenants
        self.adopts = adopt
        self.orders = DesiredState(WorkerState.RUNNING)
        self._parent = os.getppid()
        self._end_process = end_process
        self._after_loss = after_loss
        self._heartbeat: Heartbeat | None = None
        self._lost: asyncio.Future[None]
        self._memory = MemoryLimit(self)
        self._label_queues: set[QueueId] = set()
        self.plans = Plans(database, tools)
        self.policies = Policies(database, tools)
        self.gate = PolicyGate(database, self.policies)
        threads = ThreadPoolExecutor(self.capacity, "step")
        self.shop = ExecutionResources(tools, threads, settings.max_output_bytes, Salts(settings), Secrets(database))
        self.drivers: dict[RunId, Driver] = {}
        self.draining = False
        self.abandoning = False
        # Whether it is registered and can write. A run dispatched to its slot between two registrations belongs to
        # neither.
        self.is_alive = False
        self.crowded = False
        self._alone = False
        # A receipt of this worker is in doubt, and its call continued in a thread.
        self.has_left_behind = False
        self.trials = Trials()
        self.me = leases.UNREGISTERED
        self.flusher: Flusher
        self.claimer = Claimer(self)
        self._idle = asyncio.Event()
        self._idle.set()
        self._signals = asyncio.Event()
        self._listener: Listener | None = None
        self._side_tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ life cycle

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set.

        A worker that was declared lost registers again under a new id, unless it was ordered to end or has a
        supervisor, which starts another process.
        """
        self._listener = Listener(
            self.database,
            {
                READY: lambda _: self.claimer.look(), RUN_COMMAND: self._on_command, POLICY: self.policies.forget,
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
        """Run one registration of the worker. Return False if it was ordered to end."""
        registering, self._lost = time.monotonic(), asyncio.get_running_loop().create_future()
        try:
            self.me = await self._register()
        except LeaseLost as late:
            # Its place was given up before this process arrived: it started slowly, or was ordered to end.
            log.warning("worker_came_late", worker_id=str(self.adopts), detail=late.detail)
            return False
        self.shop = replace(self.shop, lease=LocalLease(second=self._pulse.second.get if self._pulse else None))
        self.shop.lease.renew(registering, self.settings.lease_seconds)
        self._heartbeat = heartbeat = self._make_heartbeat()
        heartbeat.start()
        if self._after_loss:
            self.claimer.slow_start.begin()
            self._after_loss = False
        ordered_to_end = False
        self.flusher = Flusher(self.database, self.me, self.claimer.seat_after, self.claimer.forget_seat)
        self.is_alive = True
        self._signals.set()  # an earlier registration may have ended while it ran them
        gc.freeze()
        tasks = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in {
                "flush": self.flusher.run(),
                "claim": self.claimer.run(),
                "lost": self._until_lost(),
                "tick": self._tick_forever(stop),
                "signals": self._deliver_signals_forever(),
            }.items()
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                await self._drain(tasks[1])
                if self.cannot_act:
                    await workers.end(
                        self.database, self.me.id, WorkerEvent.COMPLETE, f"worker:{self.me.id}", "drained"
                    )
                else:
                    await leases.move_worker(self.database, self.me.id, WorkerEvent.COMPLETE, "drained")
                log.info("worker_drained", worker=self.me.name)
            for task in done - {stopping}:
                task.result()
        except LeaseLost as lost:
            ordered_to_end = await self._was_ordered_to_end()
            self._after_loss = True
            log.warning("worker_lost", worker=self.me.name, detail=lost.detail, ordered=ordered_to_end)
        finally:
            self.is_alive = False
            self.abandoning = True
            self._cancel_drivers()
            for task in [*tasks, stopping, *self._side_tasks]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await wait_for_event(self._idle, 10)
            await heartbeat.stop()
            if self.cannot_act:
                await self._give_back_at_once()
            self.drivers.clear()
            self.abandoning = False
        return not ordered_to_end

    async def _give_back_at_once(self) -> None:
        """If this worker was ordered to end, release its runs now instead of when its lease ends."""
        with contextlib.suppress(InterlockError):
            if await workers.note_cannot_act(self.database, self.me.id):
                await leases.take_back(self.database)

    @property
    def cannot_act(self) -> bool:
        """Return True if nothing that it started still acts, including in threads."""
        return not self.drivers and not self.shop.lease.still_acting()

    def _make_heartbeat(self) -> Heartbeat:
        lease_seconds = self.settings.lease_seconds
        return Heartbeat(
            self.database,
            self.me,
            self.shop.lease,
            Listeners(self._apply_desired_state, partial(self._on_lost, self._lost)),
            lease_seconds=lease_seconds,
            interval=min(lease_seconds / 4, self.settings.heartbeat_seconds),
            end_process=self._end_process,
            pulse=self._pulse,
        )

    async def _was_ordered_to_end(self) -> bool:
        with contextlib.suppress(Unavailable):
            row = await self.database.row("orders_of", self.me.id, patience=2)
            return row is not None and row["status"] in WORKER.terminal and row["stopped_by"] != SWEEP
        return False

    async def _begin_again(self, error: Exception) -> None:
        """Fail this worker after an unexpected error. Its runs go to others; the process continues under a new id."""
        with contextlib.suppress(InterlockError):
            await leases.move_worker(self.database, self.me.id, WorkerEvent.FAIL, str(error)[:500])
        if self.adopts is not None:
            raise error  # the process ends, and its supervisor handles that
        await asyncio.sleep(self.settings.poll_seconds)

    async def _register(self) -> leases.WorkerIdentity:
        while True:
            try:
                if self.adopts is not None:
                    return await self._adopt(self.adopts)
                me = await leases.register(
                    self.database, capacity=self.capacity, lease_seconds=self.settings.lease_seconds,
                    labels=self.labels, tenants=self.tenants,
                )  # fmt: skip
                await leases.move_worker(self.database, me.id, WorkerEvent.START)
                self.orders = DesiredState(WorkerState.RUNNING)
                return me
            except (Unavailable, LeaseLost) as error:
                if self.adopts is not None and isinstance(error, LeaseLost):
                    raise
                log.warning("register_retry", detail=error.detail)

    async def _adopt(self, worker_id: WorkerId) -> leases.WorkerIdentity:
        me, row = await leases.adopt(self.database, worker_id)
        if row["status"] == WORKER.initial:
            row = await leases.move_worker(self.database, me.id, WorkerEvent.START)
        self.capacity, self.labels = row["capacity"], tuple(row["labels"])
        self.tenants = tuple(row["tenants"]) if row["tenants"] is not None else None
        self.orders = DesiredState(WorkerState(row["status"]), row["job_id"])
        return me

    async def _drain(self, claiming: "asyncio.Task[None]") -> None:
        """Let running steps finish; each run is released before its next step."""
        self.draining = True
        self.claimer.stir()
        # Let a claim in progress complete: its runs are ours and have to be released too.
        await asyncio.wait([claiming], timeout=5)
        claiming.cancel()
        with contextlib.suppress(*TRANSIENT):
            await self.claimer.leave()
        for driver in self.drivers.values():
            driver.run.wake.set()
        await wait_for_event(self._idle, self.settings.drain_seconds)
        self.abandoning = True
        self._cancel_drivers()
        await wait_for_event(self._idle, 10)

    def _cancel_drivers(self) -> None:
        for driver in list(self.drivers.values()):
            if driver.task is not None:
                driver.task.cancel()

    # ------------------------------------------------------------ manual control

    @contextlib.asynccontextmanager
    async def by_hand(self) -> AsyncIterator[None]:
        """Keep the worker alive, but claim only on `drain_queue`, for callers such as tests that need full control.

        It is the only worker then, so it also runs steps with labels of other workers.
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

    async def drain_queue(self) -> int:
        """Execute all runs that can be claimed, and return their number."""
        worked = 0
        async with self.database.connection() as connection:
            while claimed := await leases.claim(Tx(connection), self.me, self.capacity):
                self.start_driver(claimed)
                await self.idle()
                worked += len(claimed)
            if stuck := await leases.leases_of(Tx(connection), self.me):
                raise RuntimeError(f"run {stuck[0].id} could not be driven; the log says why")
        return worked

    # ------------------------------------------------------------ held runs

    def start_driver(self, rows: list[ClaimedRun]) -> None:
        for row in rows:
            self.policies.seen(row.tenant_id, row.policy_version)
            if row.id in self.drivers:
                # Released and claimed again before its driver learned of the release. Take it up later, when that
                # driver has left.
                asyncio.get_running_loop().call_later(self.settings.poll_seconds, self.claimer.remember)
                continue
            self.claimer.took(row.id)
            driver = Driver(self, row)
            self.drivers[row.id] = driver
            driver.task = asyncio.create_task(driver.drive())
            driver.task.add_done_callback(partial(self._driver_finished, driver))
        if rows:
            self._idle.clear()

    async def idle(self) -> None:
        """Wait until this worker holds no run."""
        await self._idle.wait()

    def _driver_finished(self, driver: Driver, task: "asyncio.Task[None]") -> None:
        if self.drivers.get(driver.run.lease.run_id) is driver:
            del self.drivers[driver.run.lease.run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("drive_failed", run_id=str(driver.run.lease.run_id), exc_info=error)
            # Its lease is still ours, so take it up again; but not at once, in case it fails every time.
            asyncio.get_running_loop().call_later(self.settings.poll_seconds, self.claimer.remember)
        if not self.drivers:
            self._idle.set()
        self.claimer.stir()

    # ------------------------------------------------------------ staying alive

    async def _until_lost(self) -> None:
        """Raise LeaseLost when the heartbeat reports it: see `Heartbeat`."""
        await self._lost

    def _on_lost(self, lost: "asyncio.Future[None]", why: str) -> None:
        """Cancel the tools at once, before anything else that waits in the event loop."""
        if lost.done() or lost is not self._lost:
            return  # this was an earlier registration
        lost.set_exception(LeaseLost(why))
        self.abandoning = True
        self._cancel_drivers()

    def recheck_lease(self) -> None:
        """Send a heartbeat now, because a write was rejected and the lease may be lost."""
        if self._heartbeat is not None:
            self._heartbeat.ask_now()

    # ------------------------------------------------------------ orders

    def _on_orders(self, payload: str) -> None:
        """Send a heartbeat now: its answer contains the orders."""
        if self.me is not leases.UNREGISTERED and payload in ("", str(self.me.id)):
            self.recheck_lease()

    def _apply_desired_state(self, orders: DesiredState) -> None:
        if orders == self.orders:
            return
        log.info("worker_orders", worker=self.me.name, status=orders.status, job_id=str(orders.job_id or "") or None)
        self.orders = orders
        self.claimer.forget_seat()  # the order took the slot
        self.claimer.look()
        for driver in self.drivers.values():
            driver.run.wake.set()

    def should_release(self, run: LeasedRun) -> bool:
        """Return True if this worker must release the run: running steps may finish, but none may start."""
        if self.draining or not self.may_begin:
            return True
        return self.orders.job_id is not None and run.row.job_id != self.orders.job_id

    @property
    def may_begin(self) -> bool:
        """Return True if the worker may claim runs and start steps.

        It may not in a database that was restored to an earlier moment, until `interlock db restored` was run: a step
        whose record was lost would be repeated.
        """
        return self.orders.status == WorkerState.RUNNING and self.database.went_back is None

    @property
    def has_notifications(self) -> bool:
        """Return True if notifications arrive."""
        return self._listener is not None and self._listener.listening.is_set()

    def pools(self) -> tuple[str, ...]:
        """Return the pools from which it claims."""
        return (str(self.orders.job_id),) if self.orders.job_id is not None else self.labels

    def serves(self, label: str) -> bool:
        return self._alone or label in self.labels

    async def queue_for(self, tenant_id: TenantId, label: str) -> QueueId:
        queue_id = leases.label_queue(tenant_id, label)
        if queue_id not in self._label_queues:
            await self.database.fetch("add_label_queue", queue_id, tenant_id, label, patience=NO_TIMEOUT)
            self._label_queues.add(queue_id)
        return queue_id

    # ------------------------------------------------------------ the slow poll

    async def _tick_forever(self, stop: asyncio.Event) -> None:
        next_check = 0.0
        while True:
            await asyncio.sleep(_SLOW_STEP_SECONDS / 2)
            metrics.held.set(len(self.drivers))
            if self.claimer.slow_start.is_on:
                self.claimer.stir()  # there may be more capacity now
            for driver in list(self.drivers.values()):
                driver.note_slow_steps(_SLOW_STEP_SECONDS)
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + self.settings.poll_seconds
                await self._check()
                if self.adopts is not None and os.getppid() != self._parent:
                    log.warning("supervisor_gone", worker=self.me.name)
                    stop.set()

    async def _check(self) -> None:
        """Poll slowly, in case notifications are lost: commands, orders, and runs that wait for our places."""
        with contextlib.suppress(Unavailable):
            pools = list(self.pools())
            takes_more = self.may_begin and not self.draining
            if takes_more and (room := self.claimer.room) > 0 and (flows := self.shop.tools.flows.all()):
                awaited = [flow.plan.awaited for flow in flows]
                await flow_deployments.resume_awaiting(
                    self.database, awaited, self.me.actor, pools, self.tenants, most=room
                )
            self.crowded = self.claimer.is_full and await self.database.value("work_is_waiting", pools, self.tenants)
            if self.drivers:
                await self._nudge_all()
            if self.database.went_back is not None:
                for driver in self.drivers.values():
                    driver.run.wake.set()  # it releases its run
            await self._memory.mind()
            if self.has_left_behind:
                await self._note_ended_calls()
            changes = self.claimer.changes
            now = await self.database.row("orders_of", self.me.id)
            if now is None or now["status"] in WORKER.terminal:
                self.recheck_lease()
                return
            self._apply_desired_state(DesiredState(WorkerState(now["status"]), now["job_id"]))
            # An interrupted claim can be committed after we queried which runs it gave us.
            if now["leases"] > len(self.drivers):
                self.claimer.remember()
            else:
                self.claimer.seat_is(now["has_dispatch_slot"], changes)

    async def _note_ended_calls(self) -> None:
        """Report calls that were left behind in a thread and have ended, so that people may record their outcome."""
        acting = self.shop.lease.still_acting()
        await self.database.fetch(
            "note_ended_calls", self.me.id, [call.run_id for call in acting], [call.step for call in acting]
        )

    # ------------------------------------------------------------ commands

    def _on_command(self, payload: str) -> None:
        if self.drivers and payload in ("", str(self.me.id)):
            self.spawn(self._nudge_all())

    async def _nudge_all(self) -> None:
        for run_id in await sql.runs_with_commands(self.database, worker_id=self.me.id):
            if driver := self.drivers.get(run_id):
                driver.nudge()

    def deliver_signals(self) -> None:
        """Deliver to parents and children now instead of in the next sweep."""
        self._signals.set()

    async def _deliver_signals_forever(self) -> None:
        while True:
            await self._signals.wait()
            self._signals.clear()
            with contextlib.suppress(Unavailable):
                await run_signals.deliver(self.database, self.plans)
                await sessions.start_waiting(self.database, self.plans)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)

    async def plan_of(self, run: ClaimedRun) -> Plan:
        tenant, name, version = run.tenant_id, run.workflow, run.workflow_version
        return self.plans.known(tenant, name, version) or await self.plans.get(tenant, name, version)
