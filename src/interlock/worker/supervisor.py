"""The supervisor: keeps the wished number of worker processes alive on its machine, and ends those that were ended."""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from interlock.engine import leases, workers
from interlock.engine.workers import DEFAULT_LABEL, SWEEP, Terms
from interlock.errors import Problem, Unavailable
from interlock.ids import uuid7
from interlock.lifecycle import WORKER, WorkerState
from interlock.settings import Settings, logs_dir, worker_log
from interlock.store.notify import WORKER as ORDERS
from interlock.store.notify import Listener
from interlock.store.pool import FOREVER, Database, Row
from interlock.telemetry import forget_process, log, metrics

_ROUND_SECONDS = 0.5
# A process that was told to end at once has so long to do it by itself.
_GRACE_SECONDS = 2.0
_STARTUP_SECONDS = 60.0
# Restarts wait longer and longer, up to this; a process that lived for a while starts from the beginning.
_LONGEST_DELAY = 10.0
_LIVED_SECONDS = 10.0
# After so many that ended before they had work, it is the program or its surroundings: more would not help.
MOST_CRASHES = 6
_MOST_LOG_BYTES = 32_000_000
_KEEP_LOGS = 100


def python_as_ours() -> tuple[str, ...]:
    """An interpreter that finds the modules that this one finds. A file in the working directory that happens to be
    called like a library would else take its place, in workers only."""
    return (sys.executable,) if str(Path.cwd()) in sys.path else (sys.executable, "-P")


@dataclass(slots=True)
class Process:
    running: asyncio.subprocess.Process
    log: Path
    began: float = field(default_factory=time.monotonic)
    told: float | None = None
    shown: int = 0

    @property
    def ended(self) -> int | None:
        return self.running.returncode

    def end(self) -> None:
        """SIGTERM, then SIGKILL. Called again and again until it is gone."""
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            if self.told is None:
                self.told = now
                self.running.terminate()
            elif now - self.told > _GRACE_SECONDS:
                self.running.kill()


@dataclass(slots=True)
class Slot:
    """A place for one worker: who is in it, how those before it ended. `kept`: it is filled again after an order."""

    terms: Terms
    kept: bool = True
    worker_id: UUID | None = None
    process: Process | None = None
    crashes: int = 0
    # Those of them that had not even begun to work.
    idle_crashes: int = 0
    not_before: float = 0.0
    gave_up: str | None = None

    def note_crash(self, lived: float, why: str, *, at_work: bool = False) -> None:
        """A step that kills its worker is given up by its run; the place for a worker stays, for all other runs."""
        lasted = lived > _LIVED_SECONDS
        self.crashes = 0 if lasted else self.crashes + 1
        self.idle_crashes = 0 if lasted or at_work else self.idle_crashes + 1
        delay = min(0.2 * 2 ** max(self.crashes - 1, 0), _LONGEST_DELAY)
        self.not_before = time.monotonic() + delay
        if self.idle_crashes >= MOST_CRASHES:
            self.gave_up = f"crash loop: {self.idle_crashes} processes ended soon after their start, the last {why}"


