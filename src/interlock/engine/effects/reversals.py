"""Reversals: undoing an effect is a governed run of one step, at most once per receipt."""

from typing import Any

import orjson

from interlock.audit.redact import MARK
from interlock.definition.expression import ExpressionFailed
from interlock.definition.plan import Plan
from interlock.definition.workflow import load
from interlock.engine import workflows
from interlock.engine.access.principal import Principal
from interlock.engine.effects import receipts
from interlock.engine.effects.receipts import UNDO_STEP
from interlock.engine.expression_answers import input_of
from interlock.engine.runs import runs
from interlock.engine.runs.runs import NewRun
from interlock.engine.workflows import Plans
from interlock.engine.writing.load import load_journal
from interlock.errors import Conflict
from interlock.ids import ReceiptId, RunId, TenantId
from interlock.journal import Journal, StepSnapshot
from interlock.lifecycle import ReceiptState
from interlock.store.pool import Database, Row, Tx
from interlock.store.records import RunDetails, RunRecord
from interlock.tools import Registry


async def reverse(
    tx: Tx, database: Database, plans: Plans, tools: Registry, principal: Principal, receipt_id: ReceiptId,
    new_id: RunId, reason: str | None,
) -> tuple[RunDetails, Plan]:  # fmt: skip
    receipt = await receipts.get(tx, principal, receipt_id)
    original = await runs.get(tx, principal, receipt["run_id"])
    if receipt["undo"] is None:
        raise Conflict(f"{receipt['tool']} names no tool that undoes it", code="NOT_REVERSIBLE")
    if receipt["status"] != ReceiptState.SUCCEEDED:
        raise Conflict(f"the receipt is {receipt['status']}; only what happened can be undone", code="NOT_REVERSIBLE")
    claimed = await tx.value("reverse_receipt", receipt_id, principal.tenant_id, new_id, reason, principal.actor)
    if claimed is None:
        raise Conflict(
            f"it was undone already, or is being undone, by run {receipt['reversal_run_id']}", code="ALREADY_REVERSED",
            run_id=str(receipt["reversal_run_id"]),
        )  # fmt: skip
    given, secrets = await _input(tx, plans, tools, original, receipt)
    wanted = {name: f"${{input.{name}}}" for name in given} | secrets
    steps = [{"id": UNDO_STEP, "tool": receipt["undo"], "input": wanted}]
    plan = load({"name": f"undo.{receipt['tool']}".lower(), "steps": steps})
    row = await workflows.keep(tx, database, principal, plan)
    trigger = {"source": "reversal", "ref": str(receipt_id)}
    new = NewRun(new_id, plan.name, row["version"], plan, given, trigger)
    # A new try of a reversal that may have happened is the same effect: see `effect_of`.
    await runs.start_many(tx, principal.within(original.workspace_id), [new], root_id=receipt_id)
    return await runs.get(tx, principal, new_id), plan


async def _input(
    tx: Tx, plans: Plans, tools: Registry, original: RunRecord, receipt: Row
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the input of the tool that undoes the effect, and the secrets as the workflow refers to them.

    Secret values are no longer known, or must not be written into the new run's input.
    """
    undo = tools.find(receipt["undo"])
    if undo is None:
        raise Conflict(f"no tool {receipt['undo']} here; add its file to INTERLOCK_TOOLS", code="TOOL_NOT_FOUND")
    journal = await load_journal(tx, plans, original)
    source, known = await _known(journal, original.tenant_id, receipt)
    done = tools.find(receipt["tool"])
    hidden = {*undo.secret, *(done.secret if done else ()), *source.secrets}
    known = {name: value for name, value in known.items() if name not in hidden and value != MARK}
    fields = undo.arguments.model_fields
    secrets = {name: source.step.input.value[name] for name in source.secrets if name in fields}
    mixed = {str(path[0]) for path, _ in source.step.input.expressions()} & secrets.keys()
    missing = [name for name, field in fields.items() if field.is_required() and name not in {**known, **secrets}]
    missing += sorted(mixed)  # a secret mixed with other values cannot be recovered
    if missing:
        raise Conflict(
            f"{undo.name} needs {', '.join(missing)}, which {receipt['tool']} neither took nor returned; say in the "
            "step's `compensate` where it comes from",
            code="NOT_REVERSIBLE",
        )
    return {name: known[name] for name in fields if name in known}, secrets


async def _known(journal: Journal, tenant_id: TenantId, receipt: Row) -> tuple[StepSnapshot, dict[str, Any]]:
    """Return the input from the step's `compensate`. Without one, match the effect's output and input by name."""
    fold = journal.fold_of(receipt["step"])
    compensation = journal.undos.get(fold.step.undo.key) if fold.step.undo else None
    if compensation is not None and compensation.step.tool == receipt["undo"]:
        try:
            return compensation, await input_of(journal, tenant_id, compensation) or {}
        except ExpressionFailed as error:
            raise Conflict(f"the input of the step's `compensate`: {error}", code="NOT_REVERSIBLE") from None
    called = await input_of(journal, tenant_id, fold) or {}
    returned = orjson.loads(receipt["output"] or "null")
    return fold, {**called, **(returned if isinstance(returned, dict) else {})}
