"""The heartbeat: renews the lease of a worker from its own thread, and stops the worker before the lease ends.

A tool that blocks the event loop delays neither. The thread has its own event loop and database connection, with
time-outs far below the lease. If no heartbeat is acknowledged for three quarters of a lease, the worker cancels its
tools and starts none. A tool that still acts after nine tenths cannot be stopped otherwise, so the process ends.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from interlock.engine.queueing import leases
from interlock.engine.queueing.leases import DesiredState, WorkerIdentity
from interlock.errors import LeaseLost
from interlock.store.pool import Database, Tx, behind_pooler, connect, connection_options
from interlock.telemetry import log, metrics
from interlock.timeouts import wait_for_event
from interlock.worker.local_lease import Acting, LocalLease
from interlock.worker.pulse import Pulse

# The exit code of a worker process that the watchdog ended: EX_TEMPFAIL of sysexits.h.
ENDED_BY_WATCHDOG = 75
# How long a process that was frozen past its lease has to cancel its tools when it resumes.
_THAW_GRACE_SECONDS = 0.5
# The event loop counts as blocked if it does not answer for a tenth of the lease, and at least for this long.
_LEAST_BLOCK_SECONDS = 1.0
# An event loop that is blocked for this many leases is not expected to recover.
MOST_LEASES_BLOCKED = 10
_STACK_LINES = 12


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks of the heartbeat, called in the worker's event loop."""

    on_orders: Callable[[DesiredState], None]
    on_lost: Callable[[str], None]


