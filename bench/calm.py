"""How busy the machine is: a measurement starts when no other process uses the machine or slows it down."""

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_SECONDS = 20.0
_PATIENCE_IN_ALL_SECONDS = 180.0
_SLOWER = 1.2
_BUSY_CORES = 0.15
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Pulse:
    """Microseconds for a fixed piece of Python, and how many cores other processes used during that time."""

    micros: float
    others: float


def pulse(seconds: float = 0.25) -> Pulse:
    times, began, busy = [], time.perf_counter(), _busy_seconds()
    own = time.process_time()
    while (at := time.perf_counter()) < began + seconds:
        _work()
        times.append((time.perf_counter() - at) * 1e6)
    others = (_busy_seconds() - busy) - (time.process_time() - own)
    return Pulse(round(statistics.median(times), 1), round(max(others / (time.perf_counter() - began), 0.0), 2))


def _work() -> int:
    seen: dict[str, int] = {}
    for number in range(1000):
        seen[str(number)] = number * 3
    return sum(seen.values())


def _busy_seconds() -> float:
    """Return busy seconds of all cores since boot, including stolen time; 0 where the system does not say."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _iowait, *rest = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


class Calm:
    """Keeps the best pulse of this run and waits, for a limited time, for a pulse near it."""

    def __init__(self) -> None:
        self.best = pulse().micros
        self._left = _PATIENCE_IN_ALL_SECONDS

    def wait(self) -> Pulse:
        began = time.monotonic()
        patience = min(_PATIENCE_SECONDS, self._left)
        while True:
            now = pulse()
            self.best = min(self.best, now.micros)
            waited = time.monotonic() - began
            if self.is_calm(now) or waited > patience:
                self._left -= waited
                return now
            time.sleep(0.3)

    def is_calm(self, pulse: Pulse) -> bool:
        return pulse.micros <= self.best * _SLOWER and pulse.others <= _BUSY_CORES
