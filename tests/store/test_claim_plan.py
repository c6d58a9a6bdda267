"""The cost of a claim depends on its batch, never on the backlog or the number of tenants."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from interlock.ids import uuid7
from interlock.store.pool import Database
from interlock.store.queries import SQL


def fill(lanes: int = 10_000, runs: int = 100_000, first: int = 1) -> str:
    """Spread half of a long backlog over all tenants; the other half belongs to one tenant."""
    return f"""
CREATE TEMP TABLE number AS
  SELECT n, lpad(to_hex(n + {first - 1}), 32, '0')::uuid AS id FROM generate_series(1, {runs}) AS n;
INSERT INTO interlock.tenant (id, name, created_at) SELECT id, id::text, now() FROM number WHERE n <= {lanes};
INSERT INTO interlock.queue (id, tenant_id, kind, has_work, virtual_time) SELECT id, id, 'tenant', true, n FROM number WHERE n <= {lanes};
CREATE TEMP TABLE work AS
  SELECT id AS run_id,
         lpad(to_hex(CASE n % 2 WHEN 0 THEN {first} ELSE n / 2 % {lanes} + {first} END), 32, '0')::uuid AS tenant_id
    FROM number;
SET session_replication_role = replica;
INSERT INTO interlock.run (id, tenant_id, queue_id, workflow, workflow_version, status, trigger, requested_by, seq, created_at)
SELECT run_id, tenant_id, tenant_id, 'w', 1, 'pending', '{{}}', 'me', 1, now() FROM work;
INSERT INTO interlock.ready_run (tenant_id, run_id, queue_id, priority, is_new) SELECT tenant_id, run_id, tenant_id, 1, true FROM work;
SET session_replication_role = DEFAULT;
DROP TABLE work, number;
"""


async def register(database: Database, worker: UUID) -> None:
    terms = (["default"], None, None, None)
    await database.fetch("register_worker", worker, "w", "h", 1, 100, 30.0, *terms, "worker:w", "{}")


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def explain(connection: Any, mode: str, *, analyze: bool = False) -> dict[str, Any]:
    """Return the claim's plan for 20 runs: for these values, or the generic plan."""
    worker = await connection.fetchval("SELECT id FROM interlock.worker")
    await connection.execute(f"SET plan_cache_mode = {mode}")
    await connection.execute(f"PREPARE claim AS {SQL['claim_runs']}")
    plan = await explain_prepared(connection, worker, analyze=analyze)
    await connection.execute("DEALLOCATE claim")
    return plan


async def explain_prepared(connection: Any, worker: Any, *, analyze: bool) -> dict[str, Any]:
    options = "FORMAT JSON, ANALYZE, BUFFERS" if analyze else "FORMAT JSON"
    transaction = connection.transaction()
    await transaction.start()
    text = await connection.fetchval(
        f"EXPLAIN ({options}) EXECUTE claim (NULL, '{worker}', 20, 'worker:w', 'default', NULL)"
    )
    await transaction.rollback()
    plan: dict[str, Any] = json.loads(text)[0]["Plan"]
    return plan


@pytest.fixture
async def backlog(database: Database) -> Any:
    await register(database, uuid7())
    async with database.pool.acquire() as connection:
        await connection.execute("UPDATE interlock.worker SET status = 'running'")
        await connection.execute(fill())
        await connection.execute("ANALYZE lane; ANALYZE ready; ANALYZE run; ANALYZE worker")
        yield connection


def scans(plan: dict[str, Any]) -> set[tuple[str, str]]:
    return {(node["Node Type"], node["Relation Name"]) for node in nodes(plan) if "Relation Name" in node}


def indexes(plan: dict[str, Any]) -> set[str]:
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}


async def test_a_claim_walks_its_indexes_however_long_the_backlog(backlog: asyncpg.Connection) -> None:
    plan = await explain(backlog, "force_custom_plan")
    assert not {table for kind, table in scans(plan) if kind == "Seq Scan"} & {"lane", "ready", "run"}
    assert {"lane_turn", "ready_by_turn", "run_pkey", "lane_pkey"} <= indexes(plan)

    # The generic plan expects a large batch; even that plan never reads the backlog.
    plan = await explain(backlog, "force_generic_plan")
    assert not {table for kind, table in scans(plan) if kind == "Seq Scan"} & {"ready", "run"}
    assert {"lane_turn", "ready_by_turn", "run_pkey"} <= indexes(plan)

    # Executed: the claim takes its batch and touches a number of pages that fits the batch.
    plan = await explain(backlog, "auto", analyze=True)
    (leased,) = (node for node in nodes(plan) if node.get("Operation") == "Update" and node["Relation Name"] == "run")
    assert 0 < leased["Actual Rows"] <= 20
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert pages < 5000, pages

    # The check can fail: without the lanes' index the claim reads every lane.
    await backlog.execute("DROP INDEX lane_turn")
    assert ("Seq Scan", "lane") in scans(await explain(backlog, "force_custom_plan"))


async def test_a_plan_that_was_made_for_a_short_queue_is_good_for_a_long_one(database: Database) -> None:
    worker = uuid7()
    await register(database, worker)
    async with database.pool.acquire() as connection, database.pool.acquire() as other:
        await connection.execute("UPDATE interlock.worker SET status = 'running'")
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE claim AS {SQL['claim_runs']}")
        await other.execute(fill(1, 20))
        await explain_prepared(connection, worker, analyze=True)
        await other.execute(fill(first=1_000_000))
        plan = await explain_prepared(connection, worker, analyze=True)
    read = {
        (node["Relation Name"], node.get("Index Name")): node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        for node in nodes(plan)
        if "Relation Name" in node
    }
    assert max(read.values()) <= 100, read
