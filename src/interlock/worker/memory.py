"""Memory: how much of it this process has, and giving back what it does not need."""

import ctypes
import ctypes.util
import gc
import os
import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_mb() -> float:
    """What is in memory now; where the system does not say, the most that ever was."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 1e6 if sys.platform == "darwin" else most / 1e3


def give_back() -> None:
    """Python keeps what it freed for itself, and so does the C library; the system should have it."""
    gc.collect()
    library = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if trim is not None:
        trim(0)
