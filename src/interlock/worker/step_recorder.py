"""The step recorder: writes the start of a step and its outcome."""

import random
import time
from datetime import timedelta
from typing import Any

from interlock.definition.plan import StepKind
from interlock.engine.effects.receipts import ExistingReceipt
from interlock.journal import NO_OUTPUT, StepSnapshot
from interlock.lifecycle import ReceiptState, RunReason, StepEvent, StepState
from interlock.telemetry import metrics
from interlock.tools import Context
from interlock.worker.crash_quarantine import end_trial
from interlock.worker.leased_run import LeasedRun
from interlock.worker.outcome import CallOutcome, Done, Failed, Interrupted
from interlock.worker.progress import ProgressReporter
from interlock.worker.receipts import complete_receipt
from interlock.worker.tool_call import PreparedCall

# The delay before checking again an effect that another run is executing.
_LOOK_SECONDS = 1.0


class StepRecorder:
    __slots__ = ("_run", "_teller", "has_begun")

    def __init__(self, run: LeasedRun, teller: ProgressReporter) -> None:
        self._run = run
        self._teller = teller
        # Whether this worker has started any step of the run.
        self.has_begun = False

    def begin(self, fold: StepSnapshot) -> float:
        self.has_begun = True
        if fold.status == StepState.PENDING:
            self._run.journal.begin(fold)
        return time.perf_counter()

    def settle(self, call: PreparedCall, outcome: CallOutcome, began: float, *, reconciled: bool = False) -> None:
        run, fold, duration_ms = self._run, call.fold, _elapsed_ms(began)
        end_trial(run)
        self._teller.forget_slow(fold)
        metrics.step_took(fold.step.tool, type(outcome).__name__.lower()).observe(duration_ms / 1000)
        match outcome:
            case Done(output, context):
                data: dict[str, object] = {"duration_ms": duration_ms, **_costs(context)}
                if context._idempotency_key:
                    data["idempotency_key"] = context._idempotency_key
                data |= call.grounds or {}
                if reconciled:
                    data["reconciled"] = True
                complete_receipt(run, fold, ReceiptState.SUCCEEDED, output, call.tool)
                self._teller.tell_rest(fold)
                run.journal.move_step(fold, StepEvent.SUCCEED, actor=run.actor, data=data, output=output)
                if fold.step.kind is StepKind.MODEL:
                    self._teller.tell_whole(fold)
            case Failed():
                self.settle_failure(fold, outcome, duration_ms, call.grounds)
            case Interrupted(begun):
                self._teller.tell_rest(fold)
                in_doubt = fold.receipt_id is not None and begun
                # An effect that may be repeated needs no person to find out its outcome.
                complete_receipt(
                    run, fold, ReceiptState.IN_DOUBT if in_doubt and not call.tool.idempotent else ReceiptState.FAILED
                )
                ended = {"duration_ms": duration_ms} | ({"in_doubt": True} if in_doubt else {})
                run.journal.move_step(fold, StepEvent.CANCEL, actor=run.actor, data=ended)

    def settle_failure(
        self, fold: StepSnapshot, failed: Failed, duration_ms: float = 0.0, grounds: dict[str, Any] | None = None
    ) -> None:
        run = self._run
        self._teller.forget_said()
        data: dict[str, object] = {"duration_ms": duration_ms, "error": failed.error, **_costs(failed.context)}
        data |= grounds or {}
        complete_receipt(run, fold, ReceiptState.FAILED, error=failed.error.get("message"))
        failures = fold.failures + 1
        retry = fold.step.retry
        if failed.retryable and failures < retry.max_attempts:
            delay = max(retry.delay(failures, random.random()), failed.after or 0)
            data["next_run_at"] = run.now() + timedelta(seconds=delay)
            run.journal.move_step(fold, StepEvent.RETRY, actor=run.actor, data=data)
            return
        data["reason"] = RunReason.ATTEMPTS_EXHAUSTED if failed.retryable else RunReason.TERMINAL_ERROR
        run.journal.move_step(fold, StepEvent.FAIL, actor=run.actor, data=data)

    def fail(
        self, fold: StepSnapshot, error: dict[str, Any], reason: RunReason, *,
        receipt: ReceiptState = ReceiptState.FAILED, **more: Any,
    ) -> None:  # fmt: skip
        complete_receipt(self._run, fold, receipt, error=error.get("message"))
        in_doubt = fold.receipt_id is not None and receipt == ReceiptState.IN_DOUBT
        data = {"error": error, "reason": reason, **({"in_doubt": True} if in_doubt else {}), **more}
        self._run.journal.move_step(fold, StepEvent.FAIL, actor=self._run.actor, data=data)

    def settle_from(self, call: PreparedCall, prior: ExistingReceipt) -> None:
        """Settle a step whose key was used before.

        The key belongs to this very effect, or to another, which is an error that people must see.
        """
        fold = call.fold
        if call.action is None or prior.digest not in (call.action.digest, None):
            message = (
                f"the idempotency key {prior.key} was used for another action (run {prior.run_id}, step {prior.step})"
            )
            self.fail(fold, {"type": "ReceiptConflict", "message": message}, RunReason.TERMINAL_ERROR)
        elif prior.status == ReceiptState.SUCCEEDED:
            data = {"replayed_from": str(prior.run_id)} | ({"receipt_id": str(prior.id)} if prior.id else {})
            output = prior.output or NO_OUTPUT
            self._run.journal.move_step(fold, StepEvent.SUCCEED, actor=self._run.actor, data=data, output=output)
        else:
            where = f"run {prior.run_id}, step {prior.step}" if prior.run_id else "another run"
            message = f"the same effect is {prior.status} in {where}"
            self.settle_failure(fold, Failed({"type": "EffectUnderWay", "message": message}, True, _LOOK_SECONDS, None))


def _costs(context: Context | None) -> dict[str, object]:
    return {"cost_usd": context.cost_usd, "costs": context.costs} if context and context.costs else {}


def _elapsed_ms(since: float) -> float:
    return round((time.perf_counter() - since) * 1000, 3)
