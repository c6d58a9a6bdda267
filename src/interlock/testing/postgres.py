"""A temporary PostgreSQL: one per process, with a migrated template database that each test copies."""

import asyncio
import atexit
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import asyncpg

from interlock.settings import Settings
from interlock.store import embedded
from interlock.store.migrate import migrate
from interlock.store.pool import Database

TEMPLATE = "interlock_template"
_ROOM = 4 << 30
# The time of a clock that a test moves, see `store/session.py`; without one, the server's.
_MOVABLE_NOW = """
    CREATE OR REPLACE FUNCTION interlock.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
      SELECT coalesce(nullif(current_setting('interlock.now', true), '')::timestamptz, pg_catalog.now())
    $$"""


def _fast_place() -> str | None:
    """Return a directory in memory if it has room: creating the database takes half of a test's time."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM
    return str(memory) if roomy else None


class Scratch:
    """A temporary server. `close` stops and deletes it, as does the end of the process."""

    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="interlock-tests-", dir=_fast_place()))
        self.server = embedded.start(self._base)
        self._numbers = itertools.count()
        self._is_ready = False
        self._preparing = asyncio.Lock()
        atexit.register(self.close)

    def url_of(self, name: str) -> str:
        return self.server.url.replace("@/postgres?", f"@/{name}?")

    async def prepare(self) -> str:
        """Return the name of the template, which the first call creates."""
        async with self._preparing:
            if not self._is_ready:
                # Tests do not depend on durability after a power failure.
                await self.administer(
                    "ALTER SYSTEM SET fsync = off", "ALTER SYSTEM SET full_page_writes = off", "SELECT pg_reload_conf()"
                )
                await self.create(TEMPLATE)
                await self.prepare_template(self.url_of(TEMPLATE))
                self._is_ready = True
        return TEMPLATE

    async def prepare_template(self, url: str) -> None:
        database = await Database(url, Settings(), size=1).open()
        await migrate(database)
        await database.close()
        await self.administer(_MOVABLE_NOW, url=url)

    async def fresh(self) -> str:
        """Return the URL of a database for the caller's exclusive use."""
        await self.prepare()
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        # Copied as files: without fsync that takes half the time of writing every page to the log.
        await self.create(name, f"TEMPLATE {TEMPLATE} STRATEGY FILE_COPY")
        return self.url_of(name)

    async def create(self, name: str, options: str = "") -> None:
        await self.administer(f"CREATE DATABASE {name} {options}")

    async def drop(self, url: str) -> None:
        name = url.partition("@/")[2].partition("?")[0]
        await self.administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    async def administer(self, *statements: str, url: str | None = None) -> None:
        connection: Any = await asyncpg.connect(url or self.server.url)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    def close(self) -> None:
        self.server.leave()
        shutil.rmtree(self._base, ignore_errors=True)
