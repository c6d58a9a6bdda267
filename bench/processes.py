"""Processes that the benchmark starts: each reports when it is ready, and the benchmark stops it by its process id."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_UP_SECONDS = 60.0
_DOWN_SECONDS = 10.0


@contextlib.asynccontextmanager
async def running(log: Path, *arguments: str, says: str | None = None, **more: str) -> AsyncIterator[str]:
    """Run `python ARGUMENTS` for as long as the block lasts. Give the first line of its output that contains `says`."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=errors, cwd=ROOT, env=_environment(more)
        )
        try:
            yield await _line_with(process, says, log) if says else ""
        finally:
            await _end(process)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without the user's Interlock settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


async def _line_with(process: asyncio.subprocess.Process, text: str, log: Path) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(_UP_SECONDS):
        while line := (await process.stdout.readline()).decode():
            if text in line:
                return line.strip()
    raise RuntimeError(f"a process of the benchmark ended early; it said:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


async def _end(process: asyncio.subprocess.Process) -> None:
    # The process may already have exited.
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _DOWN_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
