"""The yard: servers and workers as real processes, and the means to kill, stop and cut them off.

The tools count their calls outside the database: they write lines to a file (`tools.py`), so that a test can compare
the journal with what happened.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from interlock.engine.access.principal import Principal
from interlock.engine.queueing.leases import WorkerIdentity
from interlock.engine.runs import runs
from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.pool import TRANSIENT
from tests.chaos.oracles import Execution
from tests.rig import Rig

T = TypeVar("T")

LEASE_SECONDS = 2.0
TOOLS = Path(__file__).with_name("tools.py")
KEY = "il_chaos_0123456789abcdef"


async def until(
    found: Callable[[], T | Awaitable[T]], what: str, seconds: float = 30, *, pause: float = 0.02
) -> T:  # fmt: skip
    """Repeat the question until the answer is true. Only another process knows it, so there is nothing to wait for."""
    deadline = time.monotonic() + seconds
    while True:
        answer = found()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer  # type: ignore[return-value]
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(pause)


class Process:
    def __init__(self, popen: "subprocess.Popen[bytes]", log: Path) -> None:
        self._popen, self._log = popen, log
        self.pid = popen.pid

    def __repr__(self) -> str:
        return f"{self._log.stem} (pid {self.pid})"

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def gist(self) -> str:
        """Return the first errors that the process logged, and its last lines."""
        said = self.said()
        errors = [line for line in said.splitlines() if '"level": "error"' in line][:5]
        return "\n".join([*errors, said[-2000:]])

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ask_to_end(self) -> None:
        self._popen.terminate()

    async def ended(self, seconds: float = 20) -> int:
        await until(lambda: not self.is_alive, f"{self} ended; it said {self.said()[-2000:]}", seconds)
        return self._popen.returncode

    def clear_away(self) -> None:
        """Stop the process and everything it started."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                break
        self._popen.wait()


class Yard:
    """With `url` None the processes start and join the embedded server of their data directory."""

    def __init__(self, base: Path, url: str | None, **settings: Any) -> None:
        self.base, self.url = base, url
        self.data_dir = base / "data"
        self.processes: list[Process] = []
        self._settings = {"lease_seconds": LEASE_SECONDS, "poll_seconds": 0.2, "log_level": "warning", **settings}
        self._executions = base / "executions"
        self._executions.touch()

    def worker(self, concurrency: int | None = None, **settings: Any) -> Process:
        return self._start("worker", *_given(concurrency=concurrency), **settings)

    def supervisor(self, workers: int, **settings: Any) -> Process:
        return self._start("supervise", *_given(workers=workers), **settings)

    def server(self, workers: int = 0, concurrency: int | None = None, **settings: Any) -> Process:
        (self.data_dir / "url").unlink(missing_ok=True)
        options = _given(workers=workers, port=0, concurrency=concurrency)
        return self._start("up", *options, **settings)

    async def address(self) -> str:
        """Wait until the server listens, and return its address."""
        path = self.data_dir / "url"
        return await until(lambda: path.exists() and path.read_text(), "the server listens")

    def _start(self, *command: str, environment: dict[str, str] | None = None, **settings: Any) -> Process:
        log = self.base / f"{command[0]}-{len(self.processes)}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "interlock", *command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env=self._environment(settings) | (environment or {}),
            )  # fmt: skip
        process = Process(popen, log)
        self.processes.append(process)
        return process

    def _environment(self, settings: dict[str, Any]) -> dict[str, str]:
        given = {
            "data_dir": self.data_dir, "database_url": self.url, "tools": TOOLS, "bootstrap_key": KEY,
            **self._settings, **settings,
        }  # fmt: skip
        ours = {f"INTERLOCK_{name.upper()}": str(value) for name, value in given.items() if value is not None}
        return {**os.environ, **ours, "CHAOS_EXECUTIONS": str(self._executions)}

    def executions(self) -> list[Execution]:
        return [Execution.read(line) for line in self._executions.read_text().splitlines()]

    def count(self, what: str = "begin") -> int:
        return sum(line.startswith(what) for line in self._executions.read_text().splitlines())

    async def until_begun(self, number: int, seconds: float = 30) -> None:
        await until(lambda: self.count() >= number, f"{number} executions", seconds, pause=0.005)

    def left_behind(self) -> list[int]:
        """Return all running processes of this yard, including workers that a supervisor started."""
        return processes_with(f"CHAOS_EXECUTIONS={self._executions}")

    def _clear_workers_away(self) -> None:
        for pid in self.left_behind():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for process in self.processes:
            process.clear_away()
        self._clear_workers_away()
        for process in self.processes:
            print(f"--- {process} said:\n{process.gist()}")  # pytest shows this if the test failed
        stop_embedded(self.data_dir)


def processes_with(variable: str) -> list[int]:
    """Return the processes with this value in their environment: a killed `up` leaves its workers behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in path.read_bytes().split(b"\x00") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def is_there(pid: int, name: str) -> bool:
    """Return whether the id belongs to a running process of that name."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == name
    return False


