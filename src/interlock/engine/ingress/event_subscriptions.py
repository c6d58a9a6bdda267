"""Event subscriptions: one row for each step that waits for an external event."""

from uuid import UUID

from interlock.journal import CommandType, EventSubscription, RunCommand
from interlock.store.pool import Database, Row, Tx


async def begin(
    tx: Tx, database: Database, waits: list[tuple[UUID, UUID, EventSubscription]]
) -> list[tuple[UUID, RunCommand]]:
    """Subscribe the steps of (tenant, run). Return commands for the events that had already arrived.

    Such an event is delivered at once, and its step gets no subscription.
    """
    came = await tx.fetch(
        "await_events", database.clock(), [tenant for tenant, _, _ in waits], [run for _, run, _ in waits],
        [a.step for _, _, a in waits], [a.type for _, _, a in waits], [a.correlation for _, _, a in waits],
        [a.timeout_at for _, _, a in waits],
    )  # fmt: skip
    return [(row["waiting"], word_of(row, row["waiting_step"])) for row in came]


def word_of(event: Row, step: str) -> RunCommand:
    about = {"type": event["type"], "id": event["id"], "correlation": event["correlation"]}
    about["received_at"] = event["received_at"].isoformat()
    data = {"event": about, "payload": event["payload"]}
    return RunCommand(CommandType.ARRIVE, event["sent_by"], data, step=step)
