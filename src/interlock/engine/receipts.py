"""Receipts: intents declared before effects, and what became of them."""

from collections import Counter
from dataclasses import dataclass
from uuid import UUID

from interlock.lifecycle import ReceiptState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import metrics

# The one step of a run that was started to undo an effect.
UNDO_STEP = "undo"


@dataclass(frozen=True, slots=True)
class Intent:
    """An effect that is about to be attempted. `approval_id` is what allowed it, if people did.

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
class Seal:
    """What became of an intent."""

    receipt_id: UUID
    status: ReceiptState
    output: str | None = None
    response_metadata: str | None = None
    # The receipt of the effect that was not undone.
    releases: UUID | None = None


@dataclass(frozen=True, slots=True)
class Prior:
    """The receipt that stands in an intent's way: the same key was used before."""

    id: UUID | None
    key: str
    run_id: UUID | None
    step: str | None
    status: ReceiptState
    digest: str | None
    output: str | None


async def attempt(tx: Tx, database: Database, intents: list[tuple[UUID, UUID, Intent]]) -> dict[UUID, Prior]:
    """Write the intents of (tenant, run). Those that may not go ahead are returned by id, with what is in the way."""
    found = await _undone_elsewhere(tx, database, [item for item in intents if item[2].reverses is not None])
    for turn in _turns([item for item in intents if item[2].id not in found]):
        found |= await _attempt(tx, database, turn)
    approved = [(i.approval_id, i.id) for _, _, i in intents if i.approval_id is not None and i.id not in found]
    if approved:
        await tx.fetch("consume_approvals", database.clock(), [a for a, _ in approved], [r for _, r in approved])
    return found


async def _undone_elsewhere(tx: Tx, database: Database, intents: list[tuple[UUID, UUID, Intent]]) -> dict[UUID, Prior]:
    """Somebody asked for a reversal of the same effect before the run came to undo it."""
    if not intents:
        return {}
    receipts, runs = [i.reverses for _, _, i in intents], [run for _, run, _ in intents]
    await tx.fetch(
        "claim_reversals", database.clock(), receipts, [tenant for tenant, _, _ in intents], runs,
        [i.step for _, _, i in intents],
    )  # fmt: skip
    others = {row["receipt_id"]: row for row in await tx.fetch("reversed_by_others", receipts, runs)}
    return {
        i.id: Prior(
            None, i.key, others[i.reverses]["run_id"], others[i.reverses]["step"],
            ReceiptState.SUCCEEDED if others[i.reverses]["undoing"] == "done" else ReceiptState.ATTEMPTED,
            None, None,
        )
        for _, _, i in intents
        if i.reverses in others
    }  # fmt: skip


async def release(tx: Tx, reversals: list[tuple[UUID, UUID]]) -> None:
    """These effects, of (receipt, run), were not undone."""
    await tx.fetch("release_reversals", [receipt for receipt, _ in reversals], [run for _, run in reversals])


def _turns(intents: list[tuple[UUID, UUID, Intent]]) -> list[list[tuple[UUID, UUID, Intent]]]:
    """Two runs may want the same effect at the same moment: a statement can have a key once, the next one sees it.

    In the order of their keys, so that two workers that want the same effects do not wait for each other.
    """
    turns: list[list[tuple[UUID, UUID, Intent]]] = []
    seen: Counter[tuple[UUID, str]] = Counter()
    for item in sorted(intents, key=lambda item: (item[0], item[2].key)):
        place = (item[0], item[2].key)
        if seen[place] == len(turns):
            turns.append([])
        turns[seen[place]].append(item)
        seen[place] += 1
    return turns


async def _attempt(tx: Tx, database: Database, intents: list[tuple[UUID, UUID, Intent]]) -> dict[UUID, Prior]:
    rows = await tx.fetch(
        "attempt_effects", database.clock(), [i.id for _, _, i in intents], [t for t, _, _ in intents],
        [r for _, r, _ in intents], [i.step for _, _, i in intents], [i.tool for _, _, i in intents],
        [i.key for _, _, i in intents], [i.digest for _, _, i in intents], [i.attempt for _, _, i in intents],
        [i.request_metadata for _, _, i in intents], [i.undo for _, _, i in intents],
    )  # fmt: skip
    for row in rows:
        if row["goes_ahead"]:
            before = row["status"] or ReceiptState.FAILED
            tx.afterwards(metrics.transition("receipt", before, ReceiptState.ATTEMPTED).inc)
    return {
        row["intent_id"]: Prior(
            row["id"], row["idempotency_key"], row["undone_by"] or row["run_id"], row["undone_in"] or row["step"],
            _standing(row), row["action_digest"], row["output"],
        )
        for row in rows
        if not row["goes_ahead"]
    }  # fmt: skip


def _standing(row: Row) -> ReceiptState:
    """What is being undone is as little an answer as what is being done. So is what is not there yet in our snapshot:
    another run has declared it at this very moment.
    """
    under_way = row["undone_by"] is not None or row["status"] is None
    return ReceiptState.ATTEMPTED if under_way else ReceiptState(row["status"])


async def seal(tx: Tx, database: Database, seals: list[Seal]) -> None:
    rows = await tx.fetch(
        "seal_receipts", database.clock(), [s.receipt_id for s in seals], [s.status for s in seals],
        [s.output for s in seals], [s.response_metadata for s in seals],
    )  # fmt: skip
    _count(tx, rows)


async def doubt(tx: Tx, run_ids: list[UUID]) -> None:
    """These runs ended: what they had begun and nobody saw the end of may have happened."""
    _count(tx, await tx.fetch("doubt_receipts", run_ids))


def _count(tx: Tx, ended: list[Row]) -> None:
    for row in ended:
        tx.afterwards(metrics.transition("receipt", ReceiptState.ATTEMPTED, row["status"]).inc)
