"""Flow deployments: a run whose flow no worker has waits until a worker with that flow claims it."""

from collections.abc import Iterable

from interlock.engine.proof.instrumentation import observe_resumed
from interlock.ids import TenantId
from interlock.store import sql
from interlock.store.pool import Database


async def resume_awaiting(
    database: Database, flows: Iterable[str], actor: str, pools: Iterable[str], tenants: Iterable[TenantId] | None, *,
    most: int,
) -> int:  # fmt: skip
    """Requeue runs that wait for code that this worker has, and that it can claim. Leave the rest to other workers."""
    resumed = await sql.resume_awaiting_runs(
        database, most=most, actor=actor, flows=list(flows), pools=list(pools),
        tenants=None if tenants is None else list(tenants),
    )  # fmt: skip
    observe_resumed(resumed, actor)
    return len(resumed)
