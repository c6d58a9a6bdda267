"""The supervisor: keeps the configured number of worker processes alive on its machine, and ends workers on order."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from interlock.engine.queueing import leases, workers
from interlock.engine.queueing.workers import DEFAULT_LABEL, SWEEP, Terms
from interlock.errors import InterlockError, Unavailable
from interlock.ids import SupervisorId, TenantId, WorkerId, uuid7
from interlock.lifecycle import WORKER, WorkerState
from interlock.settings import Settings, logs_dir, private_directory, worker_log
from interlock.store.notify import WORKER as ORDERS
from interlock.store.notify import Listener
from interlock.store.pool import NO_TIMEOUT, Database, Row
from interlock.telemetry import forget_process, log, metrics
from interlock.worker.heartbeat import MOST_LEASES_BLOCKED, pause_between_signs, silence_to_note
from interlock.worker.local_lease import ENDS_AFTER
from interlock.worker.pulse import Pulse

_ROUND_SECONDS = 0.5
# How long a process may take to end after SIGTERM before it is killed.
_GRACE_SECONDS = 2.0
_STARTUP_SECONDS = 60.0
# Each restart waits longer, up to this limit. A process that lived for a while resets the delay.
_FIRST_DELAY = 0.2
_STARVED_DELAY = 2.0
_LONGEST_DELAY = 10.0
_LIVED_SECONDS = 10.0
# After this many processes that ended before they had work, the program or its environment is at fault. More restarts
# would not help.
MOST_CRASHES = 6
_MOST_LOG_BYTES = 32_000_000
_KEEP_LOGS = 100
# A worker writes the stacks of its threads to its log when it receives this signal.
STACKS_SIGNAL = signal.SIGUSR2


def python_as_ours() -> tuple[str, ...]:
    """Return the command for an interpreter with this one's import path.

    Otherwise a file in the working directory with the name of a library would replace the library, in workers only.
    """
    return (sys.executable,) if str(Path.cwd()) in sys.path else (sys.executable, "-P")


@dataclass(slots=True)
class Process:
    running: asyncio.subprocess.Process
    log: Path
    pulse: Pulse
    began: float = field(default_factory=time.monotonic)
    told: float | None = None
    shown: int = 0
    # Whether its silence was logged, and the heartbeat that is being sent for it.
    is_silent: bool = False
    ended_silent: bool = False
    beating: asyncio.Task[None] | None = None

    @property
    def ended(self) -> int | None:
        return self.running.returncode

    @property
    def is_frozen(self) -> bool:
        """Return True if a signal stopped the process, as a debugger does."""
        try:
            stat = Path(f"/proc/{self.running.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def end(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace period. The caller repeats this until the process has ended."""
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            if self.told is None:
                self.told = now
                self.running.terminate()
            elif now - self.told > _GRACE_SECONDS:
                self.running.kill()

    def end_leftovers(self) -> None:
        """Kill the processes that the worker's tools started, once the worker has ended. It led a process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.running.pid, signal.SIGKILL)


@dataclass(slots=True)
class Slot:
    """A place for one worker: its current process and how the previous ones ended.

    `kept`: it is filled again after an order.
    """

    terms: Terms
    kept: bool = True
    worker_id: WorkerId | None = None
    process: Process | None = None
    crashes: int = 0
    # The crashes of processes that had not even started to work.
    idle_crashes: int = 0
    not_before: float = 0.0
    gave_up: str | None = None

    def note_crash(self, lived: float, why: str, *, at_work: bool = False, starved: bool = False) -> None:
        """Count a crash, and delay the next start.

        A step that kills its worker is failed by its run; the place stays open for all other runs. `starved`: the
        process was alive but too slow to say so. Starting another at once would be as slow and cost the others time.
        """
        at_work = at_work or starved
        lasted = lived > _LIVED_SECONDS and not starved
        self.crashes = 0 if lasted else self.crashes + 1
        self.idle_crashes = 0 if lasted or at_work else self.idle_crashes + 1
        first = _STARVED_DELAY if starved else _FIRST_DELAY
        delay = min(first * 2 ** min(max(self.crashes - 1, 0), 10), _LONGEST_DELAY)
        self.not_before = time.monotonic() + delay
        if self.idle_crashes >= MOST_CRASHES:
            self.gave_up = f"crash loop: {self.idle_crashes} processes ended soon after their start, the last {why}"


class Supervisor:
    """Keeps workers alive. `url` is the database URL passed to the processes."""

    def __init__(
        self, database: Database, settings: Settings, url: str, *, desired_workers: int, concurrency: int | None = None,
        labels: tuple[str, ...] = (DEFAULT_LABEL,), tenants: tuple[TenantId, ...] | None = None,
    ) -> None:  # fmt: skip
        self.id = uuid7()
        self.host = socket.gethostname()
        self._database, self._settings, self._url = database, settings, url
        terms = Terms(concurrency or settings.concurrency, labels, tenants)
        self.slots = [Slot(terms) for _ in range(desired_workers)]
        self._desired_workers = desired_workers
        self._had: set[UUID] = set()
        self._look = asyncio.Event()

    @property
    def actor(self) -> str:
        return f"supervisor:{self.host}-{os.getpid()}"

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Then ask the workers to drain, and leave none running."""
        private_directory(logs_dir(self._settings))
        listener = Listener(self._database, {ORDERS: lambda _: self._look.set()})
        await self._register()
        await listener.start()
        watching = asyncio.create_task(self._watch_forever())
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._look.set())
        try:
            while not stop.is_set():
                await self._tend()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ROUND_SECONDS):
                        await self._look.wait()
                self._look.clear()
        finally:
            stopping.cancel()
            await listener.stop()
            await self._drain()
            watching.cancel()

    async def _register(self) -> None:
        db, settings = self._database, self._settings
        await db.fetch(
            "register_supervisor", self.id, self.host, os.getpid(), self._desired_workers, settings.lease_seconds,
            str(logs_dir(settings).resolve()), patience=NO_TIMEOUT,
        )  # fmt: skip

    async def _tend(self) -> None:
        """Run one round. If the database is unavailable, wait for it, as the worker processes do."""
        try:
            rows = await self._look_around()
            for slot in self.slots:
                self._copy_log(slot)
                await self._tend_slot(slot, rows)
            self._take_in(rows)
            self.slots = [slot for slot in self.slots if slot.kept or slot.worker_id is not None]
        except Unavailable as error:
            log.warning("supervisor_waits", detail=error.detail)
        except InterlockError as error:
            log.error("supervisor_failed", exc_info=error)

    async def _look_around(self) -> dict[UUID, Row]:
        ours = [slot.worker_id for slot in self.slots if slot.worker_id is not None]
        alive = [
            slot.worker_id
            for slot in self.slots
            if slot.process is not None
            and slot.process.ended is None
            and time.monotonic() - slot.process.began < _STARTUP_SECONDS
        ]
        why = next((slot.gave_up for slot in self.slots if slot.gave_up), None)
        found = await self._database.fetch("supervise", self.id, alive, ours, why, patience=5)
        return {row["id"]: row for row in found}

    def _take_in(self, rows: dict[UUID, Row]) -> None:
        """Add slots for ordered workers that the database has assigned to this supervisor."""
        for worker_id, row in rows.items():
            # Skip a worker that was ours at the time of the query and has ended since.
            if worker_id not in self._had and row["pid"] is None and WorkerState(row["status"]) in WORKER.open:
                terms = Terms(
                    row["capacity"], tuple(row["labels"]), tuple(row["tenants"]) if row["tenants"] else None,
                    row["workspace_id"],
                )  # fmt: skip
                self.slots.append(Slot(terms, kept=False, worker_id=WorkerId(worker_id)))
                self._had.add(worker_id)
                self._look.set()

    async def _tend_slot(self, slot: Slot, rows: dict[UUID, Row]) -> None:
        if slot.process is not None and slot.process.ended is not None:
            await self._bury(slot, rows)
        elif slot.process is not None:
            row = rows.get(slot.worker_id) if slot.worker_id else None
            over = row is not None and WorkerState(row["status"]) in WORKER.terminal
            silent = row is not None and row["pid"] is None and time.monotonic() - slot.process.began > _STARTUP_SECONDS
            if over or silent:
                slot.process.end()
        elif slot.gave_up is None and time.monotonic() >= slot.not_before:
            await self._fill(slot)

    async def _fill(self, slot: Slot) -> None:
        if slot.worker_id is None:
            await self._make_worker(slot)
        assert slot.worker_id is not None
        path = worker_log(self._settings, slot.worker_id)
        try:
            with _own_log(path) as output:
                after_loss = slot.crashes > 0
                pulse = Pulse.make()
                try:
                    spawned = await self._spawn(slot.worker_id, output, pulse, after_loss=after_loss)
                finally:
                    pulse.close()
                slot.process = Process(spawned, path, pulse)
        except OSError as error:
            await workers.bury(self._database, slot.worker_id, self.actor, f"could not be started: {error}")
            slot.worker_id = None
            slot.note_crash(0.0, f"could not be started: {error}")
            log.error("worker_not_started", reason=str(error))
            return
        log.info("worker_started", worker_id=str(slot.worker_id), pid=slot.process.running.pid)

    async def _make_worker(self, slot: Slot) -> None:
        # The id is chosen before the row is written: after a broken connection it is the same worker.
        worker_id = WorkerId(uuid7())
        self._had.add(worker_id)
        await workers.create(
            self._database, self.actor, slot.terms, worker_id=worker_id, host=self.host,
            name=f"{self.host}-{worker_id.hex[-6:]}", supervisor_id=SupervisorId(self.id),
            lease_seconds=self._settings.lease_seconds,
        )  # fmt: skip
        slot.worker_id = worker_id

    async def _spawn(
        self, worker_id: WorkerId, output: BinaryIO, pulse: Pulse, *, after_loss: bool
    ) -> asyncio.subprocess.Process:
        more = ("--after-loss",) if after_loss else ()
        place = ("--adopt", str(worker_id), "--pulse", str(pulse.number), *more)
        return await asyncio.create_subprocess_exec(
            *python_as_ours(), "-m", "interlock", "worker", *place,
            pass_fds=(pulse.number,),
            env=os.environ | {"INTERLOCK_DATABASE_URL": self._url},
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip

    async def _bury(self, slot: Slot, rows: dict[UUID, Row]) -> None:
        """Release the runs of a process that has ended at once, without waiting for its lease to expire."""
        assert slot.process is not None and slot.worker_id is not None and slot.process.ended is not None
        self._copy_log(slot)
        worker_id, lived, why = slot.worker_id, time.monotonic() - slot.process.began, _described(slot.process)
        slot.process.end_leftovers()
        forget_process(slot.process.running.pid)
        at_work: bool = await self._database.value("holds_runs", worker_id)
        await workers.bury(self._database, worker_id, self.actor, why)
        await leases.take_back(self._database)
        row = await workers.get(self._database, worker_id)
        # The process stayed silent, or the sweep declared it lost, and we had to end it.
        starved = slot.process.ended_silent or (row["stopped_by"] == SWEEP and slot.process.told is not None)
        slot.worker_id, slot.process = None, None
        state = WorkerState(row["status"])
        by_order = state == WorkerState.COMPLETED or (
            state == WorkerState.TERMINATED and row["stopped_by"] not in (SWEEP, self.actor, f"worker:{worker_id}")
        )
        if by_order:
            log.info("worker_ended", worker=row["name"], status=state, reason=row["reason"])
            return
        if not slot.kept:  # an ordered worker crashed: start another
            slot.kept = True
        slot.note_crash(lived, why, at_work=at_work, starved=starved)
        metrics.worker_restarts.inc()
        if slot.gave_up:
            log.error("worker_crash_loop", worker=row["name"], reason=slot.gave_up)
        else:
            wait = round(max(slot.not_before - time.monotonic(), 0), 1)
            log.warning("worker_died", worker=row["name"], reason=why, restart_in=wait)

    # ------------------------------------------------------------ workers that cannot run Python

    async def _watch_forever(self) -> None:
        """Watch the worker processes.

        Nothing here waits for the database: a worker has to be dead before its lease ends.
        """
        lease_seconds = self._settings.lease_seconds
        while True:
            for slot in self.slots:
                process = slot.process
                if process is not None and process.ended is None and process.pulse.own.get():
                    self._watch(slot, process, time.monotonic())
            await asyncio.sleep(pause_between_signs(lease_seconds))

    def _watch(self, slot: Slot, process: Process, now: float) -> None:
        """Handle a worker whose heartbeat thread does not run.

        A tool holds the interpreter, or the process was frozen or starved. Unless it is frozen, send its heartbeats for
        it. Kill it before its lease ends if none is acknowledged.
        """
        pulse, lease_seconds = process.pulse, self._settings.lease_seconds
        silent = now - pulse.alive.get()
        if silent < silence_to_note(lease_seconds):
            process.is_silent = False
            return
        if not process.is_silent:
            process.is_silent = True
            self._tell_of_silence(slot, process, silent)
        ends_at = max(pulse.own.get(), pulse.second.get()) + lease_seconds * ENDS_AFTER
        if now >= ends_at or silent > lease_seconds * MOST_LEASES_BLOCKED:
            process.ended_silent = True
            log.error("worker_stays_silent", worker_id=str(slot.worker_id), seconds=round(silent, 1), ends=True)
            with contextlib.suppress(ProcessLookupError):
                process.running.kill()
        elif not process.is_frozen and (process.beating is None or process.beating.done()):
            process.beating = asyncio.create_task(self._beat_for(slot.worker_id, process))

    def _tell_of_silence(self, slot: Slot, process: Process, silent: float) -> None:
        frozen = process.is_frozen
        log.warning(
            "worker_silent", worker_id=str(slot.worker_id), pid=process.running.pid, seconds=round(silent, 1),
            frozen=frozen, hint="If a tool holds the interpreter, the stacks in the worker's log name it.",
        )  # fmt: skip
        if not frozen:
            with contextlib.suppress(ProcessLookupError):
                process.running.send_signal(STACKS_SIGNAL)

    async def _beat_for(self, worker_id: WorkerId | None, process: Process) -> None:
        assert worker_id is not None
        sent = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.lease_seconds / 6):
                known = await self._database.row("beat", worker_id)
        except (InterlockError, TimeoutError) as error:
            log.warning("heartbeat_retry", worker_id=str(worker_id), error=str(error) or type(error).__name__)
            return
        if known is not None:
            process.pulse.second.set(sent)

    async def _drain(self) -> None:
        """Let each worker finish its current steps and leave. Kill a worker that does not."""
        processes = [slot.process for slot in self.slots if slot.process is not None]
        for process in processes:
            if process.ended is None:
                with contextlib.suppress(ProcessLookupError):
                    process.running.terminate()
        deadline = time.monotonic() + self._settings.drain_seconds + 20
        for process in processes:
            try:
                await asyncio.wait_for(process.running.wait(), max(deadline - time.monotonic(), 0.1))
            except TimeoutError:
                process.running.kill()
                await process.running.wait()
            process.end_leftovers()
        for slot in self.slots:
            self._copy_log(slot)
        with contextlib.suppress(InterlockError):
            for slot in self.slots:
                if slot.worker_id is not None and slot.process is not None:
                    await workers.bury(self._database, slot.worker_id, self.actor, _described(slot.process))
            await leases.take_back(self._database)
            await self._database.fetch("stop_supervisor", self.id, "stopped", patience=2)
        self._tidy_logs()

    # ------------------------------------------------------------ logs

    def _copy_log(self, slot: Slot) -> None:
        """Copy a worker's log to our output.

        Each worker writes to its own file, so that the log outlives the supervisor.
        """
        process = slot.process
        if process is None:
            return
        with contextlib.suppress(OSError), process.log.open("rb") as lines:
            lines.seek(process.shown)
            shutil.copyfileobj(lines, sys.stderr.buffer)
            sys.stderr.buffer.flush()
            process.shown = lines.tell()
        if process.shown > _MOST_LOG_BYTES:
            with contextlib.suppress(OSError):
                os.truncate(process.log, 0)  # the worker opened it for appending: its next line is the first
                process.shown = 0

    def _tidy_logs(self) -> None:
        logs = sorted(logs_dir(self._settings).glob("worker-*.log"))
        for old in logs[:-_KEEP_LOGS]:
            old.unlink(missing_ok=True)


def _described(process: Process) -> str:
    code = process.ended
    if code is None:
        return "it did not end"
    if code < 0:
        return f"killed by signal {-code}"
    last = _last_line(process.log)
    return f"exited with code {code}" + (f": {last}" if code and last else "")


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as lines:
            lines.seek(max(path.stat().st_size - 4000, 0))
            found = [line for line in lines.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return found[-1].strip()[:300] if found else ""


def _own_log(path: Path) -> BinaryIO:
    """Open a log for appending. Only the user that runs the tools may read it, because they write into it."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
