"""Events from outside: each is matched with one step that waits for it, or kept until one does or its time is over."""

from dataclasses import dataclass
from uuid import UUID

from interlock.engine.outside import open_run, put_back, say
from interlock.engine.principal import Principal
from interlock.engine.waits import word_of
from interlock.engine.workflows import Plans
from interlock.errors import Conflict
from interlock.journal import Command, Word
from interlock.store.pool import Database, Raced, Row, Tx
from interlock.telemetry import log, metrics


@dataclass(frozen=True, slots=True)
class NewEvent:
    """`id` is the sender's own name for it: the same id again is the same event."""

    id: str
    type: str
    correlation: str
    payload: str


async def send(tx: Tx, database: Database, plans: Plans, principal: Principal, new: NewEvent) -> Row:
    """The event as it is kept. Had a step waited for it, that step has it now, in the same transaction."""
    if known := await tx.row("get_event", principal.tenant_id, new.id):
        if not principal.reaches(known["workspace_id"]):
            raise Conflict(
                f"an event of another workspace is called {new.id}; give yours another id", code="EVENT_EXISTS"
            )
        return known
    about = (principal.tenant_id, new.type, new.correlation)
    waiting = await tx.row("first_wait", *about, principal.workspace_id)
    if waiting is None:
        # Who begins to wait takes the same lock: either we see them now, or they see what we keep.
        await tx.fetch("lock_event", *about)
        if await tx.row("first_wait", *about, principal.workspace_id):
            raise Raced("somebody began to wait for it meanwhile")
        return _count(tx, await _keep(tx, database, principal, new), "kept")
    # The run before the wait, in the order of everybody who ends one.
    run = await open_run(tx, database, plans, principal.tenant_id, waiting["run_id"])
    if await tx.row("end_wait", waiting["run_id"], waiting["step"]) is None:
        raise Raced("another event or a time-out ended the wait meanwhile")
    row = await _keep(tx, database, principal, new, waiting)
    await say(tx, database, run, word_of(row, waiting["step"]))
    return _count(tx, row, "matched")


async def _keep(tx: Tx, database: Database, principal: Principal, new: NewEvent, waiting: Row | None = None) -> Row:
    row = await tx.row(
        "keep_event", database.clock(), principal.tenant_id, new.id, principal.workspace_id, new.type, new.correlation,
        new.payload, principal.actor, database.settings.event_keep_seconds,
        waiting["run_id"] if waiting else None, waiting["step"] if waiting else None,
    )  # fmt: skip
    assert row is not None
    return row


def _count(tx: Tx, row: Row, outcome: str) -> Row:
    def tell() -> None:
        metrics.events.labels(outcome).inc()
        run_id = str(row["run_id"]) if row["run_id"] else None
        log.info(f"event_{outcome}", event_id=row["id"], type=row["type"], run_id=run_id)

    tx.afterwards(tell)
    return row


async def time_out(tx: Tx, database: Database, plans: Plans, tenant_id: UUID, run_id: UUID, step: str) -> None:
    """The event did not come in time. If it comes at this moment, one of the two ends the wait, and not the other."""
    run = await open_run(tx, database, plans, tenant_id, run_id)
    if await tx.row("time_out_wait", database.clock(), run_id, step) is None:
        await put_back(tx, run)
        return
    await say(tx, database, run, Word(Command.MISS, "system:timeout", {}, step=step))


async def forget_expired(database: Database, batch: int = 1000) -> int:
    [gone] = await database.fetch("forget_expired_events", database.clock(), batch)
    metrics.events.labels("expired").inc(gone["unmatched"])
    return int(gone["gone"])


async def listed(
    database: Database, principal: Principal, *, type: str | None = None, correlation: str | None = None,
    matched: bool | None = None, before: int | None = None, limit: int = 50,
) -> list[Row]:  # fmt: skip
    return await database.fetch(
        "list_events", principal.tenant_id, before, type, correlation, matched, principal.workspace_id, limit
    )
