"""The audit log over a real journal: it misses nothing, seals nothing twice, and names every tampered entry."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from tests.rig import Rig

from interlock.audit.chain import Checkpoint, Verdict, journal_digest, text_digest
from interlock.audit.keys import Keyring, SigningKey
from interlock.engine.proof import audit
from interlock.ids import uuid7
from interlock.store.pool import Database

KEY = SigningKey.generate()
RING = Keyring([KEY.verify_key])

APPEND = """
INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, token, actor, data, output)
SELECT run_id, seq, $1, now(), 'orphan_detected', 7, 'system:test', jsonb_build_object('n', seq), '{"deep": [1.0, "ö"]}'
  FROM unnest($2::uuid[], $3::int[]) AS e (run_id, seq)
"""


class Ledger:
    """A tenant's journal, written by hand."""

    def __init__(self, database: Database, tenant_id: UUID) -> None:
        self.database, self.tenant_id = database, tenant_id

    async def sql(self, statement: str, *args: Any) -> list[Any]:
        rows: list[Any] = await self.database.pool.fetch(statement, *args)
        return rows

    async def add_run(self, seq: int = 0) -> UUID:
        run_id = uuid7()
        await self.sql(
            "INSERT INTO interlock.run (id, tenant_id, queue_id, workflow, workflow_version, status, trigger,"
            " requested_by, seq, created_at) VALUES ($1, $2, $2, 'w', 1, 'pending', '{}', 'me', $3, now())",
            run_id, self.tenant_id, seq,
        )  # fmt: skip
        return run_id

    async def add(self, run_id: UUID, *seqs: int) -> None:
        await self.sql(APPEND, self.tenant_id, [run_id] * len(seqs), list(seqs))

    async def seal(self, key: SigningKey = KEY, batch: int = 5000) -> int:
        total = 0
        while sealed := await audit.link_entries(self.database, key, batch):
            total += sealed
        return total

    async def verify(self, keyring: Keyring = RING, anchors: list[Checkpoint] | None = None) -> Verdict:
        return await audit.verify(self.database, self.tenant_id, keyring, anchors or [])

    async def checkpoints(self) -> list[Checkpoint]:
        rows = await self.database.fetch("checkpoints_after", self.tenant_id, 0, 1000)
        return [audit.checkpoint_of(row) for row in rows]

    @contextlib.asynccontextmanager
    async def tampering(self) -> AsyncIterator[Any]:
        """Disable the triggers, as the owner of the tables can."""
        async with self.database.pool.acquire() as connection, connection.transaction():
            for table in ("journal_entry", "audit_link", "checkpoint"):
                await connection.execute(f"ALTER TABLE interlock.{table} DISABLE TRIGGER USER")
            yield connection
            for table in ("journal_entry", "audit_link", "checkpoint"):
                await connection.execute(f"ALTER TABLE interlock.{table} ENABLE TRIGGER USER")


@pytest.fixture
async def ledger(database: Database) -> Ledger:
    tenant_id = uuid7()
    await database.pool.execute("INSERT INTO interlock.tenant VALUES ($1, 'acme', now())", tenant_id)
    return Ledger(database, tenant_id)


@pytest.fixture
async def sealed(ledger: Ledger) -> Ledger:
    """Three runs of four entries each, sealed in three batches: positions 1 to 6, 7 to 9 and 10 to 12."""
    runs = [await ledger.add_run(4) for _ in range(3)]
    for seqs in ((1, 2), (3,), (4,)):
        for run in runs:
            await ledger.add(run, *seqs)
        await ledger.seal()
    assert (await ledger.verify()).as_dict() == {
        "ok": True, "events": 12, "checkpoints": 3, "unsealed": 0, "broken_at": None,
    }  # fmt: skip
    return ledger