def _given(**options: Any) -> list[str]:
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]


def postmaster(data_dir: Path) -> int | None:
    """Return the process id of the embedded server of a data directory, if it is alive."""
    try:
        pid = int((data_dir / "postgres" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, 0)
    except (OSError, ValueError, IndexError):
        return None
    return pid


def stop_embedded(data_dir: Path) -> None:
    if postmaster(data_dir) is not None:
        embedded.Embedded(data_dir / "postgres", data_dir, "").control("-m", "immediate", "stop")


class Outages:
    """A separate PostgreSQL for this test, which the test may stop."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._joined = [embedded.start(data_dir)]
        self.url = self._joined[0].url

    async def restart(self) -> None:
        await asyncio.to_thread(self._joined[0].server.control, "-m", "immediate", "restart")

    async def stop(self) -> None:
        await asyncio.to_thread(self._joined[0].server.control, "-m", "immediate", "stop")

    async def start(self) -> None:
        self._joined.append(await asyncio.to_thread(embedded.start, self._data_dir))

    async def restart_in_recovery(self) -> None:
        """Kill the server again while it replays its log: `-W` does not wait until it is ready."""
        await asyncio.to_thread(self._joined[0].server.control, "-W", "-m", "immediate", "restart")
        await until(lambda: postmaster(self._data_dir), "the server has begun to start")
        await self.restart()

    def close(self) -> None:
        for joined in self._joined:
            joined.leave()
        stop_embedded(self._data_dir)


# ---------------------------------------------------------------- database queries


def steps_of(number: int) -> list[str]:
    return [f"s{i}" for i in range(1, number + 1)]


def workflow(name: str, number: int, tool: str = "chaos.work", input: str = '{ms: "${input.ms}"}') -> str:
    steps = "".join(f"  - {{id: {step}, tool: {tool}, input: {input}}}\n" for step in steps_of(number))
    return f"name: {name}\nsteps:\n{steps}"


async def start_runs(rig: Rig, workflow: str, number: int, input: Any = None, who: Principal | None = None) -> None:
    """Insert runs into the queue directly, in batches; the API is not part of this test."""
    who = who or rig.admin
    new = await runs.prepare(rig.plans, who, workflow, input=input)
    for begin in range(0, number, 5000):
        batch = [_another(new) for _ in range(min(5000, number - begin))]
        await runs.start_many(rig.database, who, batch)


def _another(new: runs.NewRun) -> runs.NewRun:
    return runs.NewRun(
        runs.uuid7(), new.workflow, new.version, new.plan, new.input, new.trigger, new.deadline_seconds
    )  # fmt: skip


async def ask(rig: Rig, statement: str, *args: Any) -> list[Any]:
    """Query a database that may just have restarted."""
    for _ in range(100):
        try:
            return await rig.sql(statement, *args)
        except TRANSIENT:
            await asyncio.sleep(0.1)
    raise AssertionError("the database did not come back")


async def until_all_ended(rig: Rig, number: int, seconds: float) -> None:
    async def ended() -> bool:
        rows = await ask(rig, "SELECT count(*) AS n FROM interlock.run WHERE completed_at IS NOT NULL")
        return bool(rows[0]["n"] >= number)

    try:
        await until(ended, f"{number} runs ended", seconds, pause=0.1)
    except AssertionError as error:
        left = await ask(
            rig, "SELECT status, lease_worker IS NOT NULL AS held, count(*) FROM interlock.run GROUP BY 1, 2"
        )
        raise AssertionError(f"{error}; now {[tuple(row) for row in left]}") from None


async def worker_of(rig: Rig, process: Process, seconds: float = 20) -> WorkerIdentity:
    """Return the worker id of a process, once it takes work."""
    return (await workers_of(rig, process, 1, seconds))[-1]


async def workers_of(rig: Rig, process: Process, number: int, seconds: float = 20) -> list[WorkerIdentity]:
    """Return every worker id of a process, once it had this many and the last one takes work."""

    async def found() -> list[WorkerIdentity]:
        assert process.is_alive, f"{process} ended; it said {process.said()[-3000:]}"
        rows = await ask(rig, "SELECT id, name, status FROM interlock.worker WHERE pid = $1 ORDER BY id", process.pid)
        if len(rows) < number or rows[-1]["status"] != "running":
            return []
        return [WorkerIdentity(row["id"], row["name"]) for row in rows]

    return await until(found, f"{process} was registered {number} times", seconds)


async def journal(rig: Rig) -> list[Any]:
    return await ask(rig, "SELECT * FROM interlock.journal_entry ORDER BY run_id, seq")


async def orphans(rig: Rig) -> int:
    rows = await ask(rig, "SELECT count(*) AS n FROM interlock.journal_entry WHERE type = 'orphan_detected'")
    number: int = rows[0]["n"]
    return number


def settings() -> Settings:
    return Settings(lease_seconds=LEASE_SECONDS, poll_seconds=0.2)
