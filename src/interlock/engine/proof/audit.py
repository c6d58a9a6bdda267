"""Audit: extend each tenant's chain in batches, off the hot path, and verify it from its start."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from interlock.audit.chain import (
    GENESIS,
    Break,
    Checkpoint,
    LinkedEntry,
    Verdict,
    Verifier,
    link,
    missing_link,
    next_checkpoint,
    utc,
)
from interlock.audit.keys import Keyring, SigningKey
from interlock.engine.access.key_store import Signing
from interlock.engine.proof import state_durations
from interlock.ids import RunId, TenantId
from interlock.journal import EntryType
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log

_PIECE = 1000
_NO_ID = UUID(int=0)


# ---------------------------------------------------------------- sealing


async def link_entries(database: Database, key: SigningKey, batch: int = 5000) -> int:
    """Seal one batch, write a checkpoint for each tenant in it, and return the number of sealed entries.

    Returns 0 if no entry waits or another process is sealing. If it returns `batch` or more, more entries may wait.
    """

    async def work(tx: Tx) -> int:
        if not await tx.value("lock_sealer"):
            return 0
        taken = await tx.fetch("take_unsealed", batch)
        if taken:
            pages = await _pages(tx, {row["tenant_id"] for row in taken})
            # Hashing thousands of entries would block the other tasks of this event loop.
            await asyncio.to_thread(_extend_chain, pages, taken, key)
            await _save(tx, list(pages.values()))
            await _note_ended(tx, taken)
            await state_durations.measure(tx, taken)
        return len(taken)

    return await database.run_in_transaction(work)


async def seal_all(database: Database, signing: Signing, batch: int = 5000) -> int:
    """Seal all waiting entries. Returns 0 without the signing key: processes that have it seal instead."""
    key = signing.key()
    total = 0
    while key is not None and (sealed := await link_entries(database, key, batch)):
        total += sealed
        if sealed < batch:
            break
    return total


async def is_begun(database: Database) -> bool:
    """Return whether any process has sealed an entry, with any key."""
    begun: bool = await database.value("is_chain_begun")
    return begun


async def release(database: Database, key: SigningKey, floor: UUID) -> bool:
    """Sign that entries of runs below `floor` may be removed. Retention asks first; False means not yet."""

    async def work(tx: Tx) -> bool:
        if not await tx.value("lock_sealer") or await tx.value("unsealed_below", floor):
            return False
        pages = await _pages(tx, {row["id"] for row in await tx.fetch("chained_tenants")})
        open_pages = [page for page in pages.values() if page.last is not None]
        for page in open_pages:
            page.sign(key, released=str(floor))
        await _save(tx, open_pages)
        return True

    return await database.run_in_transaction(work)


@dataclass(slots=True)
class _ChainBatch:
    """The additions of one batch to one tenant's chain."""

    tenant_id: TenantId
    now: datetime
    last: Checkpoint | None
    position: int
    head: bytes
    added: list[tuple[UUID, int, UUID, int, bytes]] = field(default_factory=list)
    checkpoint: Checkpoint | None = None

    def add(self, row: Row) -> None:
        run_id, seq = row["run_id"], row["seq"]
        if row["type"] is None:
            log.error("entry_missing", run_id=str(run_id), seq=seq, detail="it was deleted before it was sealed")
            self.head = missing_link(self.head, run_id, seq)
        else:
            self.head = link(self.head, row)
        self.position += 1
        self.added.append((self.tenant_id, self.position, run_id, seq, self.head))

    def sign(self, key: SigningKey, released: str | None = None) -> None:
        self.checkpoint = next_checkpoint(
            key,
            self.last,
            tenant_id=str(self.tenant_id),
            position=self.position,
            head=self.head,
            at=self.now,
            released=released,
        )


async def _pages(tx: Tx, tenants: Iterable[TenantId]) -> dict[UUID, _ChainBatch]:
    rows = await tx.fetch("last_checkpoints", list(tenants))
    return {row["chain"]: _page(row) for row in rows}


def _page(row: Row) -> _ChainBatch:
    if row["number"] is None:
        return _ChainBatch(row["chain"], row["now"], None, 0, GENESIS)
    return _ChainBatch(row["chain"], row["now"], checkpoint_of(row), row["position"], row["head"])


def _extend_chain(pages: dict[UUID, _ChainBatch], taken: Sequence[Row], key: SigningKey) -> None:
    for row in taken:
        pages[row["tenant_id"]].add(row)
    for page in pages.values():
        page.sign(key)


async def _note_ended(tx: Tx, taken: Sequence[Row]) -> None:
    """Queue evidence for the runs that ended in this batch, and count them.

    A run's last entry is sealed last and exactly once.
    """
    ended = [(row["run_id"], row["tenant_id"]) for row in taken if row["type"] == EntryType.RUN_COMPLETED]
    if ended:
        runs = [run_id for run_id, _ in ended]
        await tx.fetch("evidence_becomes_due", runs, [tenant_id for _, tenant_id in ended])
        await tx.fetch("count_ended", runs)


async def _save(tx: Tx, pages: Sequence[_ChainBatch]) -> None:
    seals = [seal for page in pages for seal in page.added]
    if seals:
        await tx.fetch("add_seals", *(list(column) for column in zip(*seals, strict=True)))
    signed = [(page, page.checkpoint) for page in pages if page.checkpoint is not None]
    if signed:
        columns = zip(*(_row_of(page, checkpoint) for page, checkpoint in signed), strict=True)
        await tx.fetch("add_checkpoints", *(list(column) for column in columns))


