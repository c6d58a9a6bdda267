"""Receipts of a run's writes: the intent before the effect, and the seal with the step's end."""

from typing import Any
from uuid import UUID

import orjson

from interlock.engine.receipts import UNDO_STEP, Intent, Seal
from interlock.governance.redact import metadata
from interlock.ids import uuid7
from interlock.journal import StepFold, encode
from interlock.lifecycle import ReceiptState, StepEvent
from interlock.tools import Tool, default_key
from interlock.worker.call import Call
from interlock.worker.gate import Pass
from interlock.worker.held import HeldRun


def declare(run: HeldRun, call: Call, passed: Pass) -> None:
    """The intent is committed before the effect begins, so that after a crash we know that it may have happened."""
    assert call.action is not None
    call.receipt_id = uuid7()
    key = call.context.idempotency_key
    data = {
        "receipt_id": str(call.receipt_id), "idempotency_key": key, "digest": call.action.digest, **passed.grounds(),
    }  # fmt: skip
    if call.tool.idempotent:
        data["idempotent"] = True
    run.journal.move_step(call.fold, StepEvent.CLAIM, actor=run.actor, data=data)
    run.intents.append(
        Intent(
            id=call.receipt_id, step=call.fold.step.key, tool=call.tool.name, key=key,
            digest=call.action.digest, attempt=call.fold.attempt, undo=_undo(call),
            approval_id=passed.approval_id,
            request_metadata=_shown(run, call.action.fields, call.tool),
            reverses=_reverses(run, call.fold),
        )
    )  # fmt: skip


def _undo(call: Call) -> str | None:
    """The tool that takes it back: the workflow knows better than the tool what that takes here."""
    compensation = call.fold.step.undo
    return compensation.tool if compensation is not None else call.tool.undo


def seal(
    run: HeldRun, fold: StepFold, state: ReceiptState, output: str | None = None, tool: Tool | None = None
) -> None:
    """With the entry that settles the step, in one transaction."""
    if fold.receipt_id is not None:
        shown = _shown(run, orjson.loads(output), tool) if output and tool else None
        releases = _reverses(run, fold) if state == ReceiptState.FAILED else None
        run.seals.append(Seal(UUID(fold.receipt_id), state, output, shown, releases))


def over_cap(run: HeldRun, fold: StepFold) -> dict[str, Any] | None:
    """Against the stricter of two caps. Another try at a write that was counted is not another write.

    What undoes one is none either: a run that went over its cap must still be able to take back what it did.
    """
    if fold.step.undoes is not None:
        return None
    caps = {"tenant": run.row["max_writes_per_run"], "workflow": run.journal.plan.max_writes_per_run}
    known = [(cap, whose) for whose, cap in caps.items() if cap is not None]
    if not known or fold.receipt_id is not None or run.journal.effects() < min(known)[0]:
        return None
    cap, whose = min(known)
    return {"type": "CapExceeded", "message": f"the run made {cap} writes, as many as its {whose} allows"}


def effect_of(run: HeldRun, fold: StepFold) -> str:
    """What its effect is called, unless its tool says: by run and step.

    A run that continues another calls it as that one did: what failed there for want of an answer may have happened.
    So what undoes an effect is called by what it undoes, whichever run tries it.
    """
    if (undone := _reverses(run, fold)) is not None:
        return default_key(undone, UNDO_STEP)
    return default_key(run.row["root_id"] or run.lease.run_id, fold.step.key)


def _reverses(run: HeldRun, fold: StepFold) -> UUID | None:
    """The receipt of what it undoes, if that was a write of this run or of one that it continues."""
    done = run.journal.steps[fold.step.undoes] if fold.step.undoes is not None else None
    receipt_id = (done.receipt_id or done.carried_receipt_id) if done is not None else None
    return UUID(receipt_id) if receipt_id is not None else None


def _shown(run: HeldRun, value: Any, tool: Tool) -> str:
    return encode(metadata(value, allow=tool.show, salt=run.worker.shop.salts(run.lease.tenant_id)))
