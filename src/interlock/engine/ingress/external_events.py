"""External events: each is matched with one waiting step, or stored until a step waits for it or it expires."""

from dataclasses import dataclass

from interlock.engine.access import quotas
from interlock.engine.access.principal import Principal
from interlock.engine.ingress.event_subscriptions import arrival
from interlock.engine.workflows import Plans
from interlock.engine.writing.deliver import deliver_command, put_back
from interlock.engine.writing.load import open_run
from interlock.ids import RunId, TenantId
from interlock.journal import CommandType, RunCommand
from interlock.settings import Settings
from interlock.store import sql
from interlock.store.pool import Database, RetryTransaction, Tx
from interlock.store.records import ExternalEvent, WaitingStep
from interlock.telemetry import log, metrics


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to publish. `id` is the sender's own: the same id again in the same workspace is the same event."""

    id: str
    type: str
    correlation: str
    payload: str


async def send(tx: Tx, settings: Settings, plans: Plans, principal: Principal, new: NewEvent) -> ExternalEvent:
    """Store the event and return it. If a step waits for it, deliver it to that step in the same transaction."""
    tenant_id, workspace_id = principal.tenant_id, principal.workspace_id
    if known := await sql.get_event(tx, tenant_id=tenant_id, workspace_id=workspace_id, id=new.id):
        return known
    waiting = await _first_wait(tx, principal, new)
    if waiting is None:
        # A step that subscribes takes the same lock: either we see its subscription now, or it sees the event we
        # store.
        await sql.lock_event(tx, tenant_id=tenant_id, type=new.type, correlation=new.correlation)
        if await _first_wait(tx, principal, new):
            raise RetryTransaction("a step began to wait for the event at the same time")
        await quotas.check_events(tx, settings, tenant_id)
        return _count(tx, await _keep(tx, settings, principal, new), "kept")
    # Lock the run before the subscription, as every code path that ends one does.
    run = await open_run(tx, plans, tenant_id, waiting.run_id)
    if await sql.end_wait(tx, run_id=waiting.run_id, step=waiting.step) is None:
        raise RetryTransaction("another event or a time-out ended the wait at the same time")
    event = await _keep(tx, settings, principal, new, waiting)
    await deliver_command(tx, run, arrival(event, waiting.step))
    return _count(tx, event, "matched")


async def _first_wait(tx: Tx, principal: Principal, new: NewEvent) -> WaitingStep | None:
    return await sql.first_wait(
        tx, tenant_id=principal.tenant_id, type=new.type, correlation=new.correlation,
        workspace_id=principal.workspace_id,
    )  # fmt: skip


async def _keep(
    tx: Tx, settings: Settings, principal: Principal, new: NewEvent, waiting: WaitingStep | None = None
) -> ExternalEvent:
    return await sql.keep_event(
        tx, tenant_id=principal.tenant_id, id=new.id, workspace_id=principal.workspace_id, type=new.type,
        correlation=new.correlation, payload=new.payload, sent_by=principal.actor,
        keep_seconds=settings.event_keep_seconds, run_id=waiting.run_id if waiting else None,
        step=waiting.step if waiting else None,
    )  # fmt: skip


def _count(tx: Tx, event: ExternalEvent, outcome: str) -> ExternalEvent:
    def tell() -> None:
        metrics.events.labels(outcome).inc()
        run_id = str(event.run_id) if event.run_id else None
        log.info(f"event_{outcome}", event_id=event.id, type=event.type, run_id=run_id)

    tx.on_commit(tell)
    return event


async def time_out(tx: Tx, plans: Plans, tenant_id: TenantId, run_id: RunId, step: str) -> None:
    """End a wait because the event did not arrive in time.

    If the event arrives at this moment, only one of the two ends the wait.
    """
    run = await open_run(tx, plans, tenant_id, run_id)
    if await sql.time_out_wait(tx, run_id=run_id, step=step) is None:
        await put_back(tx, run)
        return
    await deliver_command(tx, run, RunCommand(CommandType.MISS, "system:timeout", {}, step=step))


async def forget_expired(database: Database, batch: int = 1000) -> int:
    forgotten = await sql.forget_expired_events(database, most=batch)
    metrics.events.labels("expired").inc(forgotten.unmatched)
    return forgotten.gone


async def listed(
    database: Database, principal: Principal, *, type: str | None = None, correlation: str | None = None,
    matched: bool | None = None, before: int | None = None, limit: int = 50,
) -> list[ExternalEvent]:  # fmt: skip
    return await sql.list_events(
        database, tenant_id=principal.tenant_id, before=before, type=type, correlation=correlation, matched=matched,
        workspace_id=principal.workspace_id, most=limit,
    )  # fmt: skip
