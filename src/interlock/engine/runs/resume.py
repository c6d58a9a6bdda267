"""Resume: a new run that continues a failed one with that one's results."""

from typing import Any
from uuid import UUID

import orjson

from interlock.definition.flow import declaration
from interlock.engine import sessions
from interlock.engine.access.principal import Principal
from interlock.engine.runs.runs import NewRun, begin, get, insert, refused
from interlock.engine.workflows import Plans
from interlock.engine.writing.load import load_journal
from interlock.errors import Conflict
from interlock.ids import ReceiptId, RunId, TenantId
from interlock.journal import NO_OUTPUT, EntryType, Journal, StepSnapshot
from interlock.lifecycle import SETTLED_WELL, ReceiptState, RunState, StepEvent, StepState
from interlock.store import sql
from interlock.store.pool import Executor, Row, Tx
from interlock.store.records import RunRecord

# The effects of the old run by step: receipts of its own and of the runs that it continued.
Effects = dict[str, Row]


async def retry(tx: Tx, plans: Plans, principal: Principal, run_id: RunId, new_id: RunId) -> RunRecord:
    """Start a new run on the same version that continues where the old one stopped."""
    old = await get(tx, principal, run_id)
    if old.status not in (RunState.FAILED, RunState.CANCELED):
        why = f"Only a run that failed or was canceled can be retried. This run is {old.status}."
        raise refused(old.status, "retry", why)
    before = await load_journal(tx, plans, old)
    effects = await _effects_certain(tx, principal.tenant_id, run_id, before)
    session_run = None
    if old.session_id is not None:
        await sessions.lock_idle(tx, old.tenant_id, old.session_id)
        session_run = await sql.count_session_run(tx, session_id=old.session_id)
    new = _successor(old, before, new_id)
    run = await insert(tx, principal, new, resumed=old, session_run=session_run)
    if run.journal is None:
        return run.row  # an earlier try of the same call succeeded
    if old.session_id is not None:
        await sql.answer_message(tx, message_id=None, run_id=new_id, session_id=old.session_id)
    if new.trigger["source"] == "reversal":
        await _hand_over_reversal(tx, old, new)
    carry_over = _carry_over_flow if before.plan.is_dynamic else _carry_over_steps
    carry_over(run.journal, before, old, effects, principal.actor)
    return await begin(tx, run)


def _successor(old: RunRecord, before: Journal, new_id: UUID) -> NewRun:
    # The idempotency key belongs to the request that started the old run, so it is left out.
    trigger = {name: told for name, told in orjson.loads(old.trigger).items() if name != "idempotency_key"}
    return NewRun(
        RunId(new_id), old.workflow, old.workflow_version, before.plan, orjson.loads(old.input or "null"), trigger,
        before.plan.timeout,
    )  # fmt: skip


# ---------------------------------------------------------------- refusals


async def why_refused(database: Executor, tenant_id: TenantId, run_id: RunId, before: Journal) -> str | None:
    """Return why `retry` would refuse a run that failed or was canceled, or None if it would not."""
    try:
        await _effects_certain(database, tenant_id, run_id, before)
    except Conflict as refusal:
        return refusal.detail
    return None


async def _effects_certain(tx: Executor, tenant_id: TenantId, run_id: RunId, before: Journal) -> Effects:
    """Return the old run's effects, if they are certain and were not undone. Raise otherwise."""
    effects = {receipt["step"]: receipt for receipt in await tx.fetch("receipts_behind", tenant_id, run_id)}
    _refuse_without_certainty(before, effects)
    await _refuse_what_others_undid(tx, tenant_id, before)
    return effects


def _refuse_without_certainty(before: Journal, effects: Effects) -> None:
    """Raise unless the old run's effects are certain and were not undone."""
    if before.seq == 0:
        raise Conflict("its journal was dropped by retention; start a new run", code="JOURNAL_GONE")
    if before.is_undoing:
        raise Conflict("it undid what it had done; start a new run", code="RUN_COMPENSATED")
    for receipt in effects.values():
        if receipt["status"] not in (ReceiptState.SUCCEEDED, ReceiptState.FAILED):
            raise Conflict(
                f"step {receipt['step']} may have happened; say first what became of it, at POST "
                f"/api/receipts/{receipt['id']}/resolve", code="EFFECT_IN_DOUBT", receipt_id=str(receipt["id"]),
            )  # fmt: skip
        if receipt["reversal_state"] in ("done", "under_way"):
            raise _undone(receipt["step"], receipt["id"], receipt["reversal_run_id"])


