"""External events: each is matched with one waiting step, or stored until a step waits for it or it expires."""

from dataclasses import dataclass
from uuid import UUID

from interlock.engine.access import quotas
from interlock.engine.access.principal import Principal
from interlock.engine.ingress.event_subscriptions import word_of
from interlock.engine.workflows import Plans
from interlock.engine.writing.run_commands import deliver_command, open_run, put_back
from interlock.journal import CommandType, RunCommand
from interlock.store.pool import Database, RetryTransaction, Row, Tx
from interlock.telemetry import log, metrics


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to publish. `id` is the sender's own: the same id again in the same workspace is the same event."""

    id: str
    type: str
    correlation: str
    payload: str


async def send(tx: Tx, database: Database, plans: Plans, principal: Principal, new: NewEvent) -> Row:
    """Store the event and return it. If a step waits for it, deliver it to that step in the same transaction."""
    if known := await tx.row("get_event", principal.tenant_id, principal.workspace_id, new.id):
        return known
    about = (principal.tenant_id, new.type, new.correlation)
    waiting = await tx.row("first_wait", *about, principal.workspace_id)
    if waiting is None:
        # A step that subscribes takes the same lock: either we see its subscription now, or it sees the event we
        # store.
        await tx.fetch("lock_event", *about)
        if await tx.row("first_wait", *about, principal.workspace_id):
            raise RetryTransaction("somebody began to wait for it meanwhile")
        await quotas.check_events(tx, database, principal.tenant_id)
        return _count(tx, await _keep(tx, database, principal, new), "kept")
    # Lock the run before the subscription, as every code path that ends one does.
    run = await open_run(tx, database, plans, principal.tenant_id, waiting["run_id"])
    if await tx.row("end_wait", waiting["run_id"], waiting["step"]) is None:
        raise RetryTransaction("another event or a time-out ended the wait meanwhile")
    row = await _keep(tx, database, principal, new, waiting)
    await deliver_command(tx, database, run, word_of(row, waiting["step"]))
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

    tx.on_commit(tell)
    return row


async def time_out(tx: Tx, database: Database, plans: Plans, tenant_id: UUID, run_id: UUID, step: str) -> None:
    """End a wait because the event did not arrive in time.

    If the event arrives at this moment, only one of the two ends the wait.
    """
    run = await open_run(tx, database, plans, tenant_id, run_id)
    if await tx.row("time_out_wait", database.clock(), run_id, step) is None:
        await put_back(tx, run)
        return
    await deliver_command(tx, database, run, RunCommand(CommandType.MISS, "system:timeout", {}, step=step))


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
