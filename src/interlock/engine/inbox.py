"""The inbox: words that came from outside for runs that a worker holds."""

from uuid import UUID

import orjson

from interlock.engine.leases import Me
from interlock.journal import Command, Word
from interlock.store.pool import Database


async def runs_with_mail(database: Database, me: Me) -> list[UUID]:
    return [row["id"] for row in await database.fetch("runs_with_mail", me.id)]


async def read(database: Database, run_id: UUID, patience: float | None = None) -> list[Word]:
    """They stay until the append that carries what they caused is committed."""
    rows = await database.fetch("read_inbox", [run_id], patience=patience)
    return [Word(Command(r["command"]), r["actor"], orjson.loads(r["data"]), r["step"], r["id"]) for r in rows]
