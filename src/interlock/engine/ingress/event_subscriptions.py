"""Event subscriptions: one row for each step that waits for an external event."""

from collections.abc import Sequence

from interlock.ids import RunId, TenantId
from interlock.journal import CommandType, EventSubscription, RunCommand
from interlock.store import sql
from interlock.store.pool import Executor
from interlock.store.records import ArrivedEvent, ExternalEvent, NewSubscription


async def begin(
    tx: Executor, waiting: Sequence[tuple[TenantId, RunId, EventSubscription]]
) -> list[tuple[RunId, RunCommand]]:
    """Subscribe the steps. Return commands for the events that had already arrived.

    Such an event is delivered at once, and its step gets no subscription.
    """
    new = [NewSubscription(tenant, run, w.step, w.type, w.correlation, w.timeout_at) for tenant, run, w in waiting]
    arrived = await sql.await_events(tx, subscriptions=new)
    return [(event.run_id, arrival(event, event.step)) for event in arrived]


def arrival(event: ArrivedEvent | ExternalEvent, step: str) -> RunCommand:
    """Return the command that delivers an event to a step."""
    about = {"type": event.type, "id": event.id, "correlation": event.correlation}
    about["received_at"] = event.received_at.isoformat()
    return RunCommand(CommandType.ARRIVE, event.sent_by, {"event": about, "payload": event.payload}, step=step)
