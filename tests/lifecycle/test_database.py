"""The migrated database enforces exactly the tables, pair by pair."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from interlock.ids import uuid7
from interlock.lifecycle import APPROVAL, IDEMPOTENCY, JOB, RECEIPT, RUN, STEP, WORKER, Machine, RunReason, Tier
from interlock.lifecycle.render import (
    LEGAL_ENTRY,
    checks,
    domains,
    entry_moves,
    final,
    illegal_move,
    legal_history,
    listed,
    may_move,
)
from interlock.lifecycle.run import LEASABLE
from interlock.store import embedded
from interlock.store.migrate import ensure_partitions
from interlock.wire import Role
from tests.conftest import url_of
from tests.lifecycle import expected

# The tables of the machines that are not named like them.
_TABLES = {"idempotency": "idempotency_record"}
STORED = (RUN, APPROVAL, RECEIPT, WORKER, JOB, IDEMPOTENCY)
MOVING = (RUN, APPROVAL, RECEIPT, WORKER, JOB)
every_stored = pytest.mark.parametrize("machine", STORED, ids=lambda machine: machine.name)
every_moving = pytest.mark.parametrize("machine", MOVING, ids=lambda machine: machine.name)


def table_of(machine: Machine) -> str:
    return f"interlock.{_TABLES.get(machine.name, machine.name)}"


@pytest.fixture(scope="module")
def shared_url(server: embedded.Joined, template: str) -> Iterator[str]:
    """One database for this module: DDL is transactional too, so each test can roll its changes back."""
    name = f"lifecycle_{os.getpid()}"
    asyncio.run(_administer(server.url, f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield url_of(server, name)
    asyncio.run(_administer(server.url, f"DROP DATABASE {name} WITH (FORCE)"))


async def _administer(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()


@pytest.fixture
async def connection(shared_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(shared_url)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(
        "INSERT INTO interlock.tenant (id, name, created_at) VALUES (gen_random_uuid(), 'one', now())"
    )
    yield connection
    await transaction.rollback()
    await connection.close()


@asynccontextmanager
async def refused(
    connection: Any, match: str | None = None, error: type[Exception] = asyncpg.CheckViolationError
) -> Any:
    with pytest.raises(error, match=match):
        async with connection.transaction():
            yield


# ---------------------------------------------------------------- what is enforced is what is rendered


async def constraint(connection: Any, table: str, name: str) -> str | None:
    query = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = $1::regclass AND conname = $2"
    found: str | None = await connection.fetchval(query, table, name)
    return found


async def triggers(connection: Any, table: str) -> dict[str, str]:
    query = """SELECT tgname, pg_get_triggerdef(oid) AS text FROM pg_trigger
                WHERE tgrelid = $1::regclass AND NOT tgisinternal"""
    return {row["tgname"]: row["text"].replace(f"{table} ", "it ") for row in await connection.fetch(query, table)}


async def differences(connection: Any, table: str, rendered: dict[str, str]) -> set[str]:
    """Return names of the table's constraints that differ from these texts, as PostgreSQL itself reads both."""
    await connection.execute(f"CREATE TEMP TABLE scratch (LIKE {table})")
    for name, text in rendered.items():
        await connection.execute(f"ALTER TABLE scratch ADD CONSTRAINT {name} CHECK ({text})")
    found = {
        name
        for name in rendered
        if await constraint(connection, table, name) != await constraint(connection, "scratch", name)
    }
    await connection.execute("DROP TABLE scratch")
    return found


async def different_domains(connection: Any, rendered: dict[str, tuple[str, str]]) -> set[str]:
    """Return names of the domains that differ from these texts."""
    query = """SELECT conname || ' ' || pg_get_constraintdef(pg_constraint.oid)
                 FROM pg_constraint JOIN pg_type ON pg_type.oid = contypid WHERE typname = $1"""
    found = set()
    for name, (constraint_name, text) in rendered.items():
        await connection.execute(f"CREATE DOMAIN scratch AS text CONSTRAINT {constraint_name} CHECK ({text})")
        if await connection.fetch(query, name) != await connection.fetch(query, "scratch"):
            found.add(name)
        await connection.execute("DROP DOMAIN scratch")
    return found


async def body_of(connection: Any, function: str) -> str | None:
    found: str | None = await connection.fetchval("SELECT prosrc FROM pg_proc WHERE proname = $1", function)
    return found


