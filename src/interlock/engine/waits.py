"""Waits: steps that wait for an event from outside, a row each and nothing else."""

from uuid import UUID

from interlock.journal import Awaited, Command, Word
from interlock.store.pool import Database, Row, Tx


async def begin(tx: Tx, database: Database, waits: list[tuple[UUID, UUID, Awaited]]) -> list[tuple[UUID, Word]]:
    """The steps of (tenant, run) wait from now on; what had come before is told of at once, and waited for no more."""
    came = await tx.fetch(
        "await_events", database.clock(), [tenant for tenant, _, _ in waits], [run for _, run, _ in waits],
        [a.step for _, _, a in waits], [a.type for _, _, a in waits], [a.correlation for _, _, a in waits],
        [a.timeout_at for _, _, a in waits],
    )  # fmt: skip
    return [(row["waiting"], word_of(row, row["waiting_step"])) for row in came]


def word_of(event: Row, step: str) -> Word:
    about = {"type": event["type"], "id": event["id"], "correlation": event["correlation"]}
    about["received_at"] = event["received_at"].isoformat()
    data = {"event": about, "payload": event["payload"]}
    return Word(Command.ARRIVE, event["sent_by"], data, step=step)
