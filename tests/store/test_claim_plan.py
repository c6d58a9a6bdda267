"""The cost of a claim depends on its batch, never on the backlog or the number of tenants."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from interlock.engine.queueing.leases import share_out
from interlock.ids import uuid7
from interlock.store.pool import Database
from interlock.store.queries import STATEMENTS
from interlock.store.records import ClaimableQueue, NewEntry


def fill(queues: int = 10_000, runs: int = 100_000, first: int = 1) -> str:
    """Spread half of a long backlog over all tenants; the other half belongs to one tenant."""
    return f"""
CREATE TEMP TABLE number AS
  SELECT n, lpad(to_hex(n + {first - 1}), 32, '0')::uuid AS id FROM generate_series(1, {runs}) AS n;
INSERT INTO interlock.tenant (id, name, created_at) SELECT id, id::text, now() FROM number WHERE n <= {queues};
INSERT INTO interlock.tenant_limits (tenant_id) SELECT id FROM number WHERE n <= {queues};
INSERT INTO interlock.queue (id, tenant_id, kind, has_work, virtual_time)
SELECT id, id, 'tenant', true, n FROM number WHERE n <= {queues};
CREATE TEMP TABLE work AS
  SELECT id AS run_id,
         lpad(to_hex(CASE n % 2 WHEN 0 THEN {first} ELSE n / 2 % {queues} + {first} END), 32, '0')::uuid AS tenant_id
    FROM number;
SET session_replication_role = replica;
INSERT INTO interlock.run (id, tenant_id, queue_id, workflow, workflow_version, status, trigger, requested_by, seq,
                           created_at)
SELECT run_id, tenant_id, tenant_id, 'w', 1, 'pending', '{{}}', 'me', 1, now() FROM work;
INSERT INTO interlock.ready_run (tenant_id, run_id, queue_id, priority, is_new)
SELECT tenant_id, run_id, tenant_id, 1, true FROM work;
SET session_replication_role = DEFAULT;
DROP TABLE work, number;
"""


async def register(database: Database, worker: UUID) -> None:
    terms = (["default"], None, None, None)
    await database.fetch("register_worker", worker, "w", "h", 1, 100, 30.0, *terms, "worker:w", "{}")


@dataclass
class Cost:
    """`rows`: how many rows of each table were read, or entries of its indexes. `indexes`: those that were searched."""

    claimed: int
    pages: int
    rows: dict[str, int]
    scanned: set[str]
    indexes: set[str]


# The counts of this session: statements inside of functions are in no plan, but they count here. They are of everything
# since the session last reported its counts, so that only a difference says what a statement read.
_COUNTS = """
SELECT relname AS name, indrelid IS NOT NULL AS is_index, coalesce(indrelid, oid)::regclass::text AS table,
       pg_stat_get_xact_numscans(oid) AS scans, pg_stat_get_xact_tuples_returned(oid) AS rows
  FROM pg_class LEFT JOIN pg_index ON indexrelid = oid
 WHERE relnamespace = 'interlock'::regnamespace AND relkind IN ('r', 'i')
