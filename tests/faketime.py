"""libfaketime: processes with a shifted clock (Debian package `libfaketime`).

`python -m tests.faketime '2026-12-31 23:59:57' COMMAND …` runs a command, and all that it starts, as if it were that
moment (UTC) now: PostgreSQL too, so that both clocks move together.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

_PLACES = ("/usr/lib", "/usr/local/lib", "/opt/homebrew/lib")


def library() -> Path | None:
    """Return libfaketime for programs with threads, or None if it is not installed."""
    for place in map(Path, _PLACES):
        for pattern in ("faketime/libfaketimeMT.so.1", "*/faketime/libfaketimeMT.so.1"):
            if found := next(iter(sorted(place.glob(pattern))), None):
                return found
    return None


def environment(moved: str) -> dict[str, str]:
    """Return the variables of a process with a shifted clock, like "+100d". Its monotonic clock stays right."""
    if (found := library()) is None:
        pytest.skip("libfaketime is not installed (Debian: apt-get install libfaketime)")
    return {"LD_PRELOAD": str(found), "FAKETIME": moved, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def main() -> None:
    moment, *command = sys.argv[1:]
    if library() is None:
        raise SystemExit("libfaketime is not installed (Debian: apt-get install libfaketime)")
    ahead = (datetime.fromisoformat(moment).replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()
    os.execvpe(command[0], command, os.environ | environment(f"{ahead:+.3f}"))


if __name__ == "__main__":
    main()