# Permitted changes in a row that ended: a worker may report that its tools stopped earlier than required.
_BUT_FOR = {
    "worker": " AND (to_jsonb(NEW) - 'may_act_until' <> to_jsonb(OLD) - 'may_act_until' OR NEW.may_act_until IS NULL"
    " OR NEW.may_act_until >= OLD.may_act_until)"
}
# Triggers that belong to no lifecycle: a run is never deleted.
_FURTHER_TRIGGERS = {"run": {"run_keep", "run_stays"}}


async def different_triggers(connection: Any, machine: Machine) -> set[str]:
    name = machine.name
    await connection.execute(f"CREATE TABLE interlock.scratch (LIKE {table_of(machine)})")
    for trigger, when, then in (
        (f"{name}_moves", illegal_move(machine), "refuse_move"),
        (f"{name}_final", final(machine) + _BUT_FOR.get(name, ""), "refuse_change"),
    ):
        await connection.execute(
            f"CREATE TRIGGER {trigger} BEFORE UPDATE ON interlock.scratch FOR EACH ROW WHEN ({when})"
            f" EXECUTE FUNCTION interlock.{then}()"
        )
    real = await triggers(connection, table_of(machine))
    rendered = await triggers(connection, "interlock.scratch")
    await connection.execute("DROP TABLE interlock.scratch")
    differing = {name for name in real | rendered if real.get(name) != rendered.get(name)}
    return differing - _FURTHER_TRIGGERS.get(name, set())


async def type_of_status(connection: Any, machine: Machine) -> str | None:
    """Return the type of the column with the state, and nothing if the column may be NULL."""
    query = """SELECT atttypid::regtype::text FROM pg_attribute
                WHERE attrelid = $1::regclass AND attname = 'status' AND attnotnull"""
    found: str | None = await connection.fetchval(query, table_of(machine))
    return found


@every_stored
async def test_the_checks_of_a_table_are_those_rendered_today(connection: Any, machine: Machine) -> None:
    assert await differences(connection, table_of(machine), checks(machine)) == set()
    assert await type_of_status(connection, machine) == f"interlock.{machine.name}_state"


@every_stored
async def test_the_domains_of_a_table_are_those_rendered_today(connection: Any, machine: Machine) -> None:
    assert await different_domains(connection, domains(machine)) == set()


@every_stored
async def test_a_domain_that_differs_would_be_found(connection: Any, machine: Machine) -> None:
    name = f"{machine.name}_state"
    await connection.execute(f"ALTER DOMAIN interlock.{name} DROP CONSTRAINT {machine.name}_status")
    assert await different_domains(connection, domains(machine)) == {name}
    await connection.execute(f"ALTER DOMAIN interlock.{name} ADD CONSTRAINT {machine.name}_status CHECK (VALUE <> 'x')")
    assert await different_domains(connection, domains(machine)) == {name}


@every_stored
async def test_a_check_that_differs_would_be_found(connection: Any, machine: Machine) -> None:
    table = table_of(machine)
    for column in machine.columns:
        name = f"{machine.name}_{column}"
        await connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT {name}")
        assert name in await differences(connection, table, checks(machine))
        await connection.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} CHECK (status <> 'x')")
        assert name in await differences(connection, table, checks(machine))


async def test_a_status_of_another_type_would_be_found(connection: Any) -> None:
    await connection.execute("ALTER TABLE interlock.queue ADD COLUMN status text NOT NULL DEFAULT 'x'")
    assert await type_of_status(connection, Machine("queue", {})) == "text"
    await connection.execute("ALTER TABLE interlock.queue ALTER COLUMN status DROP NOT NULL")
    assert await type_of_status(connection, Machine("queue", {})) is None


@every_moving
async def test_the_triggers_of_a_table_are_those_rendered_today(connection: Any, machine: Machine) -> None:
    assert await different_triggers(connection, machine) == set()


@every_moving
async def test_what_the_triggers_ask_is_what_is_rendered_today(connection: Any, machine: Machine) -> None:
    assert await body_of(connection, f"{machine.name}_may_move") == may_move(machine)


@every_moving
async def test_a_trigger_that_differs_would_be_found(connection: Any, machine: Machine) -> None:
    await connection.execute(f"DROP TRIGGER {machine.name}_final ON {table_of(machine)}")
    assert await different_triggers(connection, machine) == {f"{machine.name}_final"}