class Supervisor:
    """`url`: the database as the processes are told of it."""

    def __init__(
        self, database: Database, settings: Settings, url: str, *, wished: int, concurrency: int | None = None,
        labels: tuple[str, ...] = (DEFAULT_LABEL,), tenants: tuple[UUID, ...] | None = None,
    ) -> None:  # fmt: skip
        self.id = uuid7()
        self.host = socket.gethostname()
        self._database, self._settings, self._url = database, settings, url
        terms = Terms(concurrency or settings.concurrency, labels, tenants)
        self.slots = [Slot(terms) for _ in range(wished)]
        self._wished = wished
        self._had: set[UUID] = set()
        self._look = asyncio.Event()

    @property
    def actor(self) -> str:
        return f"supervisor:{self.host}-{os.getpid()}"

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop; then its workers are asked to drain, and none is left behind."""
        logs_dir(self._settings).mkdir(parents=True, exist_ok=True)
        listener = Listener(self._database, {ORDERS: lambda _: self._look.set()})
        await self._register()
        await listener.start()
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

    async def _register(self) -> None:
        db, settings = self._database, self._settings
        await db.fetch(
            "register_supervisor", db.clock(), self.id, self.host, os.getpid(), self._wished, settings.lease_seconds,
            str(logs_dir(settings).resolve()), patience=FOREVER,
        )  # fmt: skip

    async def _tend(self) -> None:
        """One round. A database that is away is waited for: the processes do the same."""
        try:
            rows = await self._look_around()
            for slot in self.slots:
                self._copy_log(slot)
                await self._tend_slot(slot, rows)
            self._take_in(rows)
            self.slots = [slot for slot in self.slots if slot.kept or slot.worker_id is not None]
        except Unavailable as error:
            log.warning("supervisor_waits", detail=error.detail)
        except Problem as error:
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
        found = await self._database.fetch("supervise", self._database.clock(), self.id, alive, ours, why, patience=5)
        return {row["id"]: row for row in found}

    def _take_in(self, rows: dict[UUID, Row]) -> None:
        """Workers that somebody asked for and that were given to us."""
        for worker_id, row in rows.items():
            # Not one that was ours when we looked and has died since.
            if worker_id not in self._had and row["pid"] is None and WorkerState(row["status"]) in WORKER.open:
                terms = Terms(
                    row["capacity"], tuple(row["labels"]), tuple(row["tenants"]) if row["tenants"] else None,
                    row["workspace_id"],
                )  # fmt: skip
                self.slots.append(Slot(terms, kept=False, worker_id=worker_id))
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
            with path.open("ab") as output:
                slot.process = Process(await self._spawn(slot.worker_id, output), path)
        except OSError as error:
            await workers.bury(self._database, slot.worker_id, self.actor, f"could not be started: {error}")
            slot.worker_id = None
            slot.note_crash(0.0, f"could not be started: {error}")
            log.error("worker_not_started", reason=str(error))
            return
        log.info("worker_started", worker_id=str(slot.worker_id), pid=slot.process.running.pid)

    async def _make_worker(self, slot: Slot) -> None:
        # The id is known before the row is: after a broken connection it is the same worker.
        worker_id = uuid7()
        self._had.add(worker_id)
        await workers.create(
            self._database, self._database, self.actor, slot.terms, worker_id=worker_id, host=self.host,
            name=f"{self.host}-{worker_id.hex[-6:]}", supervisor_id=self.id,
            lease_seconds=self._settings.lease_seconds,
        )  # fmt: skip
        slot.worker_id = worker_id

    async def _spawn(self, worker_id: UUID, output: BinaryIO) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *python_as_ours(), "-m", "interlock", "worker", "--adopt", str(worker_id),
            env=os.environ | {"INTERLOCK_DATABASE_URL": self._url},
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip

    async def _bury(self, slot: Slot, rows: dict[UUID, Row]) -> None:
        """Its process is gone. What it held goes to others at once, without waiting for its lease to run out."""
        assert slot.process is not None and slot.worker_id is not None and slot.process.ended is not None
        self._copy_log(slot)
        worker_id, lived, why = slot.worker_id, time.monotonic() - slot.process.began, _described(slot.process)
        forget_process(slot.process.running.pid)
        at_work: bool = await self._database.value("holds_runs", worker_id)
        await workers.bury(self._database, worker_id, self.actor, why)
        await leases.take_back(self._database)
        row = await workers.get(self._database, worker_id)
        slot.worker_id, slot.process = None, None
        state = WorkerState(row["status"])
        by_order = state == WorkerState.COMPLETED or (
            state == WorkerState.TERMINATED and row["stopped_by"] not in (SWEEP, self.actor, f"worker:{worker_id}")
        )
        if by_order:
            log.info("worker_ended", worker=row["name"], status=state, reason=row["reason"])
            return
        if not slot.kept:  # somebody asked for it, and it crashed: there shall be another
            slot.kept = True
        slot.note_crash(lived, why, at_work=at_work)
        metrics.worker_restarts.inc()
        if slot.gave_up:
            log.error("worker_crash_loop", worker=row["name"], reason=slot.gave_up)
        else:
            wait = round(max(slot.not_before - time.monotonic(), 0), 1)
            log.warning("worker_died", worker=row["name"], reason=why, restart_in=wait)

    async def _drain(self) -> None:
        """Each finishes the steps it is at, then leaves; one that does not is killed."""
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
        for slot in self.slots:
            self._copy_log(slot)
        with contextlib.suppress(Problem):
            for slot in self.slots:
                if slot.worker_id is not None and slot.process is not None:
                    await workers.bury(self._database, slot.worker_id, self.actor, _described(slot.process))
            await leases.take_back(self._database)
            await self._database.fetch("stop_supervisor", self._database.clock(), self.id, "stopped", patience=2)
        self._tidy_logs()

    # ------------------------------------------------------------ logs

    def _copy_log(self, slot: Slot) -> None:
        """A worker writes to its own file, so that it outlives us; whoever reads our output sees it there too."""
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
                os.truncate(process.log, 0)  # it is opened for appending: the next line is the first
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