class Heartbeat:
    """`end_process` ends the process at once. Pass None if the process does not belong to the worker, as in tests."""

    def __init__(
        self, database: Database, me: WorkerIdentity, lease: LocalLease, listeners: Listeners, *, lease_seconds: float,
        interval: float, end_process: Callable[[], None] | None = None, pulse: Pulse | None = None,
    ) -> None:  # fmt: skip
        self._database, self._me, self._lease, self._listeners = database, me, lease, listeners
        self._lease_seconds, self._interval = lease_seconds, interval
        self._end_process, self._pulse = end_process, pulse
        self._worker_loop = asyncio.get_running_loop()
        self._worker_thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ask: asyncio.Event
        self._lost: asyncio.Event
        self._stopped: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._is_ready = threading.Event()

    # ------------------------------------------------------------ called by the worker

    def start(self) -> None:
        self._thread.start()
        self._is_ready.wait()

    def ask_now(self) -> None:
        """Send a heartbeat now. The answer says whether this worker's lease is valid and which orders it has."""
        self._tell(self._loop, lambda: self._ask.set())

    async def stop(self) -> None:
        """Send no more heartbeats. If a tool still acts in a thread, the watchdog stays until the lease ends."""
        self._tell(self._loop, lambda: self._stopped.set())
        while self._thread.is_alive() and not self._lease.still_acting():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
            if self._pulse is not None:
                self._pulse.own.set(0)  # nothing acts any more, so the supervisor need not watch
        except Exception as error:
            # A worker must not continue without its watchdog.
            log.error("heartbeat_failed", worker=self._me.name, exc_info=error)
            self._lapse(f"the heartbeat failed: {error}")

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ask, self._lost, self._stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_ready.set()
        works = (self._beat_forever(), self._watch_loop_forever(), self._show_life_forever())
        working = [asyncio.create_task(work) for work in works]
        watching = asyncio.create_task(self._watch_lease())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait([*working, watching, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
            if self._lease.still_acting() or watching in done:
                await watching
        finally:
            for task in [*working, watching, stopping]:
                task.cancel()
            await asyncio.gather(*working, watching, stopping, return_exceptions=True)

    def _tell(self, loop: asyncio.AbstractEventLoop | None, what: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if loop is not None:
                loop.call_soon_threadsafe(what)

    # ------------------------------------------------------------ renewing the lease

    async def _beat_forever(self) -> None:
        connection: Any = None
        try:
            while True:
                pause = self._interval
                try:
                    if connection is None or connection.is_closed():
                        connection = await connect(self._options())
                    sent = time.monotonic()
                    orders = await leases.heartbeat(Tx(connection), self._me)
                except LeaseLost as lost:
                    self._lapse(lost.detail)
                    return
                except Exception as error:
                    log.warning("heartbeat_retry", worker=self._me.name, error=str(error) or type(error).__name__)
                    if connection is not None:
                        connection.terminate()
                    connection, pause = None, min(self._lease_seconds / 20, 1.0)
                else:
                    self._lease.renew(sent, self._lease_seconds)
                    if self._pulse is not None:
                        self._pulse.own.set(sent)
                    self._tell(self._worker_loop, lambda orders=orders: self._listeners.on_orders(orders))  # type: ignore[misc]
                await wait_for_event(self._ask, pause)
                self._ask.clear()
        finally:
            if connection is not None:
                connection.terminate()

    def _options(self) -> dict[str, Any]:
        """Return the connection options.

        A heartbeat that takes longer than a sixth of the lease is retried on a new connection.
        """
        patience = self._lease_seconds / 6
        options = connection_options(self._database) | {"timeout": patience, "command_timeout": patience}
        if not behind_pooler(self._database.url):
            limits = dict.fromkeys(("statement_timeout", "lock_timeout"), f"{patience * 1000:.0f}")
            options["server_settings"] = options["server_settings"] | limits | {"application_name": "interlock-beat"}
        return options

    # ------------------------------------------------------------ the watchdog

    async def _watch_lease(self) -> None:
        while not self._lost.is_set() and (left := self._lease.remaining()) > 0:
            await wait_for_event(self._lost, min(left, self._lease_seconds))
        self._lapse("no heartbeat was acknowledged in time")
        deadline = time.monotonic() + (min(self._lease.seconds_to_end(), self._lease_seconds) or _THAW_GRACE_SECONDS)
        while (acting := self._lease.still_acting()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if acting:
            self._end("tools_outlive_lease", acting)

    def _lapse(self, why: str) -> None:
        if self._loop is not None and not self._lost.is_set():
            self._lost.set()
        self._lease.lapse()
        self._tell(self._worker_loop, lambda: self._listeners.on_lost(why))

    def _end(self, event: str, acting: list[Acting]) -> None:
        log.error(
            event, worker=self._me.name, acting=[str(call) for call in acting], ends=self._end_process is not None
        )
        if self._end_process is not None:
            self._end_process()

    # ------------------------------------------------------------ the worker's event loop

    async def _watch_loop_forever(self) -> None:
        """Name the step that blocks the event loop.

        The lease is still renewed while the loop is blocked, but not for ever.
        """
        patience = silence_to_note(self._lease_seconds)
        while True:
            answered, since = asyncio.Event(), time.monotonic()
            self._tell(self._worker_loop, lambda answered=answered: self._tell(self._loop, answered.set))  # type: ignore[misc]
            await wait_for_event(answered, patience)
            if not answered.is_set():
                self._name_blocking_step(time.monotonic() - since)
                await wait_for_event(answered, self._lease_seconds * MOST_LEASES_BLOCKED - patience)
                if not answered.is_set():
                    self._end("event_loop_stays_blocked", self._lease.still_acting())
                    await answered.wait()
            await asyncio.sleep(patience / 4)

    async def _show_life_forever(self) -> None:
        """Show the supervisor that this process runs Python, and name the call that prevented it."""
        while True:
            began = time.monotonic()
            if self._pulse is not None:
                self._pulse.alive.set(began)
            await asyncio.sleep(pause_between_signs(self._lease_seconds))
            if (silent := time.monotonic() - began) > silence_to_note(self._lease_seconds):
                self._name_holder(silent, began)

    def _name_holder(self, seconds: float, since: float) -> None:
        """Log which call held the interpreter. If the event loop's thread is still in a call, name that call."""
        call = calling_step(sys._current_frames().get(self._worker_thread))
        names = [f"{call.tool.name} (run {call.context.run_id}, step {call.context.step})"] if call else []
        metrics.loop_blocked.inc()
        log.warning(
            "step_holds_interpreter", worker=self._me.name, seconds=round(seconds, 1),
            calls=names or [str(call) for call in self._lease.acted_since(since)],
            hint="One of these calls kept every thread of the worker from running, or the machine did. Do such work in "
            "a process of its own.",
        )  # fmt: skip

    def _name_blocking_step(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._worker_thread)
        call = calling_step(frame)
        stack = traceback.format_stack(frame)[-_STACK_LINES:] if frame is not None else []
        metrics.loop_blocked.inc()
        log.warning(
            "step_blocks_event_loop", worker=self._me.name, seconds=round(seconds, 1),
            run_id=str(call.context.run_id) if call else None, step=call.context.step if call else None,
            tool=call.tool.name if call else None, stack="".join(stack),
            hint="An async tool must not block. Make it a plain function, which runs in a thread, or await.",
        )  # fmt: skip


def silence_to_note(lease_seconds: float) -> float:
    """Return how long a heartbeat thread may be silent before this is logged.

    After that time the supervisor sends heartbeats for it.
    """
    return max(lease_seconds / 10, _LEAST_BLOCK_SECONDS)


def pause_between_signs(lease_seconds: float) -> float:
    return silence_to_note(lease_seconds) / 4


def calling_step(frame: FrameType | None) -> Any:
    """Return the call whose tool runs in this frame's thread, if the executor called it."""
    from interlock.worker.executor import invoke

    while frame is not None:
        if frame.f_code is invoke.__code__:
            return frame.f_locals.get("call")
        frame = frame.f_back
    return None


def end_process(*, with_group: bool) -> None:
    """End this process at once without clean-up.

    If it leads a process group, also end the processes its tools started.
    """
    if with_group and os.getpgrp() == os.getpid():
        end_group(os.getpid())
    sys.stderr.flush()
    os._exit(ENDED_BY_WATCHDOG)


def end_group(group: int) -> None:
    """Kill all other processes of a process group: those that a worker's tools started and left running."""
    if not Path("/proc/self/stat").exists():
        return
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The fields after the name, which may contain any character: state, parent, group.
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group and int(stat.parent.name) != os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