def _row_of(page: _ChainBatch, checkpoint: Checkpoint) -> tuple[Any, ...]:
    return (
        page.tenant_id,
        checkpoint.number,
        checkpoint.position,
        bytes.fromhex(checkpoint.head),
        page.now,
        bytes.fromhex(checkpoint.previous) if checkpoint.previous else None,
        UUID(checkpoint.released) if checkpoint.released else None,
        checkpoint.key_id,
        checkpoint.signature,
    )


def checkpoint_of(row: Row) -> Checkpoint:
    return Checkpoint(
        tenant_id=str(row["tenant_id"]),
        number=row["number"],
        position=row["position"],
        head=row["head"].hex(),
        at=utc(row["at"]),
        previous=row["previous"].hex() if row["previous"] else None,
        released=str(row["released"]) if row["released"] else None,
        key_id=row["key_id"],
        signature=row["signature"],
    )


# ---------------------------------------------------------------- checking


async def verify(
    database: Database, tenant_id: TenantId, keyring: Keyring, anchors: Sequence[Checkpoint] = ()
) -> Verdict:
    """Verify the chain from its start against the current journal, then the journal against the chain.

    `anchors` are checkpoints that were kept outside the database. They reveal a chain that was truncated before one
    of them.
    """
    # Use one snapshot for the whole check, because entries are appended and sealed at the same time.
    async with _snapshot(database) as tx:
        latest = await _latest(tx, tenant_id)
        verifier = Verifier(str(tenant_id), keyring, latest, anchors)
        await _check_chain(tx, tenant_id, verifier)
        verdict = verifier.finish(await tx.value("count_unsealed", tenant_id))
        if not verdict.ok:
            return verdict
        stray = await _first_stray(tx, tenant_id, verifier.released)
        return Verdict(verdict.entries, verdict.checkpoints, stray, verdict.unsealed)


@asynccontextmanager
async def _snapshot(database: Database) -> AsyncIterator[Tx]:
    async with (
        database.connection() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        yield Tx(connection)


async def _latest(tx: Tx, tenant_id: TenantId) -> Checkpoint | None:
    [row] = await tx.fetch("last_checkpoints", [tenant_id])
    return None if row["number"] is None else checkpoint_of(row)


async def _check_chain(tx: Tx, tenant_id: TenantId, verifier: Verifier) -> None:
    checkpoints = _checkpoints(tx, tenant_id)
    following = await anext(checkpoints, None)
    async for sealed in _sealed(tx, tenant_id):
        while following is not None and following.position < sealed.position:
            verifier.checkpoint(following)
            following = await anext(checkpoints, None)
        verifier.entry(sealed)
        if verifier.broken:
            return
    while following is not None:
        verifier.checkpoint(following)
        following = await anext(checkpoints, None)


async def _sealed(tx: Tx, tenant_id: TenantId) -> AsyncIterator[LinkedEntry]:
    position = 0
    while rows := await tx.fetch("sealed_after", tenant_id, position, _PIECE):
        for row in rows:
            entry = None if row["seq"] is None else row
            yield LinkedEntry(row["position"], str(row["sealed_run"]), row["sealed_seq"], row["link"], entry)
        position = rows[-1]["position"]


async def _checkpoints(tx: Tx, tenant_id: TenantId) -> AsyncIterator[Checkpoint]:
    number = 0
    while rows := await tx.fetch("checkpoints_after", tenant_id, number, _PIECE):
        for row in rows:
            yield checkpoint_of(row)
        number = rows[-1]["number"]


async def _first_stray(tx: Tx, tenant_id: TenantId, released: str | None) -> Break | None:
    floor, after = UUID(released) if released else None, _NO_ID
    while rows := await tx.fetch("runs_to_compare", tenant_id, after, _PIECE):
        runs = [row["id"] for row in rows]
        stray = await tx.row("strays", tenant_id, runs, floor)
        if stray is not None:
            return Break(None, str(stray["run_id"]), stray["seq"], stray["why"])
        after = runs[-1]
    return None


# ---------------------------------------------------------------- reading


async def listed(
    database: Database, tenant_id: TenantId, *, after: int = 0, run_id: RunId | None = None, limit: int = 100
) -> list[Row]:
    """Return sealed entries with their positions and links, oldest first; `after` is the last position seen."""
    return await database.fetch("list_sealed", tenant_id, after, run_id, limit)


@dataclass(frozen=True, slots=True)
class Proof:
    """A run's journal as it is hashed, and the checkpoints that enclose it.

    `sealed` is true if the chain contains the whole journal.
    """

    entries: list[Row]
    sealed: bool
    checkpoints: list[Checkpoint]


async def proof_of(tx: Tx | Database, tenant_id: TenantId, run_id: RunId) -> Proof:
    entries = await tx.fetch("leaves_of_run", tenant_id, run_id)
    positions = [row["position"] for row in entries if row["position"] is not None]
    if not positions:
        return Proof(entries, False, [])
    rows = await tx.fetch("checkpoints_around", tenant_id, min(positions), max(positions))
    return Proof(entries, len(positions) == len(entries), [checkpoint_of(row) for row in rows])
