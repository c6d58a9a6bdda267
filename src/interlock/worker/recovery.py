"""Recovery: what was cut off is begun again where that is safe; else a person is asked."""

import asyncio
import time
from functools import partial
from inspect import iscoroutinefunction
from uuid import UUID

from interlock.engine.receipts import Seal
from interlock.governance.action import ProposedAction
from interlock.journal import AskKind, EntryType, StepFold, ask
from interlock.lifecycle import ReceiptState, RunReason, StepEvent, Tier
from interlock.store.pool import Row
from interlock.telemetry import scrubbed_lines
from interlock.tools import Canceled, DidNotHappen, Happened
from interlock.worker.call import Call, Workshop
from interlock.worker.executor import fill, finish, told_to_stop
from interlock.worker.held import HeldRun
from interlock.worker.passage import Passage
from interlock.worker.settle import Settler
from interlock.worker.threads import ask_in_thread

_CUT_OFF = "the worker was lost or the call was cut off"
_RECONCILE_SECONDS = 60.0


class Recovery:
    """A write is begun again if nothing was attempted, the tool is idempotent, or its system says it did not happen."""

    __slots__ = ("_passage", "_run", "_settler")

    def __init__(self, run: HeldRun, passage: Passage, settler: Settler) -> None:
        self._run = run
        self._passage = passage
        self._settler = settler

    async def reclaim(self, fold: StepFold) -> None:
        """Begun again, and counted: no step kills workers for ever."""
        if fold.reclaims >= self._run.worker.settings.max_reclaims:
            message = f"its worker was lost {fold.reclaims + 1} times"
            error = {"type": "Orphaned", "message": message, "code": "RUN_ORPHANED"}
            self._settler.fail(fold, error, RunReason.ORPHANED, receipt=ReceiptState.IN_DOUBT)
        elif fold.receipt_id is None or await self.may_repeat(fold):
            data = {"receipt_id": fold.receipt_id} if fold.receipt_id else None
            self._run.journal.move_step(fold, StepEvent.RECLAIM, actor=self._run.actor, data=data)

    async def may_repeat(self, fold: StepFold) -> bool:
        """An effect was under way. True if it may be attempted again; else its outcome was recorded."""
        shop, call = self._run.worker.shop, self._passage.prepare(fold)
        if isinstance(call, Call) and (call.action is None or call.action.digest != fold.declared_digest):
            # Of another action neither its key nor its `reconcile` says anything about the one that was begun.
            self.doubt(fold, call.action, f"{_CUT_OFF}, and the tool was changed since")
            return False
        if isinstance(call, Call) and call.tool.idempotent:
            return True
        answer = await reconcile(shop, call) if isinstance(call, Call) else None
        match answer:
            case DidNotHappen():
                return True
            case Happened(output):
                assert isinstance(call, Call)
                self._settler.settle(call, finish(shop, call, output), time.perf_counter(), reconciled=True)
            case None:
                self.doubt(fold, call.action if isinstance(call, Call) else None)
        return False

    def doubt(self, fold: StepFold, action: ProposedAction | None, why: str = _CUT_OFF) -> None:
        """Nobody knows whether it happened: a person has to find out and say."""
        assert fold.receipt_id is not None
        self._run.seals.append(Seal(UUID(fold.receipt_id), ReceiptState.IN_DOUBT))
        shown = action.as_dict() if action else {"tool": fold.step.tool, "fields": {}}
        self._run.asks.append(
            ask(
                self._run.journal, fold, StepEvent.HOLD, AskKind.IN_DOUBT, tier=Tier.HIGH, two_person=False,
                expires_in=30 * 86400.0, summary=f"{fold.step.tool} was interrupted. Did it happen?", action=shown,
                digest=fold.receipt_id, receipt_id=fold.receipt_id, reason=why,
            )
        )  # fmt: skip


async def reconcile(shop: Workshop, call: Call) -> Happened | DidNotHappen | None:
    """Ask the system that was acted on. None: it cannot be asked, or did not know."""
    if call.tool.reconcile is None:
        return None
    args = (call.context,) if call.tool.wants_context else ()
    try:
        async with asyncio.timeout(call.timeout or _RECONCILE_SECONDS):
            ask = partial(call.tool.reconcile, *args, **await fill(shop, call))
            with scrubbed_lines(call.context.scrub):
                # A plain function runs in a thread: while it waits for the other system, the other runs go on.
                plain = not iscoroutinefunction(call.tool.reconcile)
                answer = await ask_in_thread(shop, call.tool, ask) if plain else ask()
                answer = await answer if asyncio.iscoroutine(answer) else answer
    except (asyncio.CancelledError, Canceled, Exception, SystemExit) as error:
        if isinstance(error, asyncio.CancelledError) and told_to_stop():
            raise
        call.context.log.warning("reconcile_failed", error=str(error))
        return None
    return answer if isinstance(answer, (Happened, DidNotHappen)) else None


def nobody_went_on(entries: list[Row]) -> bool:
    """The last that was written under a lease is that it was lost.

    Asked of the journal and not of the claim: its answer can get lost, and a holder can give the run back untouched.
    """
    return next((e["type"] for e in reversed(entries) if e["token"]), None) == EntryType.ORPHAN_DETECTED
