"""Quotas: limits on rows that would otherwise grow for ever, for each kind and tenant.

A quota is compared before a row is added, without a lock: requests at the same moment may exceed it by a few rows.
"""

from interlock.errors import Conflict, RateLimited
from interlock.ids import TenantId
from interlock.settings import Settings
from interlock.store.pool import Tx

_RETRY_AFTER_SECONDS = 60
# The prefix of plan names that `tool_calls.plan_for` makes.
TOOL_CALLS = "tool_call."


class TooManyEvents(RateLimited):
    title, code = "Too many kept events", "TOO_MANY_EVENTS"


async def check_events(tx: Tx, settings: Settings, tenant_id: TenantId) -> None:
    """Raise TooManyEvents if the tenant already keeps the maximum number of events that no step has taken."""
    most = settings.max_kept_events
    if await tx.value("keeps_so_many_events", tenant_id, most):
        raise TooManyEvents(
            f"This tenant keeps {most:,} events that no step has taken (INTERLOCK_MAX_KEPT_EVENTS). Send it again when "
            "steps have taken some, or some have expired.", retry_after=_RETRY_AFTER_SECONDS,
        )  # fmt: skip


async def check_schedules(tx: Tx, settings: Settings, tenant_id: TenantId) -> None:
    """Raise Conflict if the tenant has the maximum number of schedules."""
    most = settings.max_schedules
    if await tx.value("has_so_many_schedules", tenant_id, most):
        raise Conflict(
            f"This tenant has {most:,} schedules (INTERLOCK_MAX_SCHEDULES). Delete one before you add another.",
            code="TOO_MANY_SCHEDULES",
        )


async def check_made_plans(tx: Tx, settings: Settings, tenant_id: TenantId) -> None:
    """Raise Conflict if the engine has recorded the maximum number of single-call plans for the tenant."""
    most = settings.max_tool_call_plans
    if await tx.value("has_so_many_made_plans", tenant_id, TOOL_CALLS, most):
        raise Conflict(
            f"This tenant has called {most:,} combinations of a tool and names of arguments "
            "(INTERLOCK_MAX_TOOL_CALL_PLANS), and this one is new. Check the name of the tool and of its arguments.",
            code="TOO_MANY_TOOL_CALL_PLANS",
        )
