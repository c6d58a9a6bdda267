"""Run computations on user input in child processes, with limits on time and memory, tenant by tenant.

Policies, definitions and large expressions cannot be interrupted where they run, and their libraries hold Python's
lock: on an event loop or in a thread one of them would stop every other request or run. A child can be killed.
Children start when they are first needed and are used again. A tenant has at most one running computation, and
waiting tenants take turns, so a tenant with many computations delays only its own.

    found = await pool.run(tenant_id, check_policy, text, facts)

The function must be importable by its module and name. Its arguments, results and exceptions must be picklable.
"""

import asyncio
import atexit
import contextlib
import copyreg
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

from interlock.errors import Invalid, RateLimited
from interlock.telemetry import log

T = TypeVar("T")

# Limits of one computation: CPU time, wall time (it competes with others for the CPU), and memory.
CPU_SECONDS = 5.0
_WALL_SECONDS = 30.0
_MEMORY_BYTES = 2 << 30
_START_SECONDS = 60.0
_CHILDREN = 2
# How many computations of one tenant may wait before a caller that prefers an error to a long wait gets one.
_MOST_WAITING = 10
_RETRY_AFTER_SECONDS = 2
# A child is replaced after this many uses, so that leaks in libraries do not add up.
_USES = 1000

_LENGTH = struct.Struct(">Q")


def _view(values: dict[Any, Any]) -> "MappingProxyType[Any, Any]":
    return MappingProxyType(values)


copyreg.pickle(MappingProxyType, lambda view: (_view, (dict(view),)))


class Stopped(Invalid):
    """The computation was stopped because it exceeded a limit."""

    title, code = "The computation was stopped", "COMPUTATION_STOPPED"


class TooMany(RateLimited):
    title, code = "Too many computations", "TOO_MANY_COMPUTATIONS"


@dataclass(slots=True)
class _Task:
    tenant: Hashable
    # The function and its arguments, pickled.
    call: bytes
    what: str
    result: "Future[Any]" = field(default_factory=Future)


