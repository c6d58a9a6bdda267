"""The clock: the database's time, computed from this process's clock and the measured difference between the two.

Processes run on machines whose clocks can be wrong. All time-dependent code therefore uses the database's time:
statements call `now()`, and code that needs the time between statements calls `now()` here.
"""

import time
from datetime import UTC, datetime

# Above this difference one of the two clocks is wrong, and it is not known which: nothing is deleted.
MOST_SECONDS = 60.0

_ahead = 0.0


def process_time() -> float:
    """Return this machine's own clock in seconds since 1970, right or wrong."""
    return time.time()


def follow(ahead: float) -> None:
    """Store by how many seconds this process's clock is ahead of the database's."""
    global _ahead
    _ahead = ahead


def ahead() -> float:
    """Return by how many seconds this process's clock was ahead of the database's at the last comparison."""
    return _ahead


def is_wrong() -> bool:
    return abs(_ahead) > MOST_SECONDS


def difference() -> str | None:
    """Return a sentence about a clock that is wrong, or None."""
    if not is_wrong():
        return None
    which = "ahead of" if _ahead > 0 else "behind"
    return (
        f"The clock of this process is {abs(_ahead):.0f} seconds {which} the database's. Until they agree to a minute, "
        "this process deletes nothing. Check the clocks of both machines."
    )


def now_ms() -> int:
    """Return the database's time in milliseconds since 1970."""
    return int((process_time() - _ahead) * 1000)


def now() -> datetime:
    """Return the database's time."""
    return datetime.fromtimestamp(process_time() - _ahead, UTC)
