"""Processes that the benchmark starts: each says when it is up, and is ended by its own id."""

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
    """`python ARGUMENTS` for as long as the block lasts. Gives the line of its output that has `says` in it."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=errors, cwd=ROOT, env=_environment(more)
        )
        try:
            yield await _line_with(process, says, log) if says else ""
        finally:
            await _end(process)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours without the settings of whoever runs the benchmark."""
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
    # It may have ended by itself.
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _DOWN_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