async def test_the_check_of_an_entry_is_the_one_rendered_today(connection: Any) -> None:
    assert await differences(connection, "interlock.journal_entry", {"journal_entry_transition": LEGAL_ENTRY}) == set()
    assert await different_domains(connection, {"entry_move": entry_moves(RUN, STEP)}) == set()
    assert await different_domains(connection, {"entry_move": entry_moves(STEP, RUN)}) == {"entry_move"}


async def test_the_check_of_a_line_of_history_is_the_one_rendered_today(connection: Any) -> None:
    name, table = "resource_event_transition", "interlock.resource_event"
    assert await differences(connection, table, {name: legal_history(WORKER, JOB)}) == set()
    assert await differences(connection, table, {name: legal_history(JOB, WORKER)}) == {name}


async def test_the_other_words_in_checks_are_those_of_the_enums(connection: Any) -> None:
    held = ("run_waiting_is_free", f"VALUE IN ({listed(LEASABLE)})")
    reasons = ("run_reason_known", f"VALUE IN ({listed(RunReason)})")
    assert await different_domains(connection, {"run_leased": held, "run_known_reason": reasons}) == set()
    for table, column, words in (("approval", "tier", Tier), ("api_key", "role", Role)):
        check = {f"{table}_{column}_check": f"{column} IN ({listed(words)})"}
        assert await differences(connection, f"interlock.{table}", check) == set()


# ---------------------------------------------------------------- rows, pair by pair

_ROW: dict[str, dict[str, Any]] = {
    "run": {
        "id": "gen_random_uuid()", "tenant_id": "gen_random_uuid()", "workflow": "'w'", "workflow_version": "1",
        "trigger": "'{}'", "requested_by": "'me'", "seq": "1", "queue_id": "gen_random_uuid()",
        "created_at": "now()",
    },
    "worker": {
        "id": "gen_random_uuid()", "name": "'w'", "host": "'h'", "pid": "1", "capacity": "1", "lease_seconds": "30",
        "heartbeat_at": "now()", "started_at": "now()",
    },
    "job": {
        "id": "gen_random_uuid()", "tenant_id": "(SELECT id FROM interlock.tenant)", "depth": "0",
        "task_description": "'t'", "workflow": "'w'", "inputs": "'[{}]'", "total": "1", "worker_count": "1",
        "requested_by": "'me'", "requester": "'{}'", "created_at": "now()",
    },
    "approval": {
        "id": "gen_random_uuid()", "tenant_id": "gen_random_uuid()", "run_id": "gen_random_uuid()", "step": "'s'",
        "tier": "'low'", "two_person": "false", "summary": "''", "action": "'{}'", "digest": "'d'",
        "requested_by": "'me'", "requested_at": "now()", "expires_at": "now()",
    },
    "receipt": {
        "id": "gen_random_uuid()", "tenant_id": "gen_random_uuid()", "run_id": "gen_random_uuid()", "step": "'s'",
        "tool": "'t'", "idempotency_key": "gen_random_uuid()::text", "action_digest": "'d'", "attempt": "1",
        "request_metadata": "'{}'", "created_at": "now()",
    },
    "idempotency": {
        "tenant_id": "gen_random_uuid()", "key": "gen_random_uuid()::text", "source": "'http'", "request_hash": "'x'",
        "created_at": "now()", "expires_at": "now()",
    },
}  # fmt: skip
_MARK = {"completed_at": "now()", "reason": "'completed'", "stopped_at": "now()", "resolved_at": "now()"}
_MARK |= {"response_body": "'x'", "error": "'e'", "lock_expires_at": "now()"}


def marks(machine: Machine, state: str) -> dict[str, str]:
    """Return the end columns that this state requires."""
    found = {name: _MARK[name] if state in states else "NULL" for name, states in machine.columns.items()}
    return found | ({"may_act_until": found["stopped_at"]} if machine.name == "worker" else {})


async def insert(connection: Any, machine: Machine, state: str, **more: str) -> Any:
    row = _ROW[machine.name] | {"status": f"'{state}'"} | marks(machine, state) | more
    columns, values = ", ".join(row), ", ".join(row.values())
    return await connection.fetchrow(f"INSERT INTO {table_of(machine)} ({columns}) VALUES ({values}) RETURNING *")


