"""Receipts: intents declared before effects, and the results of those effects."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from interlock.engine.access.principal import Principal
from interlock.errors import NotFound
from interlock.ids import ApprovalId, ReceiptId, RunId, TenantId, WorkerId
from interlock.lifecycle import ReceiptState
from interlock.store import sql
from interlock.store.pool import Database, Executor, Row, Tx
from interlock.store.records import DeclaredIntent, NewIntent, ReceiptResult
from interlock.telemetry import metrics

# The only step of a run that reverses an effect.
UNDO_STEP = "undo"


@dataclass(frozen=True, slots=True)
class EffectIntent:
    """An effect that a step will attempt. `approval_id` is the approval that allowed it, if any.

    `reverses` is the receipt of the effect that it undoes.
    """

    id: ReceiptId
    step: str
    tool: str
    key: str
    digest: str
    attempt: int
    request_metadata: str
    undo: str | None = None
    approval_id: ApprovalId | None = None
    reverses: ReceiptId | None = None


@dataclass(frozen=True, slots=True)
class EffectResult:
    """The result of an intent."""

    receipt_id: ReceiptId
    status: ReceiptState
    output: str | None = None
    response_metadata: str | None = None
    # The receipt of the effect that was not undone.
    releases: ReceiptId | None = None
    # The worker in which the call still runs, although the step has ended.
    acting_worker: WorkerId | None = None
    # The error of the attempt, if it was not done or is in doubt.
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ExistingReceipt:
    """An earlier receipt with the same key, which blocks an intent."""

    id: ReceiptId | None
    key: str
    run_id: RunId | None
    step: str | None
    status: ReceiptState
    digest: str | None
    output: str | None


async def get(tx: Tx | Database, principal: Principal, receipt_id: ReceiptId) -> Row:
    row = await tx.row("get_receipt", principal.tenant_id, receipt_id, principal.workspace_id)
    if row is None:
        raise NotFound(f"No receipt {receipt_id}.", code="RECEIPT_NOT_FOUND")
    return row


# An intent with its tenant and its run.
Declared = tuple[TenantId, RunId, EffectIntent]


async def declare_intents(tx: Executor, intents: Sequence[Declared]) -> dict[ReceiptId, ExistingReceipt]:
    """Write the intents. Return the blocked ones by id, each with the receipt that blocks it."""
    blocked = await _reversed_elsewhere(tx, [item for item in intents if item[2].reverses is not None])
    for distinct in _by_key([item for item in intents if item[2].id not in blocked]):
        blocked |= await _attempt(tx, distinct)
    used = [(i.approval_id, i.id) for _, _, i in intents if i.approval_id is not None and i.id not in blocked]
    if used:
        await sql.use_approvals(tx, approval_ids=[a for a, _ in used], receipt_ids=[r for _, r in used])
    return blocked


async def _reversed_elsewhere(tx: Executor, intents: Sequence[Declared]) -> dict[ReceiptId, ExistingReceipt]:
    """Return the intents of compensations whose effect a reversal already undoes."""
    if not intents:
        return {}
    reverses = [(i.reverses, tenant, run, i.step) for tenant, run, i in intents if i.reverses is not None]
    receipt_ids, run_ids = [r[0] for r in reverses], [r[2] for r in reverses]
    await sql.claim_reversals(
        tx,
        receipt_ids=receipt_ids,
        tenant_ids=[r[1] for r in reverses],
        run_ids=run_ids,
        steps=[r[3] for r in reverses],
    )
    others = await sql.reversed_by_others(tx, receipt_ids=receipt_ids, run_ids=run_ids)
    by_receipt = {other.receipt_id: other for other in others}
    return {
        intent.id: ExistingReceipt(
            None, intent.key, other.run_id, other.step,
            ReceiptState.SUCCEEDED if other.state == "done" else ReceiptState.ATTEMPTED, None, None,
        )
        for _, _, intent in intents
        if intent.reverses is not None and (other := by_receipt.get(intent.reverses)) is not None
    }  # fmt: skip


def _by_key(intents: Sequence[Declared]) -> list[list[Declared]]:
    """Split the intents into statements: two runs may want the same effect, and a statement takes each key only once.

    Sorted by key, so that two workers that want the same effects cannot deadlock.
    """
    statements: list[list[Declared]] = []
    seen: Counter[tuple[TenantId, str]] = Counter()
    for item in sorted(intents, key=lambda item: (item[0], item[2].key)):
        key = (item[0], item[2].key)
        if seen[key] == len(statements):
            statements.append([])
        statements[seen[key]].append(item)
        seen[key] += 1
    return statements


async def _attempt(tx: Executor, intents: Sequence[Declared]) -> dict[ReceiptId, ExistingReceipt]:
    declared = await sql.declare_intents(tx, intents=[_new_intent(*item) for item in intents])
    for each in declared:
        if each.goes_ahead:
            before = each.status or ReceiptState.FAILED
            tx.on_commit(metrics.transition("receipt", before, ReceiptState.ATTEMPTED).inc)
    return {
        each.intent_id: ExistingReceipt(
            each.id, each.idempotency_key, each.undone_by or each.run_id, each.undone_in or each.step, _standing(each),
            each.action_digest, each.output,
        )
        for each in declared
        if not each.goes_ahead
    }  # fmt: skip


def _new_intent(tenant_id: TenantId, run_id: RunId, intent: EffectIntent) -> NewIntent:
    return NewIntent(
        intent.id, tenant_id, run_id, intent.step, intent.tool, intent.key, intent.digest, intent.attempt,
        intent.request_metadata, intent.undo,
    )  # fmt: skip


def _standing(declared: DeclaredIntent) -> ReceiptState:
    """Return the state of the blocking receipt, as far as it answers the intent.

    An effect that is being undone counts as attempted. So does a receipt that our snapshot does not contain yet,
    because another run has declared it at this moment.
    """
    if declared.undone_by is not None or declared.status is None:
        return ReceiptState.ATTEMPTED
    return declared.status


async def complete(tx: Executor, results: Sequence[tuple[RunId, EffectResult]]) -> None:
    """Store the results of effects. A reversal that failed gives up its claim on the effect."""
    rows = [
        ReceiptResult(r.receipt_id, r.status, r.output, r.response_metadata, r.acting_worker, r.error)
        for _, r in results
    ]
    _count(tx, await sql.complete_receipts(tx, results=rows))
    released = [(result.releases, run_id) for run_id, result in results if result.releases is not None]
    if released:
        await sql.release_reversals(tx, receipt_ids=[r for r, _ in released], run_ids=[run for _, run in released])


async def doubt(tx: Executor, run_ids: Sequence[RunId]) -> None:
    """Mark the unfinished effects of these ended runs as in doubt."""
    _count(tx, await sql.doubt_receipts(tx, run_ids=run_ids))


def _count(tx: Executor, states: Sequence[str]) -> None:
    for state in states:
        tx.on_commit(metrics.transition("receipt", ReceiptState.ATTEMPTED, state).inc)
