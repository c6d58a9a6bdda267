"""A PostgreSQL to throw away: one for a process, with a migrated database that each test's own is copied from."""

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


def _fast_place() -> str | None:
    """In memory where there is room: half of a test's time is the making of its database."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM
    return str(memory) if roomy else None


class Scratch:
    """Stopped and deleted by `close`, or when the process ends."""

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
        """The name of the template, made now if nobody has asked for it yet."""
        async with self._preparing:
            if not self._is_ready:
                # What tests assert does not depend on a power cut.
                await self._administer(
                    "ALTER SYSTEM SET fsync = off", "ALTER SYSTEM SET full_page_writes = off", "SELECT pg_reload_conf()"
                )
                await self._administer(f"CREATE DATABASE {TEMPLATE}")
                database = await Database(self.url_of(TEMPLATE), Settings(), size=1).open()
                await migrate(database)
                await database.close()
                self._is_ready = True
        return TEMPLATE

    async def fresh(self) -> str:
        """The URL of a database that nobody else uses."""
        await self.prepare()
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        # Copied as files: without fsync that takes half the time of writing every page to the log.
        await self._administer(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY FILE_COPY")
        return self.url_of(name)

    async def drop(self, url: str) -> None:
        name = url.partition("@/")[2].partition("?")[0]
        await self._administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    async def _administer(self, *statements: str) -> None:
        connection: Any = await asyncpg.connect(self.server.url)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    def close(self) -> None:
        self.server.leave()
        shutil.rmtree(self._base, ignore_errors=True)
