"""Receipts: intents declared before effects, and the results of those effects."""

from collections import Counter
from dataclasses import dataclass
from uuid import UUID

from interlock.engine.access.principal import Principal
from interlock.errors import NotFound
from interlock.lifecycle import ReceiptState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import metrics

# The only step of a run that reverses an effect.
UNDO_STEP = "undo"


@dataclass(frozen=True, slots=True)
class EffectIntent:
    """An effect that a step will attempt. `approval_id` is the approval that allowed it, if any.

    `reverses` is the receipt of the effect that it undoes.
    """

    id: UUID
    step: str
    tool: str
    key: str
    digest: str
    attempt: int
    request_metadata: str
    undo: str | None = None
    approval_id: UUID | None = None
    reverses: UUID | None = None


@dataclass(frozen=True, slots=True)
class ReceiptResult:
    """The result of an intent."""

    receipt_id: UUID
    status: ReceiptState
    output: str | None = None
    response_metadata: str | None = None
    # The receipt of the effect that was not undone.
    releases: UUID | None = None
    # The worker in which the call still runs, although the step has ended.
    acting_worker: UUID | None = None
    # The error of the attempt, if it was not done or is in doubt.
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ExistingReceipt:
    """An earlier receipt with the same key, which blocks an intent."""

    id: UUID | None
    key: str
    run_id: UUID | None
    step: str | None
    status: ReceiptState
    digest: str | None
    output: str | None


async def get(tx: Tx | Database, principal: Principal, receipt_id: UUID) -> Row:
    row = await tx.row("get_receipt", principal.tenant_id, receipt_id, principal.workspace_id)
    if row is None:
        raise NotFound(f"No receipt {receipt_id}.", code="RECEIPT_NOT_FOUND")
    return row


async def declare_intents(
    tx: Tx, database: Database, intents: list[tuple[UUID, UUID, EffectIntent]]
) -> dict[UUID, ExistingReceipt]:
    """Write the intents of (tenant, run). Return the blocked ones by id, each with the receipt that blocks it."""
    found = await _undone_elsewhere(tx, database, [item for item in intents if item[2].reverses is not None])
    for turn in _turns([item for item in intents if item[2].id not in found]):
        found |= await _attempt(tx, database, turn)
    approved = [(i.approval_id, i.id) for _, _, i in intents if i.approval_id is not None and i.id not in found]
    if approved:
        await tx.fetch("consume_approvals", database.clock(), [a for a, _ in approved], [r for _, r in approved])
    return found


async def _undone_elsewhere(
    tx: Tx, database: Database, intents: list[tuple[UUID, UUID, EffectIntent]]
) -> dict[UUID, ExistingReceipt]:
    """Return the intents of compensations whose effect a reversal already undoes."""
    if not intents:
        return {}
    receipts, runs = [i.reverses for _, _, i in intents], [run for _, run, _ in intents]
    await tx.fetch(
        "claim_reversals", database.clock(), receipts, [tenant for tenant, _, _ in intents], runs,
        [i.step for _, _, i in intents],
    )  # fmt: skip
    others = {row["receipt_id"]: row for row in await tx.fetch("reversed_by_others", receipts, runs)}
    return {
        i.id: ExistingReceipt(
            None, i.key, others[i.reverses]["run_id"], others[i.reverses]["step"],
            ReceiptState.SUCCEEDED if others[i.reverses]["undoing"] == "done" else ReceiptState.ATTEMPTED,
            None, None,
        )
        for _, _, i in intents
        if i.reverses in others
    }  # fmt: skip


async def release(tx: Tx, reversals: list[tuple[UUID, UUID]]) -> None:
    """Release the claims of (receipt, run) on effects that were not undone."""
    await tx.fetch("release_reversals", [receipt for receipt, _ in reversals], [run for _, run in reversals])


def _turns(intents: list[tuple[UUID, UUID, EffectIntent]]) -> list[list[tuple[UUID, UUID, EffectIntent]]]:
    """Split the intents into statements: two runs may want the same effect, and a statement takes each key only once.

    Sorted by key, so that two workers that want the same effects cannot deadlock.
    """
    turns: list[list[tuple[UUID, UUID, EffectIntent]]] = []
    seen: Counter[tuple[UUID, str]] = Counter()
    for item in sorted(intents, key=lambda item: (item[0], item[2].key)):
        place = (item[0], item[2].key)
        if seen[place] == len(turns):
            turns.append([])
        turns[seen[place]].append(item)
        seen[place] += 1
    return turns


async def _attempt(
    tx: Tx, database: Database, intents: list[tuple[UUID, UUID, EffectIntent]]
) -> dict[UUID, ExistingReceipt]:
    rows = await tx.fetch(
        "attempt_effects", database.clock(), [i.id for _, _, i in intents], [t for t, _, _ in intents],
        [r for _, r, _ in intents], [i.step for _, _, i in intents], [i.tool for _, _, i in intents],
        [i.key for _, _, i in intents], [i.digest for _, _, i in intents], [i.attempt for _, _, i in intents],
        [i.request_metadata for _, _, i in intents], [i.undo for _, _, i in intents],
    )  # fmt: skip
    for row in rows:
        if row["goes_ahead"]:
            before = row["status"] or ReceiptState.FAILED
            tx.on_commit(metrics.transition("receipt", before, ReceiptState.ATTEMPTED).inc)
    return {
        row["intent_id"]: ExistingReceipt(
            row["id"], row["idempotency_key"], row["undone_by"] or row["run_id"], row["undone_in"] or row["step"],
            _standing(row), row["action_digest"], row["output"],
        )
        for row in rows
        if not row["goes_ahead"]
    }  # fmt: skip


def _standing(row: Row) -> ReceiptState:
    """Return the state of the blocking receipt, as far as it answers the intent.

    An effect that is being undone counts as attempted. So does a receipt that our snapshot does not contain yet,
    because another run has declared it at this moment.
    """
    under_way = row["undone_by"] is not None or row["status"] is None
    return ReceiptState.ATTEMPTED if under_way else ReceiptState(row["status"])


async def complete_receipts(tx: Tx, database: Database, seals: list[ReceiptResult]) -> None:
    rows = await tx.fetch(
        "seal_receipts", database.clock(), [s.receipt_id for s in seals], [s.status for s in seals],
        [s.output for s in seals], [s.response_metadata for s in seals], [s.acting_worker for s in seals],
        [s.error for s in seals],
    )  # fmt: skip
    _count(tx, rows)


async def doubt(tx: Tx, run_ids: list[UUID]) -> None:
    """Mark the unfinished effects of these ended runs as in doubt."""
    _count(tx, await tx.fetch("doubt_receipts", run_ids))


def _count(tx: Tx, ended: list[Row]) -> None:
    for row in ended:
        tx.on_commit(metrics.transition("receipt", ReceiptState.ATTEMPTED, row["status"]).inc)