async def accepts(connection: Any, statement: str, *args: Any) -> bool:
    """Return whether the database accepts it; any error but a violated check is an error of the test."""
    try:
        async with connection.transaction():
            await connection.execute(statement, *args)
    except asyncpg.CheckViolationError:
        return False
    return True


async def accepted_pairs(connection: Any, machine: Machine) -> set[tuple[str, str]]:
    found = set()
    for before, after in itertools.product(machine.states, machine.states):
        row = await insert(connection, machine, before)
        change = {"status": f"'{after}'"} | marks(machine, after)
        changes = ", ".join(f"{name} = {value}" for name, value in change.items())
        if await accepts(connection, f"UPDATE {table_of(machine)} SET {changes} WHERE id = $1", row["id"]):
            found.add((str(before), str(after)))
    return found


def legal_pairs(machine: Machine) -> set[tuple[str, str]]:
    """Return the legal pairs; a row that has not ended may also change without changing its state."""
    stays = {(state, state) for state in expected.STATES[machine.name] if state not in expected.TERMINAL[machine.name]}
    return {(source, target) for source, _, target in expected.TABLES[machine.name]} | stays


@every_moving
async def test_of_all_pairs_of_states_exactly_those_in_the_table_pass(connection: Any, machine: Machine) -> None:
    assert await accepted_pairs(connection, machine) == legal_pairs(machine)


@every_moving
async def test_without_its_triggers_illegal_pairs_would_get_in(connection: Any, machine: Machine) -> None:
    name, table = machine.name, table_of(machine)
    await connection.execute(f"DROP TRIGGER {name}_moves ON {table}; DROP TRIGGER {name}_final ON {table}")
    assert await accepted_pairs(connection, machine) == set(itertools.product(*[expected.STATES[name]] * 2))


@every_moving
async def test_a_row_that_ended_refuses_every_change(connection: Any, machine: Machine) -> None:
    for state in expected.TERMINAL[machine.name]:
        row = await insert(connection, machine, state)
        for column in _ROW[machine.name]:
            statement = f"UPDATE {table_of(machine)} SET {column} = {column} WHERE id = $1"
            assert not await accepts(connection, statement, row["id"]), (state, column)


async def test_a_refused_move_says_what_was_tried(connection: Any) -> None:
    run = await insert(connection, RUN, "canceling")
    async with refused(connection, "run cannot go from canceling to running"):
        await connection.execute("UPDATE interlock.run SET status = 'running' WHERE id = $1", run["id"])
    ended = await insert(connection, RUN, "failed")
    async with refused(connection, f"run {ended['id']} has ended and cannot be changed"):
        await connection.execute("UPDATE interlock.run SET cost_usd = 5 WHERE id = $1", ended["id"])


@every_stored
async def test_an_unknown_state_is_refused(connection: Any, machine: Machine) -> None:
    for word in ("unknown", "", "PENDING", "Running"):
        async with refused(connection):
            await insert(connection, machine, word)
    async with refused(connection, error=asyncpg.NotNullViolationError):
        await insert(connection, machine, "x", status="NULL")


@every_stored
async def test_the_columns_of_an_end_are_there_exactly_when_it_ended(connection: Any, machine: Machine) -> None:
    for state in machine.states:
        for column in machine.columns:
            wrong = "NULL" if state in machine.columns[column] else _MARK[column]
            async with refused(connection, f"{machine.name}_{column}"):
                with_it = {"may_act_until": wrong} if machine.name == "worker" else {}
                await insert(connection, machine, state, **{column: wrong}, **with_it)


@every_stored
async def test_without_the_check_an_end_without_its_columns_would_get_in(connection: Any, machine: Machine) -> None:
    for column, states in machine.columns.items():
        await connection.execute(f"ALTER TABLE {table_of(machine)} DROP CONSTRAINT {machine.name}_{column}")
        with_it = {"may_act_until": "NULL"} if machine.name == "worker" else {}
        await insert(connection, machine, next(iter(states)), **{column: "NULL"}, **with_it)


