"""The stage: one embedded server in a temporary directory, and a fresh database for each measurement."""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg

from interlock.store import embedded


class Stage:
    def __init__(self, directory: Path, server: embedded.Joined) -> None:
        self.directory = directory
        self._server = server
        self._numbers = itertools.count(1)

    @contextlib.asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """Give the URL of an empty database. The database is dropped when the block ends."""
        name = f"bench_{next(self._numbers)}"
        admin: Any = await asyncpg.connect(self._server.url)
        try:
            await admin.execute(f"CREATE DATABASE {name}")
            # This measurement must not wait for writes that the last one left pending.
            await admin.execute("CHECKPOINT")
            yield self._server.url.replace("@/postgres?", f"@/{name}?")
        finally:
            await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
            await admin.close()

    async def server_version(self) -> str:
        connection: Any = await asyncpg.connect(self._server.url)
        try:
            return str(await connection.fetchval("SHOW server_version"))
        finally:
            await connection.close()

    def new_file(self, name: str) -> Path:
        return self.directory / f"{next(self._numbers)}-{name}"


@contextlib.contextmanager
def set_up() -> Iterator[Stage]:
    directory = Path(tempfile.mkdtemp(prefix="interlock-bench-"))
    server = embedded.start(directory)
    try:
        yield Stage(directory, server)
    finally:
        server.leave()
        shutil.rmtree(directory, ignore_errors=True)