class ProcessPool:
    """Child processes, and the computations that wait for one.

    Threads drive the children, so any event loop can use the pool.
    """

    def __init__(self, children: int = _CHILDREN, cpu_seconds: float = CPU_SECONDS) -> None:
        self.cpu_seconds = cpu_seconds
        self._children = children
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[_Task]] = {}
        self._under_way: set[Hashable] = set()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()

    async def run(self, tenant: Hashable, function: Callable[..., T], *args: Any, must_wait: bool = False) -> T:
        """Return what the function returns. Raises what it raises, `Stopped`, or `TooMany` if the queue is full.

        With `must_wait` the queue is never full: use it for computations that the engine itself needs.
        """
        task = _Task(tenant, pickle.dumps((function, args)), function.__name__)
        with self._lock:
            queue = self._waiting.setdefault(tenant, deque())
            if len(queue) >= _MOST_WAITING and not must_wait:
                raise TooMany(
                    f"{_MOST_WAITING} computations of this tenant are waiting already; try again in a moment",
                    retry_after=_RETRY_AFTER_SECONDS,
                )
            queue.append(task)
            self._dispatch()
        result: T = await asyncio.wrap_future(task.result)
        return result

    async def warm(self, function: Callable[[], Any]) -> None:
        """Start a child and let it import what it needs for the function, before a caller waits for that."""
        with contextlib.suppress(OSError, Stopped):
            await self.run(None, function, must_wait=True)

    def close(self) -> None:
        with self._lock:
            children, self._all, self._idle = list(self._all), set(), []
        for child in children:
            child.kill()

    # ------------------------------------------------------------ turns

    def _dispatch(self) -> None:
        """Give free threads the first task of each tenant in turn. The lock is held."""
        for tenant in list(self._waiting):
            if len(self._under_way) >= self._children:
                return
            if tenant in self._under_way:
                continue
            queue = self._waiting.pop(tenant)
            task = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            self._under_way.add(tenant)
            threading.Thread(target=self._work, args=(task,), name="compute", daemon=True).start()

    def _work(self, task: _Task) -> None:
        try:
            if task.result.set_running_or_notify_cancel():
                self._compute(task)
        finally:
            with self._lock:
                self._under_way.discard(task.tenant)
                self._dispatch()

    def _compute(self, task: _Task) -> None:
        try:
            child = self._take()
            try:
                answer = child.ask(task.call, task.what, self.cpu_seconds)
            finally:
                self._give_back(child)
        except BaseException as error:
            task.result.set_exception(error)
            return
        kind, value = answer
        task.result.set_exception(value) if kind == "raised" else task.result.set_result(value)

    def _take(self) -> "_Child":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        child = _Child()
        with self._lock:
            self._all.add(child)
        child.wait_until_ready()
        return child

    def _give_back(self, child: "_Child") -> None:
        with self._lock:
            if child.is_usable and child in self._all:
                self._idle.append(child)
                return
            self._all.discard(child)
        child.kill()


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Return what the function returns, from a dedicated thread with a deep stack.

    Use it for a computation that ran in a child before, so that its cost is known, and whose result cannot be passed
    between processes.
    """
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(function(*args))
        except BaseException as error:
            result.set_exception(error)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=work, name="compute", daemon=True).start()
        finally:
            threading.stack_size(before)
    return await asyncio.wrap_future(result)


_STACK_BYTES = 32 << 20
_stack_lock = threading.Lock()


class _Child:
    def __init__(self) -> None:
        self.uses = 0
        # Pass only the variables that Python needs: a computation must not see keys and addresses.
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=kept,
        )  # fmt: skip

    @property
    def is_usable(self) -> bool:
        return self._process.poll() is None and self.uses < _USES

    def wait_until_ready(self) -> None:
        self._read(_LENGTH.size, time.monotonic() + _START_SECONDS)

    def ask(self, call: bytes, what: str, cpu_seconds: float) -> Any:
        self.uses += 1
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_LENGTH.pack(len(call)) + struct.pack(">d", cpu_seconds) + call)
            self._process.stdin.flush()
            deadline = time.monotonic() + max(_WALL_SECONDS, cpu_seconds)
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            return pickle.loads(self._read(length, deadline))
        except TimeoutError:
            self.kill()
            log.warning("computation_stopped", what=what, why="time")
            raise _too_long(cpu_seconds) from None
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            log.warning("computation_stopped", what=what, exit=code)
            if -code in (signal.SIGXCPU, signal.SIGKILL):
                raise _too_long(cpu_seconds) from None
            raise Stopped(
                "the computation ended its process: it needed too much memory, or was nested too deeply; "
                "make what is computed smaller"
            ) from None

    def _read(self, length: int, deadline: float) -> bytes:
        """Read `length` bytes. Raise EOFError if the child has ended, TimeoutError if the deadline has passed."""
        assert self._process.stdout is not None
        descriptor, parts, left = self._process.stdout.fileno(), [], length
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while left:
            patience = deadline - time.monotonic()
            if patience <= 0 or not poll.poll(patience * 1000):
                raise TimeoutError
            part = os.read(descriptor, min(left, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


_KEPT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


def _too_long(seconds: float) -> Stopped:
    return Stopped(f"the computation took more than {seconds:g} seconds and was stopped; make what is computed smaller")


# The pool of this process.
pool = ProcessPool()
atexit.register(pool.close)


# ---------------------------------------------------------------- the child


def _serve() -> None:
    """Answer computations until the parent closes the pipe, or this process exceeds a limit."""
    # Ctrl-C and a stopping service signal the whole group, but the parent still needs the answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    _limit_memory()
    with contextlib.suppress(OSError):
        os.nice(5)  # starts and claims go first
    _send(sink, b"")
    while head := source.read(_LENGTH.size + 8):
        (length,), (seconds,) = _LENGTH.unpack(head[:8]), struct.unpack(">d", head[8:])
        function, args = pickle.loads(source.read(length))  # importing it does not count
        _limit_time(seconds)
        try:
            answer = pickle.dumps(("returned", function(*args)))
        except MemoryError:
            os._exit(1)
        except BaseException as error:
            answer = _raised(error)
        _send(sink, answer)


def _raised(error: BaseException) -> bytes:
    try:
        answer = pickle.dumps(("raised", error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps(("raised", RuntimeError(f"{type(error).__name__}: {error}"[:2000])))
    return answer


def _send(sink: BinaryIO, answer: bytes) -> None:
    sink.write(_LENGTH.pack(len(answer)) + answer)
    sink.flush()


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS does not support it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _limit_time(seconds: float) -> None:
    """Limit the CPU time from now on. The kernel kills this process when it has used that much more."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + seconds), hard))


if __name__ == "__main__":
    from interlock.compute import _serve as serve

    serve()