async def place(ledger: Ledger, position: int) -> dict[str, Any]:
    [row] = await ledger.sql(
        "SELECT run_id, seq FROM interlock.audit_link WHERE tenant_id = $1 AND position = $2",
        ledger.tenant_id,
        position,
    )
    return {"position": position, "run_id": str(row["run_id"]), "seq": row["seq"]}


async def broken_at(ledger: Ledger, **options: Any) -> dict[str, Any]:
    verdict = await ledger.verify(**options)
    assert verdict.broken_at is not None
    named: dict[str, Any] = verdict.broken_at.as_dict()
    return named


# ---------------------------------------------------------------- sealing


async def test_entries_are_sealed_in_order_with_a_checkpoint_for_each_batch(ledger: Ledger) -> None:
    run = await ledger.add_run(3)
    await ledger.add(run, 1, 2)
    assert (await ledger.verify()).unsealed == 2
    assert await audit.link_entries(ledger.database, KEY) == 2
    assert await audit.link_entries(ledger.database, KEY) == 0
    await ledger.add(run, 3)
    assert await audit.link_entries(ledger.database, KEY) == 1
    rows = await ledger.sql("SELECT position, seq FROM interlock.audit_link ORDER BY position")
    assert [tuple(row) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert [c.position for c in await ledger.checkpoints()] == [2, 3]
    assert (await ledger.verify()) == Verdict(3, 2)


async def test_each_tenant_has_its_own_chain(ledger: Ledger) -> None:
    other = Ledger(ledger.database, uuid7())
    await ledger.sql("INSERT INTO interlock.tenant VALUES ($1, 'other', now())", other.tenant_id)
    mine, theirs = await ledger.add_run(1), await other.add_run(2)
    await ledger.add(mine, 1)
    await other.add(theirs, 1, 2)
    assert await ledger.seal() == 3
    assert await ledger.verify() == Verdict(1, 1)
    assert await other.verify() == Verdict(2, 1)


async def test_a_batch_takes_whole_statements_and_goes_on_where_it_stopped(ledger: Ledger) -> None:
    run = await ledger.add_run()
    for seq in range(1, 40, 3):
        await ledger.add(run, seq, seq + 1, seq + 2)
    assert await audit.link_entries(ledger.database, KEY, batch=10) == 12
    assert await ledger.seal(batch=10) == 27
    assert await ledger.verify() == Verdict(39, 4)


async def test_what_commits_late_is_not_missed(ledger: Ledger) -> None:
    early, late = await ledger.add_run(1), await ledger.add_run(1)
    async with ledger.database.pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(APPEND, ledger.tenant_id, [late], [1])
        await ledger.add(early, 1)  # started later, committed earlier
        assert await ledger.seal() == 1
        await transaction.commit()
    assert await ledger.seal() == 1
    assert (await ledger.verify()) == Verdict(2, 2)


async def test_what_is_rolled_back_leaves_nothing(ledger: Ledger) -> None:
    run = await ledger.add_run()
    with contextlib.suppress(ZeroDivisionError):
        async with ledger.database.transaction() as tx:
            await tx.connection.execute(APPEND, ledger.tenant_id, [run], [1])
            raise ZeroDivisionError
    assert await ledger.seal() == 0


async def test_writers_and_sealers_at_the_same_time_miss_nothing_and_seal_nothing_twice(ledger: Ledger) -> None:
    """Transactions of random length, some rolled back, while three sealers compete."""
    runs = [await ledger.add_run() for _ in range(12)]
    done = asyncio.Event()

    async def write(number: int) -> None:
        mine = runs[number::4]
        for seq in range(1, 31):
            async with ledger.database.pool.acquire() as connection:
                transaction = connection.transaction()
                await transaction.start()
                await connection.execute(APPEND, ledger.tenant_id, mine, [seq] * len(mine))
                await connection.execute("SELECT pg_sleep($1)", (seq * 7 + number * 3) % 5 / 500)
                if (seq + number) % 6 == 0:
                    await transaction.rollback()
                    await connection.execute(APPEND, ledger.tenant_id, mine, [seq] * len(mine))
                else:
                    await transaction.commit()

    async def keep_sealing() -> None:
        while not done.is_set():
            await audit.link_entries(ledger.database, KEY, batch=25)
            await asyncio.sleep(0)

    sealers = [asyncio.create_task(keep_sealing()) for _ in range(3)]
    await asyncio.gather(*(write(number) for number in range(4)))
    meanwhile = await ledger.verify()
    assert meanwhile.ok
    done.set()
    await asyncio.gather(*sealers)
    await ledger.seal()

    verdict = await ledger.verify()
    assert verdict.ok and (verdict.entries, verdict.unsealed) == (360, 0)
    [twice] = await ledger.sql("SELECT count(*) - count(DISTINCT (run_id, seq)) AS n FROM interlock.audit_link")
    assert twice["n"] == 0
    assert verdict.checkpoints > 5  # the sealers did run at the same time


async def test_a_run_of_the_engine_is_sealed_and_proven(ledger: Ledger, rig: Rig) -> None:
    @rig.tool("t.echo")
    async def echo(value: int) -> int:
        return value

    await rig.apply("{name: one, steps: [{id: a, tool: t.echo, input: {value: 1}}]}")
    run_id = await rig.start("one")
    await rig.work_until(run_id)
    await ledger.seal()
    verdict = await audit.verify(ledger.database, rig.admin.tenant_id, RING)
    assert verdict.ok and verdict.entries == 4

    proof = await audit.proof_of(ledger.database, rig.admin.tenant_id, run_id)
    assert proof.sealed and [row["position"] for row in proof.entries] == [1, 2, 3, 4]
    assert [c.position for c in proof.checkpoints] == [4]
    # The database hashes the JSON columns; hashing their text gives the same result.
    texts = await ledger.database.fetch("journal_of", [run_id])
    assert journal_digest(proof.entries) == journal_digest(
        {**row, "tenant_id": rig.admin.tenant_id}
        | {"data_sha256": text_digest(row["data"]), "output_sha256": text_digest(row["output"])}
        for row in texts
    )
    rows = await audit.listed(ledger.database, rig.admin.tenant_id, after=1, limit=2)
    assert [(row["position"], row["type"]) for row in rows] == [(2, "run_transition"), (3, "step_transition")]


async def test_a_proof_is_enclosed_by_checkpoints(sealed: Ledger) -> None:
    run = await sealed.add_run(1)
    await sealed.add(run, 1)
    unsealed = await audit.proof_of(sealed.database, sealed.tenant_id, run)
    assert not unsealed.sealed and unsealed.checkpoints == []
    await sealed.seal()
    proof = await audit.proof_of(sealed.database, sealed.tenant_id, run)
    assert proof.sealed and [c.number for c in proof.checkpoints] == [3, 4]


async def test_seals_and_checkpoints_refuse_to_be_changed(sealed: Ledger) -> None:
    for table in ("audit_link", "checkpoint"):
        for statement in (
            f"DELETE FROM interlock.{table}",
            f"UPDATE interlock.{table} SET position = 9",
            f"TRUNCATE interlock.{table}",
        ):
            with pytest.raises(asyncpg.CheckViolationError, match="append-only"):
                await sealed.sql(statement)


# ---------------------------------------------------------------- tampering

COLUMNS = {
    "at": "at + interval '1 microsecond'",
    "type": "'run_completed'",
    "step": "'x'",
    "attempt": "2",
    "token": "token + 1",
    "actor": "'system:tesu'",
    "data": "'{\"n\": 99}'",
    "output": '\'{"deep": [1.00, "ö"]}\'',  # the same number in different bytes
    "tenant_id": "'01976a2e-0000-7000-8000-000000000001'",
}


@pytest.mark.parametrize("position", [1, 4, 7, 12])
@pytest.mark.parametrize("column", sorted(COLUMNS))
async def test_a_changed_byte_is_named(sealed: Ledger, column: str, position: int) -> None:
    where = await place(sealed, position)
    async with sealed.tampering() as connection:
        await connection.execute(
            f"UPDATE interlock.journal_entry SET {column} = {COLUMNS[column]} WHERE run_id = $1 AND seq = $2",
            UUID(where["run_id"]), where["seq"],
        )  # fmt: skip
    broken = await broken_at(sealed)
    assert broken.items() >= where.items()
    assert "changed" in broken["why"]


@pytest.mark.parametrize("position", range(1, 13))
async def test_a_deleted_entry_is_named(sealed: Ledger, position: int) -> None:
    where = await place(sealed, position)
    async with sealed.tampering() as connection:
        await connection.execute(
            "DELETE FROM interlock.journal_entry WHERE run_id = $1 AND seq = $2", UUID(where["run_id"]), where["seq"]
        )
    assert await broken_at(sealed) == where | {"why": "the entry is missing: it was deleted"}


@pytest.mark.parametrize(("one", "two"), [(1, 2), (2, 3), (6, 11)])
async def test_two_swapped_entries_are_named(sealed: Ledger, one: int, two: int) -> None:
    first, second = await place(sealed, one), await place(sealed, two)
    async with sealed.tampering() as connection:
        for (old, old_seq), (new, new_seq) in (
            ((first["run_id"], first["seq"]), (first["run_id"], 999)),
            ((second["run_id"], second["seq"]), (first["run_id"], first["seq"])),
            ((first["run_id"], 999), (second["run_id"], second["seq"])),
        ):
            await connection.execute(
                "UPDATE interlock.journal_entry SET run_id = $3, seq = $4 WHERE run_id = $1 AND seq = $2",
                UUID(old), old_seq, UUID(new), new_seq,
            )  # fmt: skip
    assert (await broken_at(sealed)).items() >= first.items()


@pytest.mark.parametrize("position", [1, 5, 12])
async def test_a_changed_seal_is_named(sealed: Ledger, position: int) -> None:
    async with sealed.tampering() as connection:
        await connection.execute(
            "UPDATE interlock.audit_link SET link = sha256(link) WHERE tenant_id = $1 AND position = $2",
            sealed.tenant_id,
            position,
        )
    assert (await broken_at(sealed))["position"] == position


@pytest.mark.parametrize("kept", [0, 3, 8, 11])
async def test_a_tail_that_was_cut_with_its_seals_is_found_by_the_checkpoint(sealed: Ledger, kept: int) -> None:
    async with sealed.tampering() as connection:
        await cut(connection, kept)
    broken = await broken_at(sealed)
    assert broken["position"] == kept + 1 and "the tail was cut" in broken["why"]


async def cut(connection: Any, kept: int) -> None:
    await connection.execute(
        "DELETE FROM interlock.journal_entry USING interlock.audit_link"
        " WHERE (journal_entry.run_id, journal_entry.seq) = (audit_link.run_id, audit_link.seq) AND position > $1",
        kept,
    )
    await connection.execute("DELETE FROM interlock.audit_link WHERE position > $1", kept)


async def test_a_tail_that_was_cut_with_its_checkpoints_is_found_by_the_runs_themselves(sealed: Ledger) -> None:
    last = await place(sealed, 10)
    async with sealed.tampering() as connection:
        await cut(connection, 9)
        await connection.execute("DELETE FROM interlock.checkpoint WHERE position > 9")
    broken = await broken_at(sealed)
    assert (broken["position"], broken["run_id"], broken["seq"]) == (None, last["run_id"], 4)
    assert "it counts 4, the journal has 3" in broken["why"]


async def test_and_if_the_runs_were_changed_too_by_a_checkpoint_kept_elsewhere(sealed: Ledger) -> None:
    kept = await sealed.checkpoints()
    async with sealed.tampering() as connection:
        await cut(connection, 9)
        await connection.execute("DELETE FROM interlock.checkpoint WHERE position > 9")
        await connection.execute("UPDATE interlock.run SET seq = 3")
    assert (await sealed.verify()).ok
    assert "checkpoint 3, which you hold" in (await broken_at(sealed, anchors=kept))["why"]


async def test_a_tail_that_was_cut_before_it_was_sealed_is_found(sealed: Ledger) -> None:
    run = await sealed.add_run(3)
    await sealed.add(run, 1, 2, 3)
    async with sealed.tampering() as connection:
        await connection.execute("DELETE FROM interlock.journal_entry WHERE run_id = $1 AND seq = 3", run)
    await sealed.seal()
    assert await broken_at(sealed) == {
        "position": 15, "run_id": str(run), "seq": 3, "why": "the entry is missing: it was deleted",
    }  # fmt: skip


async def test_an_entry_put_in_past_the_sealer_is_named(sealed: Ledger) -> None:
    run = UUID((await place(sealed, 1))["run_id"])
    async with sealed.tampering() as connection:
        await connection.execute(APPEND, sealed.tenant_id, [run], [5])
    broken = await broken_at(sealed)
    assert (broken["run_id"], broken["seq"]) == (str(run), 5)
    assert "put in past the sealer" in broken["why"]


async def test_an_entry_put_in_with_a_seal_is_found(sealed: Ledger) -> None:
    run = UUID((await place(sealed, 1))["run_id"])
    async with sealed.tampering() as connection:
        await connection.execute(APPEND, sealed.tenant_id, [run], [5])
        await connection.execute(
            "INSERT INTO interlock.audit_link VALUES ($1, 13, $2, 5, sha256('anything'))", sealed.tenant_id, run
        )
    assert (await broken_at(sealed))["position"] == 13


async def test_a_forged_checkpoint_is_found(sealed: Ledger) -> None:
    async with sealed.tampering() as connection:
        await connection.execute("UPDATE interlock.checkpoint SET head = sha256(head) WHERE number = 2")
    assert "checkpoint 2 was changed or forged" in (await broken_at(sealed))["why"]


async def test_a_deleted_checkpoint_is_found(sealed: Ledger) -> None:
    async with sealed.tampering() as connection:
        await connection.execute("DELETE FROM interlock.checkpoint WHERE number = 3")
    assert "no checkpoint covers positions 10 to 12" in (await broken_at(sealed))["why"]


async def test_after_a_rotation_both_keys_are_needed(sealed: Ledger) -> None:
    new = SigningKey.generate()
    run = await sealed.add_run(1)
    await sealed.add(run, 1)
    await sealed.seal(new)
    assert "not in the keyring" in (await broken_at(sealed))["why"]
    assert (await sealed.verify(RING | Keyring([new.verify_key]))).ok


async def test_retention_is_no_fault_once_it_is_signed(sealed: Ledger) -> None:
    runs = await sealed.sql("SELECT id FROM interlock.run ORDER BY id")
    floor = runs[2]["id"]
    async with sealed.tampering() as connection:
        await connection.execute("DELETE FROM interlock.journal_entry WHERE run_id < $1", floor)
    assert not (await sealed.verify()).ok
    assert await audit.release(sealed.database, KEY, floor)
    assert await sealed.verify() == Verdict(12, 4)
    async with sealed.tampering() as connection:
        await connection.execute("DELETE FROM interlock.journal_entry WHERE run_id = $1 AND seq = 4", floor)
    assert (await broken_at(sealed))["run_id"] == str(floor)


async def test_what_is_not_sealed_yet_is_not_released(sealed: Ledger) -> None:
    run = await sealed.add_run(1)
    await sealed.add(run, 1)
    assert not await audit.release(sealed.database, KEY, uuid7())
    await sealed.seal()
    assert await audit.release(sealed.database, KEY, uuid7())