"""


async def counts(connection: Any) -> dict[str, asyncpg.Record]:
    return {row["name"]: row for row in await connection.fetch(_COUNTS)}


async def explained(connection: Any, name: str, *args: Any) -> tuple[int, int]:
    """Execute a statement. Return how many pages it and its functions touched, and how many rows it returned."""
    text = await connection.fetchval(f"EXPLAIN (FORMAT JSON, ANALYZE, BUFFERS) {STATEMENTS[name].text}", *args)
    plan = json.loads(text)[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], plan["Actual Rows"]


def cost(before: dict[str, asyncpg.Record], after: dict[str, asyncpg.Record]) -> tuple[Counter[str], set[str]]:
    """Return how many rows of each table were read, and the names of the tables and indexes that were scanned."""
    rows: Counter[str] = Counter()
    for name, row in after.items():
        rows[row["table"].removeprefix("interlock.")] += row["rows"] - before[name]["rows"]
    return rows, {name for name in after if after[name]["scans"] > before[name]["scans"]}


async def cost_of_claim(connection: Any, mode: str = "auto", room: int = 20) -> Cost:
    """Claim runs with plans for these values, or with generic plans, and take it back."""
    worker = await connection.fetchval("SELECT id FROM interlock.worker")
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(f"SET LOCAL plan_cache_mode = {mode}")
    found = await connection.fetch(STATEMENTS["claimable_queues"].text, "default", None, room)
    shares = share_out([ClaimableQueue(*row) for row in found], room)
    before = await counts(connection)
    looked, _ = await explained(connection, "claimable_queues", "default", None, room)
    leased, claimed = await explained(connection, "claim_runs", worker, "worker:w", "default", shares)
    rows, scanned = cost(before, after := await counts(connection))
    await transaction.rollback()
    indexes = {name for name in scanned if after[name]["is_index"]}
    return Cost(int(claimed), looked + leased, dict(rows), scanned - indexes, indexes)


@pytest.fixture
async def backlog(database: Database) -> Any:
    await register(database, uuid7())
    async with database.pool.acquire() as connection:
        await connection.execute("UPDATE interlock.worker SET status = 'running'")
        await connection.execute(fill())
        await connection.execute(
            "ANALYZE interlock.queue; ANALYZE interlock.ready_run; ANALYZE interlock.run; ANALYZE interlock.worker"
        )
        yield connection


INDEXES = {"queue_turn", "ready_run_in_order", "run_pkey", "queue_pkey"}


async def test_a_claim_walks_its_indexes_however_long_the_backlog(backlog: asyncpg.Connection) -> None:
    for mode in ("force_custom_plan", "force_generic_plan", "auto"):
        cost = await cost_of_claim(backlog, mode)
        assert not cost.scanned & {"queue", "ready_run", "run"}, mode
        assert cost.indexes >= INDEXES, mode
        # The claim takes its batch and touches a number of rows and pages that fits the batch.
        assert 0 < cost.claimed <= 20
        assert max(cost.rows.values()) <= 100, (mode, cost.rows)
        assert cost.pages < 5000, (mode, cost.pages)

    # The check can fail: without the index for their turn, the claim reads every queue.
    await backlog.execute("DROP INDEX interlock.queue_turn")
    cost = await cost_of_claim(backlog, "force_custom_plan")
    assert "queue" in cost.scanned
    assert cost.rows["queue"] >= 10_000
    # So it can for what a function reads: without the index for their order, the claim reads every ready run.
    await backlog.execute("DROP INDEX interlock.ready_run_in_order")
    assert (await cost_of_claim(backlog, "force_custom_plan")).rows["ready_run"] >= 10_000


async def test_a_claim_costs_as_much_with_a_long_backlog_of_many_tenants_as_with_a_short_one(
    database: Database,
) -> None:
    costs = []
    await register(database, uuid7())
    async with database.pool.acquire() as connection:
        await connection.execute("UPDATE interlock.worker SET status = 'running'")
        for queues, runs, first in ((50, 5000, 1), (10_000, 100_000, 1_000_000)):
            await connection.execute(fill(queues, runs, first))
            await cost_of_claim(connection)  # the first one also reads the catalog
            costs.append(await cost_of_claim(connection))
    short, long = costs
    assert long.claimed == short.claimed == 20
    assert sum(long.rows.values()) <= 1.5 * sum(short.rows.values())
    assert long.pages <= 1.5 * short.pages


async def test_a_plan_that_was_made_for_a_short_queue_is_good_for_a_long_one(database: Database) -> None:
    worker = uuid7()
    await register(database, worker)
    async with database.pool.acquire() as connection, database.pool.acquire() as other:
        await connection.execute("UPDATE interlock.worker SET status = 'running'")
        await other.execute(fill(1, 20))
        await cost_of_claim(connection, "force_generic_plan")
        await other.execute(fill(first=1_000_000))
        cost = await cost_of_claim(connection, "force_generic_plan")
    assert 0 < cost.claimed <= 20
    assert max(cost.rows.values()) <= 100, cost.rows


async def test_the_leases_of_a_worker_do_not_make_its_claims_and_writes_dearer(database: Database) -> None:
    """Also with plans that were made while no run was leased: the index of leased runs is empty then."""
    worker = uuid7()
    await register(database, worker)
    async with database.pool.acquire() as connection:
        await connection.execute("UPDATE interlock.worker SET status = 'running'")
        await connection.execute(fill(20, 20_000))
        await connection.execute("ANALYZE interlock.queue; ANALYZE interlock.ready_run; ANALYZE interlock.run")
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        held: list[Any] = []
        while len(held) < 100:
            found = await connection.fetch(STATEMENTS["claimable_queues"].text, "default", None, 20)
            shares = share_out([ClaimableQueue(*row) for row in found], 20)
            before = await counts(connection)
            held += await connection.fetch(STATEMENTS["claim_runs"].text, worker, "worker:w", "default", shares)
            rows, _ = cost(before, await counts(connection))
            assert rows["run"] <= 100, len(held)
            seq = 3 + len(held)
            entries = [
                NewEntry(run["id"], run["lease_token"], seq, "note", *[None] * 5, "worker:w", None, None)
                for run in held
            ]  # fmt: skip
            before = await counts(connection)
            written = await connection.fetch(STATEMENTS["write_runs"].text, worker, entries, [], None)
            rows, _ = cost(before, await counts(connection))
            assert len(written) == len(held)
            assert rows["run"] <= 3 * len(held), len(held)