async def test_only_a_run_that_works_or_stops_can_be_leased(connection: Any) -> None:
    for state in expected.STATES["run"]:
        if state in ("running", "canceling"):
            await insert(connection, RUN, state, lease_worker="gen_random_uuid()")
        else:
            async with refused(connection):
                await insert(connection, RUN, state, lease_worker="gen_random_uuid()")
    await connection.execute("ALTER TABLE interlock.run DROP CONSTRAINT run_waiting_is_free")
    await insert(connection, RUN, "waiting_approval", lease_worker="gen_random_uuid()")


async def test_an_ended_run_has_no_alarm_and_no_unknown_reason(connection: Any) -> None:
    for state in expected.TERMINAL["run"]:
        async with refused(connection, "run_ended_is_free"):
            await insert(connection, RUN, state, resume_at="now()")
        async with refused(connection, "run_reason_known"):
            await insert(connection, RUN, state, reason="'because'")
    for reason in expected.REASONS:
        await insert(connection, RUN, "failed", reason=f"'{reason}'")


async def test_a_person_votes_once_and_says_yes_or_no(connection: Any) -> None:
    approval = (await insert(connection, APPROVAL, "requested"))["id"]
    vote = "INSERT INTO interlock.vote (approval_id, voter, decision, at) VALUES ($1, 'ann', $2, now())"
    assert not await accepts(connection, vote, approval, "maybe")
    assert await accepts(connection, vote, approval, "approved")
    async with refused(connection, error=asyncpg.UniqueViolationError):
        await connection.execute(vote, approval, "rejected")


async def test_a_job_is_one_deeper_than_its_parent_and_no_deeper_than_five(connection: Any) -> None:
    parent: str | None = None
    for depth in range(6):
        above = f"'{parent}'" if parent else "NULL"
        if depth:
            for wrong in (depth + 1, depth - 1):
                with pytest.raises(asyncpg.IntegrityConstraintViolationError):
                    async with connection.transaction():
                        await insert(connection, JOB, "pending", depth=str(wrong), parent_job_id=above)
        parent = (await insert(connection, JOB, "pending", depth=str(depth), parent_job_id=above))["id"]
    async with refused(connection):
        await insert(connection, JOB, "pending", depth="6", parent_job_id=f"'{parent}'")
    for number in (0, 11):
        async with refused(connection):
            await insert(connection, JOB, "pending", worker_count=str(number))


async def test_a_child_belongs_to_its_parents_tenant(connection: Any) -> None:
    parent = (await insert(connection, JOB, "pending"))["id"]
    other = await connection.fetchval(
        "INSERT INTO interlock.tenant VALUES (gen_random_uuid(), 'two', now()) RETURNING id"
    )
    async with refused(connection, error=asyncpg.ForeignKeyViolationError):
        await insert(connection, JOB, "pending", depth="1", parent_job_id=f"'{parent}'", tenant_id=f"'{other}'")


async def test_only_a_worker_that_is_alive_is_reserved(connection: Any) -> None:
    job = (await insert(connection, JOB, "running"))["id"]
    for state in expected.STATES["worker"]:
        if state in expected.TERMINAL["worker"]:
            async with refused(connection, "worker_reserved_is_alive"):
                await insert(connection, WORKER, state, job_id=f"'{job}'")
        else:
            await insert(connection, WORKER, state, job_id=f"'{job}'")
    async with refused(connection, "worker_reserved_is_alive"):
        await insert(connection, WORKER, "running", job_id=f"'{job}'", pid="NULL")


async def test_a_queue_is_a_tenants_own_or_a_further_one_of_a_tenant(connection: Any) -> None:
    queue = "INSERT INTO interlock.queue (id, tenant_id, kind) VALUES ({}, {}, '{}')"
    tenant, other = "(SELECT id FROM interlock.tenant)", "gen_random_uuid()"
    for own, of, kind in itertools.product(
        (tenant, other, "NULL"), (tenant, other, "NULL"), ("tenant", "job", "label", "person")
    ):
        fine = (own, of, kind) in ((tenant, tenant, "tenant"), (other, tenant, "job"), (other, tenant, "label"))
        try:
            async with connection.transaction():
                await connection.execute(queue.format(own, of, kind))
        except asyncpg.IntegrityConstraintViolationError:
            assert not fine
        else:
            assert fine
            await connection.execute("DELETE FROM interlock.queue")


