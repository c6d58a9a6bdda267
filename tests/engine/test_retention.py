"""Retention: no wrong clock destroys a journal, and an admin can restore a month for some days (reliability V1)."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import structlog
from tests.rig import Rig

from interlock import clock
from interlock.engine.proof import retention
from interlock.engine.queueing import sweeps
from interlock.errors import Conflict, Invalid, NotFound
from interlock.ids import uuid7
from interlock.store.pool import Database

ONE = "{name: one, steps: [{id: a, tool: t.one}]}"
HUNDRED_DAYS = 100 * 86400.0


@pytest.fixture
def rig(rig: Rig) -> Rig:
    object.__setattr__(rig.settings, "retention_days", 30)

    @rig.tool("t.one")
    async def one() -> int:
        return 1

    return rig


@pytest.fixture
def move_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Move this process's clock, as on a machine with a wrong clock."""
    right = clock.process_time
    yield lambda seconds: monkeypatch.setattr(clock, "process_time", lambda: right() + seconds)
    monkeypatch.undo()
    clock.follow(0.0)


async def ended_run(rig: Rig) -> UUID:
    await rig.apply(ONE)
    run_id = await rig.start("one")
    await rig.work_until(run_id)
    await rig.prove()
    return run_id


async def entries_of(rig: Rig, run_id: UUID) -> int:
    found: int = (await rig.sql("SELECT count(*) FROM interlock.journal_entry WHERE run_id = $1", run_id))[0]["count"]
    return found


async def tend(rig: Rig) -> None:
    await sweeps.tend(rig.database, rig.notary.signing.key())


async def old_run(rig: Rig) -> tuple[UUID, str]:
    """A run that ended more than a year ago, and its month."""
    async with rig.long_ago():
        run_id = await ended_run(rig)
    month = datetime.fromtimestamp((run_id.int >> 80) / 1000, UTC)
    return run_id, f"{month:%Y-%m}"


async def later(rig: Rig, days: float) -> None:
    """Pretend that months were detached this many days ago."""
    await rig.sql(
        "UPDATE interlock.journal_month SET detached_at = detached_at - make_interval(secs => $1)", days * 86400
    )


# ---------------------------------------------------------------- clocks


async def test_a_month_ends_by_the_databases_clock(rig: Rig) -> None:
    """The other tests of this section move a process's clock, and nothing is deleted."""
    run_id = await ended_run(rig)
    rig.clock.advance(HUNDRED_DAYS)
    await tend(rig)
    assert not await entries_of(rig, run_id)
    assert await rig.sql("SELECT FROM interlock.journal_month WHERE detached_at IS NOT NULL")


@pytest.mark.parametrize("seconds", [HUNDRED_DAYS, 61, -61, -HUNDRED_DAYS])
async def test_a_process_whose_clock_is_wrong_deletes_nothing_and_says_so(
    rig: Rig, move_process: Any, seconds: float
) -> None:
    run_id, _ = await old_run(rig)
    insert = (
        "INSERT INTO interlock.idempotency_record (tenant_id, key, source, status, request_hash, response_status,"
        " response_body, created_at, expires_at)"
        " VALUES ($1, 'k', 'api', 'completed', '', 200, '', now(), now() - interval '1 day')"
    )
    await rig.sql(insert, rig.admin.tenant_id)
    move_process(seconds)
    with structlog.testing.capture_logs() as logs:
        await tend(rig)
    assert await entries_of(rig, run_id)
    assert len(await rig.sql("SELECT FROM interlock.idempotency_record")) == 1
    said = next(line["detail"] for line in logs if line["event"] == "deletes_nothing")
    which = "ahead of" if seconds > 0 else "behind"
    assert said.startswith(f"The clock of this process is {abs(seconds):.0f} seconds {which} the database's.")
    answer = await rig.http("").get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "warnings": [said]})
    difference = (await rig.http().get("/metrics")).text.partition("\ninterlock_clock_difference_seconds ")[2]
    assert float(difference.split()[0]) == pytest.approx(abs(seconds), abs=5)


async def test_a_process_whose_clock_was_set_right_deletes_again(rig: Rig, move_process: Any) -> None:
    run_id, _ = await old_run(rig)
    move_process(3600)
    await tend(rig)
    move_process(0)
    await tend(rig)
    assert not await entries_of(rig, run_id)
    assert (await rig.http("").get("/readyz")).json() == {"status": "ready"}


async def test_months_are_made_by_the_clock_of_the_database(rig: Rig, move_process: Any) -> None:
    before = await rig.sql("SELECT relname FROM pg_class WHERE relname ~ '^entry_\\d{6}$' ORDER BY 1")
    rig.clock.advance(HUNDRED_DAYS)
    move_process(HUNDRED_DAYS)
    await tend(rig)
    assert await rig.sql("SELECT relname FROM pg_class WHERE relname ~ '^entry_\\d{6}$' ORDER BY 1") == before


