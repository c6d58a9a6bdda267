"""Withdrawing what is pending: the open questions and waits of runs that go no further."""

from collections.abc import Sequence
from functools import partial

from interlock.engine.effects import receipts
from interlock.engine.proof.instrumentation import observe_approval_end
from interlock.ids import RunId
from interlock.store import sql
from interlock.store.pool import Executor


async def withdraw(tx: Executor, run_ids: Sequence[RunId]) -> None:
    """Withdraw the open approvals and event subscriptions of these runs. Their unfinished effects become in doubt."""
    for approval in await sql.withdraw_pending(tx, run_ids=run_ids):
        tx.on_commit(partial(observe_approval_end, approval.status, approval.requested_at, approval.resolved_at))
    await receipts.doubt(tx, run_ids)