async def test_history_takes_exactly_the_transitions_of_the_tables_and_is_never_rewritten(connection: Any) -> None:
    statement = """INSERT INTO interlock.resource_event (subject_id, seq, machine, at, type, from_state, event,
                                                         to_state, actor)
                   VALUES (gen_random_uuid(), 1, $1, now(), 't', $2, $3, $4, 'me')"""
    for machine in ("worker", "job"):
        states = [None, *expected.STATES[machine], "unknown"]
        events = [None, "create", *{event for _, event, _ in expected.TABLES[machine]}]
        taken = {
            (source, event, target)
            for source, event, target in itertools.product(states, events, states)
            if await accepts(connection, statement, machine, source, event, target)
        }
        begins = {(None, None, None), (None, "create", expected.STATES[machine][0])}
        assert taken == begins | set(expected.TABLES[machine])
    for change in (
        "UPDATE interlock.resource_event SET actor = 'you'",
        "DELETE FROM interlock.resource_event",
        "TRUNCATE interlock.resource_event",
    ):
        async with refused(connection, "append-only"):
            await connection.execute(change)


# ---------------------------------------------------------------- the journal, combination by combination

_TRY_ALL = """
CREATE FUNCTION try_all(states text[], events text[], steps text[])
RETURNS TABLE (step text, source text, event text, target text) LANGUAGE plpgsql AS $$
DECLARE n int := 0;
BEGIN
  FOR try_all.step, source, event, target IN
    SELECT s, f, e, t FROM unnest(steps) AS s, unnest(states) AS f, unnest(events) AS e, unnest(states) AS t
  LOOP
    BEGIN
      n := n + 1;
      INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, step, from_state, event, to_state, token,
                                           actor)
      VALUES (gen_random_uuid(), n, gen_random_uuid(), now(), 't', try_all.step, source, try_all.event, target, 0,
              'me');
      RETURN NEXT;
    EXCEPTION WHEN check_violation THEN
    END;
  END LOOP;
END $$
"""
Combination = tuple[str | None, str | None, str | None, str | None]


def combinations() -> tuple[list[str | None], list[str | None], list[str | None]]:
    states = {*expected.STATES["run"], *expected.STATES["step"], "unknown"}
    events = {event for machine in ("run", "step") for _, event, _ in expected.TABLES[machine]} | {"create", "unknown"}
    return [None, *sorted(states)], [None, *sorted(events)], [None, "s"]


async def accepted_entries(connection: Any) -> set[Combination]:
    await connection.execute(_TRY_ALL)
    return {tuple(row) for row in await connection.fetch("SELECT * FROM try_all($1, $2, $3)", *combinations())}


async def test_of_all_transitions_an_entry_can_claim_exactly_those_in_the_tables_pass(connection: Any) -> None:
    notes: set[Combination] = {(None, None, None, None), ("s", None, None, None)}
    created: set[Combination] = {(None, None, "create", "pending")}
    of_run = {(None, *row) for row in expected.TABLES["run"]}
    of_step = {("s", *row) for row in expected.TABLES["step"]}
    assert await accepted_entries(connection) == notes | created | of_run | of_step


async def test_without_the_check_every_transition_would_get_in(connection: Any) -> None:
    await connection.execute("ALTER TABLE interlock.journal_entry DROP CONSTRAINT journal_entry_transition")
    states, events, steps = combinations()
    assert len(await accepted_entries(connection)) == len(states) * len(events) * len(states) * len(steps)


PARTITIONS = (
    "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'interlock.journal_entry'::regclass"
)


async def write_entry(connection: Any) -> None:
    await connection.execute(
        "INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, token, actor)"
        " VALUES ($1, 1, $2, now(), 'note', 0, 'me')",
        uuid7(), uuid4(),
    )  # fmt: skip


async def test_what_was_written_is_neither_changed_nor_deleted_nor_truncated(connection: Any) -> None:
    await write_entry(connection)
    partition = await connection.fetchval("SELECT tableoid::regclass::text FROM interlock.journal_entry")
    assert partition != "interlock.journal_entry_rest"
    for table in ("interlock.journal_entry", partition):
        for statement in (f"UPDATE {table} SET actor = 'you'", f"DELETE FROM {table}"):
            async with refused(connection, "append-only"):
                await connection.execute(statement)
    parts = await connection.fetch(PARTITIONS)
    assert len(parts) > 3
    for table in ("interlock.journal_entry", *(part["name"] for part in parts)):
        async with refused(connection, "append-only: TRUNCATE refused"):
            await connection.execute(f"TRUNCATE {table}")
    assert await connection.fetchval("SELECT actor FROM interlock.journal_entry") == "me"


