"""Recovery: interrupted calls start again where that is safe; otherwise a person decides."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from inspect import iscoroutinefunction
from typing import Any
from uuid import UUID

from interlock.engine.effects.receipts import EffectResult
from interlock.engine.writing.change import CompleteReceipt, OpenApproval
from interlock.ids import ReceiptId, RunId
from interlock.journal import ApprovalKind, EntryType, StepSnapshot, request_approval
from interlock.lifecycle import ReceiptState, RunReason, StepEvent, Tier, WorkerEvent, fires
from interlock.policy.action import ProposedAction
from interlock.store.records import EntryRecord
from interlock.telemetry import scrubbed_lines
from interlock.tools import Canceled, DidNotHappen, Happened
from interlock.worker.admission import Admission
from interlock.worker.executor import fill, finish, told_to_stop
from interlock.worker.leased_run import LeasedRun
from interlock.worker.receipts import doubted_by
from interlock.worker.step_recorder import StepRecorder
from interlock.worker.thread_runner import ask_in_thread
from interlock.worker.tool_call import ExecutionResources, PreparedCall

_CUT_OFF = "the worker was lost or stopped while the call was under way"
_RECONCILE_SECONDS = 60.0


class Recovery:
    """Restarts interrupted writes where that is safe.

    It is safe if nothing was attempted, the tool is idempotent, or the other system says that the effect did not
    happen.
    """

    __slots__ = ("_passage", "_run", "_settler")

    def __init__(self, run: LeasedRun, passage: Admission, settler: StepRecorder) -> None:
        self._run = run
        self._passage = passage
        self._settler = settler

    async def reclaim(self, fold: StepSnapshot) -> None:
        """Restart the step, and count it so that no step can kill workers for ever."""
        if fold.receipt_id is None and not fold.idempotent:
            message = (
                f"the worker was lost or stopped while {fold.step.tool} was under way, and the tool is declared "
                "idempotent=False; retry the run to call it again"
            )
            error = {"type": "NotIdempotent", "message": message, "code": "RUN_RESUME_FAILED"}
            self._settler.fail(fold, error, RunReason.RESUME_FAILED)
        elif fold.reclaims >= self._run.worker.settings.max_reclaims:
            message = f"its worker was lost {fold.reclaims + 1} times"
            error = {"type": "Orphaned", "message": message, "code": "RUN_ORPHANED"}
            self._settler.fail(fold, error, RunReason.ORPHANED, receipt=ReceiptState.IN_DOUBT)
        elif fold.receipt_id is None or await self.can_reattempt(fold):
            data = {"receipt_id": fold.receipt_id} if fold.receipt_id else None
            event = StepEvent(fires("worker", WorkerEvent.TERMINATE, "step"))
            self._run.journal.move_step(fold, event, actor=self._run.actor, data=data)

    async def can_reattempt(
        self, fold: StepSnapshot, error: Mapping[str, Any] | None = None, *, after_restore_to: str | None = None
    ) -> bool:
        """Decide whether an effect may be attempted again, and record its outcome if not.

        The effect was interrupted, or may have happened before the database was restored to an earlier moment. Return
        True if it may be attempted again. `error` is the error that the call ended with, if it ended.
        """
        shop, call = self._run.worker.shop, await self._passage.prepare(fold)
        if isinstance(call, PreparedCall) and (call.action is None or call.action.digest != fold.declared_digest):
            # The action differs, so neither its key nor its `reconcile` says anything about the interrupted one.
            self.doubt(fold, call.action, error, why=f"{_ended(error)}, and the tool was changed since")
            return False
        if isinstance(call, PreparedCall) and call.tool.idempotent:
            return True
        answer = await reconcile(shop, call) if isinstance(call, PreparedCall) else None
        match answer:
            case DidNotHappen():
                return True
            case Happened(output):
                assert isinstance(call, PreparedCall)
                self._settler.settle(call, finish(shop, call, output), time.perf_counter(), reconciled=True)
            case None:
                action = call.action if isinstance(call, PreparedCall) else None
                if after_restore_to is None:
                    self.doubt(fold, action, error)
                else:
                    why = f"The database was restored to {after_restore_to}; this may already have been done."
                    summary = f"Was {fold.step.tool} done before the database was restored?"
                    self.doubt(fold, action, error, why=why, summary=summary)
        return False

    def doubt(
        self, fold: StepSnapshot, action: ProposedAction | None, error: Mapping[str, Any] | None = None, *,
        why: str | None = None, summary: str | None = None,
    ) -> None:  # fmt: skip
        """Mark the effect in doubt and ask a person, showing the error that the call ended with."""
        assert fold.receipt_id is not None
        why = why or _ended(error)
        acting = doubted_by(self._run, fold)
        receipt_id = ReceiptId(UUID(fold.receipt_id))
        result = EffectResult(receipt_id, ReceiptState.IN_DOUBT, acting_worker=acting, error=why)
        self._run.effects.append(CompleteReceipt(result))
        shown = action.as_dict() if action else {"tool": fold.step.tool, "fields": {}}
        self._run.effects.append(
            OpenApproval(request_approval(
                self._run.journal, fold, StepEvent.HOLD, ApprovalKind.IN_DOUBT, tier=Tier.HIGH, two_person=False,
                expires_in=30 * 86400.0, summary=summary or f"{fold.step.tool} was interrupted. Did it happen?",
                action=shown, digest=fold.receipt_id, receipt_id=fold.receipt_id, reason=why,
                data={"error": error} if error else None,
            ))
        )  # fmt: skip


def _ended(error: Mapping[str, Any] | None) -> str:
    return f"the call ended with {error['type']}: {error['message']}" if error else _CUT_OFF


async def reconcile(shop: ExecutionResources, call: PreparedCall) -> Happened | DidNotHappen | None:
    """Ask the other system whether the effect happened. Return None if it cannot be asked or does not know."""
    if call.tool.reconcile is None:
        return None
    args = (call.context,) if call.tool.wants_context else ()
    try:
        async with asyncio.timeout(call.timeout or _RECONCILE_SECONDS):
            ask = partial(call.tool.reconcile, *args, **await fill(shop, call))
            about = call.context
            with shop.lease.acting(RunId(about.run_id), about.step, call.tool.name), scrubbed_lines(about.scrub):
                # A plain function runs in a thread, so that other runs continue while it waits for the other system.
                plain = not iscoroutinefunction(call.tool.reconcile)
                answer = await ask_in_thread(shop, call.tool, ask) if plain else ask()
                answer = await answer if asyncio.iscoroutine(answer) else answer
    except (asyncio.CancelledError, Canceled, Exception, SystemExit) as error:
        if isinstance(error, asyncio.CancelledError) and told_to_stop():
            raise
        call.context.log.warning("reconcile_failed", error=str(error))
        return None
    return answer if isinstance(answer, (Happened, DidNotHappen)) else None


def was_orphaned(entries: list[EntryRecord]) -> bool:
    """Return True if the last entry written under a lease says that the lease was lost.

    The journal decides, not the claim: the claim's answer can get lost, and a holder can release the run untouched.
    """
    return next((e.type for e in reversed(entries) if e.token), None) == EntryType.ORPHAN_DETECTED