async def _refuse_what_others_undid(tx: Executor, tenant_id: TenantId, before: Journal) -> None:
    """Raise if the old run reused the effect of another run and that effect has been undone since."""
    replayed = [(key, fold.replayed) for key, fold in before.steps.items() if fold.replayed is not None]
    answered = {about["receipt_id"]: key for key, about in replayed if "receipt_id" in about}
    undone = await tx.row("undone_since", tenant_id, list(answered)) if answered else None
    if undone is not None:
        raise _undone(answered[str(undone["receipt_id"])], undone["receipt_id"], undone["run_id"])


def _undone(step: str, receipt_id: ReceiptId, by: UUID) -> Conflict:
    return Conflict(
        f"step {step} was undone, or is being undone, by run {by}; start a new run", code="EFFECT_UNDONE",
        receipt_id=str(receipt_id),
    )  # fmt: skip


async def _hand_over_reversal(tx: Tx, old: RunRecord, new: NewRun) -> None:
    """Let the new run undo the effect that the old one did not. Raise if another run undid it or is doing so."""
    await tx.fetch("hand_over_reversal", old.tenant_id, old.id, new.id)
    try:
        receipt_id = UUID(new.trigger["ref"])
    except (TypeError, ValueError):
        return  # no reversal: any caller may set this source
    other = await tx.value("reversed_since", old.tenant_id, receipt_id, new.id)
    if other not in (None, old.id):
        raise Conflict(f"run {other} undoes it by now", code="ALREADY_REVERSED", run_id=str(other))


# ---------------------------------------------------------------- carried-over results


def _happened(effects: Effects, step: str) -> str | None:
    """Return the output of a step's effect that happened although the step did not succeed.

    The result became known later: the step was interrupted, or failed in doubt.
    """
    effect = effects.get(step)
    return (effect["output"] or NO_OUTPUT) if effect and effect["status"] == ReceiptState.SUCCEEDED else None


def _carry_over_steps(journal: Journal, before: Journal, old: RunRecord, effects: Effects, actor: str) -> None:
    for done in before.steps.values():
        effect = effects.get(done.step.key)
        if done.status in SETTLED_WELL:
            _carry_over(journal, done, done.status, done.output, actor, old.id, effect)
        elif (output := _happened(effects, done.step.key)) is not None:
            _carry_over(journal, done, StepState.SUCCEEDED, output, actor, old.id, effect)


def _carry_over(
    journal: Journal, done: StepSnapshot, status: StepState, output: str | None, actor: str, origin: UUID,
    effect: Row | None,
) -> None:  # fmt: skip
    fold = journal.steps[done.step.key]
    data = {"carried_over_from": str(origin), **(done.replayed or {})}
    if effect is not None:
        data["carried_receipt_id"] = str(effect["id"])
    if status == StepState.SKIPPED:
        journal.move_step(fold, StepEvent.SKIP, actor=actor, data=data)
    else:
        journal.begin(fold)
        journal.move_step(fold, StepEvent.SUCCEED, actor=actor, data=data, output=output)


def _carry_over_flow(journal: Journal, before: Journal, old: RunRecord, effects: Effects, actor: str) -> None:
    """Copy all answers that the flow received, so that it reaches the same point, but not the failure that ended it."""
    ended_by = (orjson.loads(old.error or "null") or {}).get("step")
    for place, (kind, value) in before.values.items():
        journal.note(EntryType.VALUE_RECORDED, actor=actor, data={"place": place, "kind": kind, "value": value})
    for key, done in before.steps.items():
        data: dict[str, Any] = {"carried_over_from": str(old.id), **(done.replayed or {})}
        if done.status == StepState.SUCCEEDED:
            event, output = StepEvent.SUCCEED, done.output
        elif done.status == StepState.SKIPPED or (done.status == StepState.FAILED and key != ended_by):
            event, output = StepEvent.SKIP if done.status == StepState.SKIPPED else StepEvent.FAIL, done.output
            data |= {"reason": done.reason, "error": done.last_error}
        elif (output := _happened(effects, key)) is not None:
            event = StepEvent.SUCCEED
        else:
            continue
        fold = journal.declare(done.step, declaration(done.step, with_input=done.step.input.value is not None))
        if event != StepEvent.SKIP:
            journal.begin(fold)
        journal.move_step(fold, event, actor=actor, data=data, output=output)
