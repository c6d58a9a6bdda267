"""The inbox: commands from outside for runs that a worker holds."""

from uuid import UUID

import orjson

from interlock.engine.queueing.leases import WorkerIdentity
from interlock.journal import CommandType, RunCommand
from interlock.store.pool import Database


async def runs_with_mail(database: Database, me: WorkerIdentity) -> list[UUID]:
    return [row["id"] for row in await database.fetch("runs_with_mail", me.id)]


async def read(database: Database, run_id: UUID, patience: float | None = None) -> list[RunCommand]:
    """Return the commands. They stay until the append that carries their results is committed."""
    rows = await database.fetch("read_inbox", [run_id], patience=patience)
    return [
        RunCommand(CommandType(r["command"]), r["actor"], orjson.loads(r["data"]), r["step"], r["id"]) for r in rows
    ]
