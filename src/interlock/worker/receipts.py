"""Receipts of a run's writes: the intent before the effect, and the result with the step's end."""

from typing import Any
from uuid import UUID

import orjson

from interlock.audit.redact import metadata
from interlock.engine.effects.receipts import UNDO_STEP, EffectIntent, EffectResult
from interlock.engine.writing.change import CompleteReceipt, DeclareIntent
from interlock.ids import ReceiptId, WorkerId, uuid7
from interlock.journal import StepSnapshot, encode
from interlock.lifecycle import ReceiptState, StepEvent
from interlock.tools import RegisteredTool, default_key
from interlock.worker.gate import Allow
from interlock.worker.leased_run import LeasedRun
from interlock.worker.tool_call import PreparedCall


def declare_intent(run: LeasedRun, call: PreparedCall, passed: Allow) -> None:
    """Declare the intent.

    It is committed before the effect starts, so that a crash leaves a record that it may have happened.
    """
    assert call.action is not None
    receipt_id = call.receipt_id = ReceiptId(uuid7())
    key = call.context.idempotency_key
    data = {
        "receipt_id": str(receipt_id), "idempotency_key": key, "digest": call.action.digest, **passed.grounds(),
    }  # fmt: skip
    if call.tool.idempotent:
        data["idempotent"] = True
    run.journal.move_step(call.fold, StepEvent.CLAIM, actor=run.actor, data=data)
    run.effects.append(
        DeclareIntent(EffectIntent(
            id=receipt_id, step=call.fold.step.key, tool=call.tool.name, key=key,
            digest=call.action.digest, attempt=call.fold.attempt, undo=_undo(call),
            approval_id=passed.approval_id,
            request_metadata=_shown(run, call.action.fields, call.tool),
            reverses=_reverses(run, call.fold),
        ))
    )  # fmt: skip


def _undo(call: PreparedCall) -> str | None:
    """Return the tool that reverses the effect. The workflow's choice wins over the tool's."""
    compensation = call.fold.step.undo
    return compensation.tool if compensation is not None else call.tool.undo


def complete_receipt(
    run: LeasedRun,
    fold: StepSnapshot,
    state: ReceiptState,
    output: str | None = None,
    tool: RegisteredTool | None = None,
    error: str | None = None,
) -> None:
    """Complete the receipt in the same transaction as the entry that settles the step."""
    if fold.receipt_id is not None:
        shown = _shown(run, orjson.loads(output), tool) if output and tool else None
        releases = _reverses(run, fold) if state == ReceiptState.FAILED else None
        acting = doubted_by(run, fold) if state == ReceiptState.IN_DOUBT else None
        run.effects.append(
            CompleteReceipt(
                EffectResult(ReceiptId(UUID(fold.receipt_id)), state, output, shown, releases, acting, error)
            )
        )


def doubted_by(run: LeasedRun, fold: StepSnapshot) -> WorkerId | None:
    """Return this worker's id if the call continues in a thread that could not be stopped.

    The outcome of such a call is still open.
    """
    if not run.worker.shop.lease.acts_for(run.lease.run_id, fold.step.key):
        return None
    run.worker.has_left_behind = True
    return run.worker.me.id


def over_cap(run: LeasedRun, fold: StepSnapshot) -> dict[str, Any] | None:
    """Return an error if the run has reached the stricter of its two write caps.

    Retrying a write that was counted is not another write. A compensation does not count either: a run above its cap
    must still be able to undo what it did.
    """
    if fold.step.undoes is not None:
        return None
    caps = {"tenant": run.row.max_writes_per_run, "workflow": run.journal.plan.max_writes_per_run}
    known = [(cap, whose) for whose, cap in caps.items() if cap is not None]
    if not known or fold.receipt_id is not None or run.journal.effects() < min(known)[0]:
        return None
    cap, whose = min(known)
    return {"type": "CapExceeded", "message": f"the run has made as many writes as its {whose} allows ({cap})"}


def effect_of(run: LeasedRun, fold: StepSnapshot) -> str:
    """Return the default name of the step's effect: the root run and the step.

    A run that continues another uses that run's name, because an effect that failed there without an answer may have
    happened. A reversal is named after the effect it reverses, independent of the run that attempts it.
    """
    if (undone := _reverses(run, fold)) is not None:
        return default_key(undone, UNDO_STEP)
    return default_key(run.row.root_id or run.lease.run_id, fold.step.key)


def _reverses(run: LeasedRun, fold: StepSnapshot) -> ReceiptId | None:
    """Return the receipt that the step reverses, if it belongs to a write of this run or of one that it continues."""
    done = run.journal.steps[fold.step.undoes] if fold.step.undoes is not None else None
    receipt_id = (done.receipt_id or done.carried_receipt_id) if done is not None else None
    return ReceiptId(UUID(receipt_id)) if receipt_id is not None else None


def _shown(run: LeasedRun, value: Any, tool: RegisteredTool) -> str:
    return encode(metadata(value, allow=tool.show, salt=run.worker.shop.salts(run.lease.tenant_id)))
