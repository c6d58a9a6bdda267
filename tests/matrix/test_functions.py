"""The functions of the store that no request of the matrix reaches keep to their tenant.

Without one of its conditions, each does something else if two tenants have things of the same names.
"""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from interlock.ids import RunId, TenantId, uuid7
from interlock.store.pool import Database
from interlock.store.records import NewRun
from tests.matrix.sweep import Mutant, mutants

# Conditions that a function has beside another one which is enough.
_TWICE = {
    "admit_blocked(): blocked_run.tenant_id = tenant",  # the id of the run came from a row of the tenant
    "await_event(): tenant_id = tenant",  # and so did the number of the event
    "await_event(): kept.tenant_id = tenant",
}


async def tenant(connection: Any, name: str, limit: int | None = None, minutes_ahead: int | None = None) -> TenantId:
    # In order: a statement that forgets the tenant finds the row of the first one.
    made = TenantId(UUID(int=await connection.fetchval("SELECT count(*) FROM interlock.tenant")))
    await connection.execute("INSERT INTO interlock.tenant VALUES ($1, $2, now())", made, name)
    await connection.execute("INSERT INTO interlock.queue (id, tenant_id, kind) VALUES ($1, $1, 'tenant')", made)
    await connection.execute(
        "INSERT INTO interlock.tenant_limits (tenant_id, max_runs_per_min) VALUES ($1, $2)", made, limit
    )
    await connection.execute(
        "INSERT INTO interlock.start_rate (tenant_id, minute)"
        " VALUES ($1, date_trunc('minute', interlock.now()) + make_interval(mins => $2))", made, minutes_ahead,
    )  # fmt: skip
    return made


def new_run(tenant_id: TenantId) -> NewRun:
    return NewRun(RunId(uuid7()), tenant_id, None, "work", 1, False, "{}", "{}", "ann", None)


# ---------------------------------------------------------------- what each of them does


async def a_start(connection: Any) -> None:
    """The other tenant has a newer version of the workflow, and a limit."""
    other, own = await tenant(connection, "other", limit=1), await tenant(connection, "own")
    await connection.execute(
        "INSERT INTO interlock.workflow VALUES ($1, 'work', 2, 'digest', '{}', now(), 'ann')", other
    )
    start = "SELECT interlock.start_run($1::interlock.new_run, true, NULL, NULL, NULL, NULL, NULL)"
    assert await connection.fetchval(start, new_run(own)) is not None


async def paced_starts(connection: Any) -> None:
    """The other tenant has given places of later minutes, and its limit is another one."""
    other, own = await tenant(connection, "other", limit=1, minutes_ahead=60), await tenant(connection, "own", limit=2)
    rate = "SELECT minute, used FROM interlock.start_rate WHERE tenant_id = $1"
    before = await connection.fetchrow(rate, other)
    news = [new_run(own) for _ in range(3)]
    await connection.execute("SELECT interlock.start_runs($1::interlock.new_run[])", news)
    assert await connection.fetchrow(rate, other) == before
    waits = "SELECT resume_at - date_trunc('minute', interlock.now()) FROM interlock.run WHERE id = $1"
    later = [await connection.fetchval(waits, new.run_id) for new in news]
    assert [each and each.total_seconds() for each in later] == [None, None, 60]
    assert (await connection.fetchrow(rate, own))["used"] == 1


async def an_admission(connection: Any) -> None:
    """Both tenants limit the workflow. The other one has runs in flight, ready and blocked, and blocked first."""
    other, own = await tenant(connection, "other"), await tenant(connection, "own")
    runs: dict[TenantId, list[UUID]] = {other: [], own: []}
    for who, cap, blocked in ((other, 2, 2), (own, 1, 2)):
        await connection.execute("INSERT INTO interlock.workflow_cap VALUES ($1, 'work', $2)", who, cap)
        for _ in range(blocked):
            run_id = uuid7()
            runs[who].append(run_id)
            await connection.execute(
                "INSERT INTO interlock.blocked_run (tenant_id, workflow, run_id, queue_id, priority, is_new)"
                " VALUES ($1, 'work', $2, $1, 1, true)", who, run_id,
            )  # fmt: skip
    await connection.execute(
        "INSERT INTO interlock.ready_run (tenant_id, run_id, queue_id, priority, is_new, workflow)"
        " VALUES ($1, $2, $1, 1, true, 'work')", other, uuid7(),
    )  # fmt: skip
    await connection.execute(
        "INSERT INTO interlock.run (id, tenant_id, queue_id, workflow, workflow_version, has_concurrency_limit, status,"
        " trigger, requested_by, seq, created_at, lease_worker)"
        " VALUES ($1, $2, $2, 'work', 1, true, 'running', '{}', 'ann', 1, now(), $1)", uuid7(), other,
    )  # fmt: skip
    assert await connection.fetchval("SELECT interlock.admit_blocked($1, 'work')", own) == 1
    ready = "SELECT run_id FROM interlock.ready_run WHERE tenant_id = $1"
    assert [row["run_id"] for row in await connection.fetch(ready, own)] == runs[own][:1]


async def a_wait(connection: Any) -> None:
    """The other tenant and another workspace have an event of the same name."""
    other, own = await tenant(connection, "other"), await tenant(connection, "own")
    run_id = uuid7()
    await connection.execute(
        "INSERT INTO interlock.run (id, tenant_id, workspace_id, queue_id, workflow, workflow_version, status, trigger,"
        " requested_by, seq, created_at) VALUES ($1, $2, 'blue', $2, 'work', 1, 'running', '{}', 'ann', 1, now())",
        run_id, own,
    )  # fmt: skip
    for who, workspace in ((other, "blue"), (own, "red")):
        await connection.execute(
            "INSERT INTO interlock.external_event (tenant_id, id, workspace_id, type, correlation, payload, sent_by,"
            " received_at, expires_at) VALUES ($1, $2, $3, 'paid', 'no1', '{}', 'ann', interlock.now(), 'infinity')",
            who, workspace, workspace,
        )  # fmt: skip
    wait = "SELECT * FROM interlock.await_event($1, $2, 'came', 'paid', 'no1', NULL)"
    assert await connection.fetch(wait, own, run_id) == []
    assert await connection.fetchval("SELECT count(consumed_at) FROM interlock.external_event") == 0


SCENES: dict[str, Callable[[Any], Awaitable[None]]] = {
    "start_run()": a_start,
    "take_start_places()": paced_starts,
    "places_of()": paced_starts,
    "admit_blocked()": an_admission,
    "await_event()": a_wait,
}


async def fails(database: Database, mutant: Mutant | None, scene: Callable[[Any], Awaitable[None]]) -> bool:
    async with database.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            if mutant is not None:
                await connection.execute(mutant.text)
            await scene(connection)
        except (AssertionError, asyncpg.PostgresError):
            return True
        finally:
            await transaction.rollback()
    return False


@pytest.mark.parametrize("function", SCENES)
async def test_a_function_keeps_to_its_tenant_and_needs_each_of_its_conditions(
    database: Database, function: str
) -> None:
    scene = SCENES[function]
    assert not await fails(database, None, scene)
    found = [mutant for mutant in mutants() if mutant.statement == function]
    unnoticed = {str(mutant) for mutant in found if not await fails(database, mutant, scene)}
    assert found
    assert unnoticed - _TWICE == set()