async def test_ids_are_of_the_database_s_time_whatever_the_clock_of_the_process_says(
    database: Database, move_process: Any
) -> None:
    right = clock.now()
    for seconds in (HUNDRED_DAYS, -2 * HUNDRED_DAYS):
        move_process(seconds)
        await database.compare_clocks()
        made = [uuid7() for _ in range(5)]
        assert made == sorted(made)
        for each in made:
            assert abs(datetime.fromtimestamp((each.int >> 80) / 1000, UTC) - right) < timedelta(seconds=30)


async def test_a_run_of_a_process_100_days_ahead_lands_in_this_month(rig: Rig, move_process: Any) -> None:
    move_process(HUNDRED_DAYS)
    await rig.database.compare_clocks()
    run_id = await ended_run(rig)
    [row] = await rig.sql(
        "SELECT DISTINCT tableoid::regclass::text AS partition FROM interlock.journal_entry WHERE run_id = $1", run_id
    )
    assert row["partition"] != "journal_entry_rest"


# ---------------------------------------------------------------- taking out, putting back, dropping


async def test_a_month_is_taken_out_first_and_dropped_after_the_grace_time(rig: Rig) -> None:
    run_id, month = await old_run(rig)
    await tend(rig)
    assert not await entries_of(rig, run_id)
    name = f"journal_entry_{month.replace('-', '')}"
    assert (await rig.sql(f"SELECT count(*) FROM interlock.{name}"))[0]["count"]
    await later(rig, 6.9)
    await tend(rig)
    assert await rig.sql("SELECT FROM pg_class WHERE relname = $1", name)
    await later(rig, 0.2)
    await tend(rig)
    assert not await rig.sql("SELECT FROM pg_class WHERE relname = $1", name)
    assert month not in [retention.month_of(row["name"]) for row in await retention.months(rig.database)]
    assert (await rig.http().get("/api/audit/verify")).json()["ok"]


async def test_a_month_that_was_taken_out_cannot_be_changed(rig: Rig) -> None:
    _, month = await old_run(rig)
    await tend(rig)
    name = f"journal_entry_{month.replace('-', '')}"
    table = f"interlock.{name}"
    for statement in (f"UPDATE {table} SET actor = 'x'", f"DELETE FROM {table}", f"TRUNCATE {table}"):
        with pytest.raises(Exception, match="append-only"):
            await rig.sql(statement)


async def test_a_month_that_is_kept_is_whole_again_and_stays_until_it_is_released(rig: Rig) -> None:
    run_id, month = await old_run(rig)
    before = await rig.journal(run_id)
    await tend(rig)
    await retention.keep(rig.database, month)
    assert await rig.journal(run_id) == before
    assert (await rig.http().get("/api/audit/verify")).json()["ok"]
    with pytest.raises(Exception, match="append-only"):
        await rig.sql("DELETE FROM interlock.journal_entry WHERE run_id = $1", run_id)
    await later(rig, 100)
    await tend(rig)
    assert await rig.journal(run_id) == before
    await retention.release(rig.database, month)
    await tend(rig)
    assert not await entries_of(rig, run_id)


async def test_what_was_dropped_or_never_was_cannot_be_kept(rig: Rig) -> None:
    _, month = await old_run(rig)
    await tend(rig)
    await later(rig, 8)
    await tend(rig)
    for gone in (month, "1999-01"):
        with pytest.raises(NotFound, match=f"no month {gone}"):
            await retention.keep(rig.database, gone)
    for odd in ("2026-13", "2026", "journal_entry_202601", "2026-01; DROP TABLE interlock.run"):
        with pytest.raises(Invalid, match="Write it like 2026-01"):
            await retention.keep(rig.database, odd)
    with pytest.raises(Conflict, match="is not kept"):
        await retention.release(rig.database, month)


async def test_two_processes_that_tend_at_once_take_a_month_out_once(rig: Rig) -> None:
    run_id, month = await old_run(rig)
    await asyncio.gather(*(tend(rig) for _ in range(4)))
    await tend(rig)  # if another sealer was active, the first pass left the month to the next one
    assert not await entries_of(rig, run_id)
    [row] = [row for row in await retention.months(rig.database) if retention.month_of(row["name"]) == month]
    assert row["detached_at"] is not None


async def test_the_database_refuses_whatever_a_process_believes(rig: Rig) -> None:
    """The statements check the date themselves: they refuse to drop this month for any process."""
    run_id = await ended_run(rig)
    [row] = await rig.sql(
        "SELECT DISTINCT tableoid::regclass::text AS partition FROM interlock.journal_entry WHERE run_id = $1", run_id
    )
    assert await rig.database.value("detach_month", row["partition"], 0) is False
    assert await rig.database.value("drop_month", row["partition"], 0) is False
    assert await rig.database.value("detach_month", "journal_entry_rest", 0) is False
    assert await entries_of(rig, run_id)
