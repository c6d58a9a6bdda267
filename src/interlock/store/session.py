"""A session: one connection to the database, with the statements of its schema."""

from datetime import datetime
from typing import Any, Protocol

import asyncpg


class DatabaseClock(Protocol):
    """Returns the time that `interlock.now()` has to return. None means the server's own time."""

    def __call__(self) -> datetime | None: ...


def server_time() -> datetime | None:
    return None


class Session(asyncpg.Connection):  # type: ignore[misc]
    """`statements`: the text of each named statement, for the schema of this installation."""

    statements: dict[str, str]


def session_class(clock: DatabaseClock) -> type[Session]:
    return (
        Session if clock is server_time else type("ClockedSession", (_ClockedSession,), {"clock": staticmethod(clock)})
    )


class _ClockedSession(Session):
    """Tells the server the time of a movable clock before a statement, whenever that time has changed.

    `interlock.testing` replaces the function `interlock.now()` with one that reads this setting.
    """

    clock: DatabaseClock
    _told: datetime | None = None
    # The setting was made in a transaction, whose rollback also takes it back.
    _told_in_transaction = False

    async def _tell_time(self) -> None:
        now, in_transaction = self.clock(), self.is_in_transaction()
        if now == self._told and (in_transaction or not self._told_in_transaction):
            return
        value = "" if now is None else now.isoformat()
        await super().execute(f"SELECT set_config('interlock.now', '{value}', false)")
        self._told, self._told_in_transaction = now, in_transaction

    async def fetch(self, *args: Any, **options: Any) -> Any:
        await self._tell_time()
        return await super().fetch(*args, **options)

    async def fetchrow(self, *args: Any, **options: Any) -> Any:
        await self._tell_time()
        return await super().fetchrow(*args, **options)

    async def fetchval(self, *args: Any, **options: Any) -> Any:
        await self._tell_time()
        return await super().fetchval(*args, **options)

    async def execute(self, *args: Any, **options: Any) -> Any:
        await self._tell_time()
        return await super().execute(*args, **options)