async def test_runs_are_not_deleted_and_votes_are_not_changed(connection: Any) -> None:
    """A remark of the specification review: a forged vote appeared as cast while the audit chain verified."""
    run_id, approval_id, tenant = uuid7(), uuid7(), uuid4()
    await connection.execute(
        "INSERT INTO interlock.run (id, tenant_id, queue_id, workflow, workflow_version, status, trigger, requested_by,"
        " seq, created_at) VALUES ($1, $2, $2, 'w', 1, 'pending', '{}', 'me', 1, now())", run_id, tenant,
    )  # fmt: skip
    await connection.execute(
        "INSERT INTO interlock.approval (id, tenant_id, run_id, step, status, tier, two_person, summary, action,"
        " digest, requested_by, requested_at, expires_at)"
        " VALUES ($1, $2, $3, 'a', 'requested', 'low', false, '', '{}', 'd', 'me', now(), now())",
        approval_id, tenant, run_id,
    )  # fmt: skip
    await connection.execute(
        "INSERT INTO interlock.vote (approval_id, voter, decision, at) VALUES ($1, 'ann', 'approved', now())",
        approval_id,
    )
    changes = (
        "UPDATE interlock.vote SET voter = 'bob'",
        "DELETE FROM interlock.vote",
        "TRUNCATE interlock.vote",
        "DELETE FROM interlock.run",
        "TRUNCATE interlock.run",
    )
    for change in changes:
        async with refused(connection, "append-only"):
            await connection.execute(change)
    await connection.execute(
        "UPDATE interlock.vote SET decision = 'rejected'"
    )  # ann may change her mind while it is open
    await connection.execute("UPDATE interlock.approval SET status = 'rejected', resolved_at = now()")
    async with refused(connection, "append-only"):
        await connection.execute("UPDATE interlock.vote SET decision = 'approved'")
    assert tuple(await connection.fetchrow("SELECT voter, decision FROM interlock.vote")) == ("ann", "rejected")


async def test_a_partition_made_later_refuses_too(connection: Any) -> None:
    await ensure_partitions(connection, "interlock", datetime(2041, 3, 1, tzinfo=UTC))
    async with refused(connection, "append-only: TRUNCATE refused"):
        await connection.execute("TRUNCATE interlock.journal_entry_204103")


async def test_without_its_triggers_the_journal_could_be_rewritten(connection: Any) -> None:
    await write_entry(connection)
    await connection.execute("DROP TRIGGER journal_entry_append_only ON interlock.journal_entry")
    await connection.execute("UPDATE interlock.journal_entry SET actor = 'you'")
    await connection.execute("DROP TRIGGER journal_entry_keep ON interlock.journal_entry")
    for part in await connection.fetch(PARTITIONS):
        await connection.execute(f"DROP TRIGGER journal_entry_keep ON {part['name']}")
    await connection.execute("TRUNCATE interlock.journal_entry")
    assert await connection.fetchval("SELECT count(*) FROM interlock.journal_entry") == 0


async def test_two_entries_of_a_run_never_have_the_same_number(connection: Any) -> None:
    statement = """INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, token, actor)
                   VALUES ($1, $2, gen_random_uuid(), now(), 'note', 0, 'me')"""
    run_id = uuid7()
    await connection.execute(statement, run_id, 1)
    async with refused(connection, error=asyncpg.UniqueViolationError):
        await connection.execute(statement, run_id, 1)
    async with refused(connection):
        await connection.execute(statement, run_id, 0)


async def test_of_an_ended_worker_only_an_earlier_end_of_its_tools_is_taken(connection: Any) -> None:
    row = await insert(connection, WORKER, "terminated", may_act_until="now() + interval '1 minute'")
    earlier = "UPDATE interlock.worker SET may_act_until = now() WHERE id = $1"
    assert not await accepts(connection, earlier.replace("now()", "now() + interval '2 minutes'"), row["id"])
    assert not await accepts(connection, earlier.replace("SET", "SET capacity = 7,"), row["id"])
    assert await accepts(connection, earlier, row["id"])
