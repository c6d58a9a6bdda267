"""The usage page, its charts, and their data: every ended run, counted once."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.console.pages import Browser, SignIn, text_of
from tests.rig import Rig

from interlock.audit.keys import SigningKey
from interlock.console import charts
from interlock.engine.proof import audit
from interlock.engine.queueing import sweeps
from interlock.store.pool import Database

ASK = "name: ask\nsteps: [{id: ok, approval: {tier: low}}]"
KEY = SigningKey.generate()
NOW = datetime(2026, 3, 4, 12, 30, 20, tzinfo=UTC)


async def ended(rig: Rig, count: int) -> list[UUID]:
    await rig.apply(ASK)
    runs = [await rig.start("ask") for _ in range(count)]
    for run in runs:
        await rig.cancel(run)
    return runs


async def as_if(rig: Rig, runs: list[UUID], took: list[int]) -> None:
    """Give all of them the same end and this duration in milliseconds."""
    async with rig.database.pool.acquire() as connection, connection.transaction():
        await connection.execute("ALTER TABLE interlock.run DISABLE TRIGGER USER")
        for run, milliseconds in zip(runs, took, strict=True):
            await connection.execute(
                "UPDATE interlock.run SET completed_at = $2, created_at = $3 WHERE id = $1",
                run, NOW, NOW - timedelta(milliseconds=milliseconds),
            )  # fmt: skip
        await connection.execute("ALTER TABLE interlock.run ENABLE TRIGGER USER")


async def counted(rig: Rig) -> dict[tuple[str, str], int]:
    rows = await rig.sql(
        "SELECT workspace, status, sum(runs)::int AS runs FROM interlock.run_stats_minute GROUP BY 1, 2"
    )
    return {(row["workspace"], row["status"]): row["runs"] for row in rows}


# ---------------------------------------------------------------- counting


async def test_the_sealer_counts_every_run_that_ended_once(rig: Rig) -> None:
    await as_if(rig, await ended(rig, 5), [7] * 5)
    await rig.start("ask")  # continues
    while await audit.link_entries(rig.database, KEY, 3):
        pass
    assert await counted(rig) == {("", "canceled"): 5}
    await as_if(rig, await ended(rig, 2), [7] * 2)
    while await audit.link_entries(rig.database, KEY):
        pass
    assert await counted(rig) == {("", "canceled"): 7}
    assert await audit.link_entries(rig.database, KEY) == 0
    assert await counted(rig) == {("", "canceled"): 7}


async def test_a_sealer_that_dies_in_between_has_counted_nothing(
    rig: Rig, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ended(rig, 4)

    class Killed(Exception): ...

    class Dying:
        """A transaction whose process ends right after the count."""

        def __init__(self, tx: Any) -> None:
            self._tx = tx

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tx, name)

        async def fetch(self, name: str, *args: Any) -> Any:
            answer = await self._tx.fetch(name, *args)
            if name == "count_ended":
                raise Killed
            return answer

    command = database.run_in_transaction
    monkeypatch.setattr(database, "run_in_transaction", lambda work, *more: command(lambda tx: work(Dying(tx)), *more))
    with pytest.raises(Killed):
        await audit.link_entries(database, KEY)
    monkeypatch.undo()
    assert await counted(rig) == {}
    while await audit.link_entries(database, KEY):
        pass
    assert await counted(rig) == {("", "canceled"): 4}


async def test_a_run_is_counted_in_its_minute_workspace_and_bucket(rig: Rig) -> None:
    await rig.apply(ASK)
    took = [0, 1, 2, 3, 4, 5, 1024, 1025, 2**33, 2**41]
    runs = [await rig.start("ask") for _ in took]
    await rig.sql("UPDATE interlock.run SET workspace_id = 'east' WHERE id = $1", runs[0])
    for run in runs:
        await rig.cancel(run)
    await as_if(rig, runs, took)
    while await audit.link_entries(rig.database, KEY):
        pass
    rows = await rig.sql("SELECT minute, workspace, bucket, runs FROM interlock.run_stats_minute")
    assert {row["minute"] for row in rows} == {NOW.replace(second=0)}
    assert {(row["workspace"], row["bucket"]): row["runs"] for row in rows} == {
        ("east", 0): 1, ("", 0): 1, ("", 1): 1, ("", 2): 2, ("", 3): 1, ("", 10): 1, ("", 11): 1, ("", 33): 1,
        ("", 40): 1,
    }  # fmt: skip


async def test_counts_of_two_days_ago_are_forgotten(rig: Rig) -> None:
    await ended(rig, 1)
    while await audit.link_entries(rig.database, KEY):
        pass
    await sweeps.tend(rig.database)
    assert await counted(rig) == {("", "canceled"): 1}
    rig.clock.advance(49 * 3600)
    await sweeps.tend(rig.database)
    assert await counted(rig) == {}


# ---------------------------------------------------------------- drawing


def row(minutes_ago: int, status: str, bucket: int, runs: int) -> dict[str, Any]:
    at = NOW.replace(second=0) - timedelta(minutes=minutes_ago)
    return {"minute": at, "status": status, "bucket": bucket, "runs": runs}


def test_quantiles_lie_within_their_bucket() -> None:
    assert charts.quantile(Counter(), 0.5) is None
    for bucket in range(1, 20):
        found = charts.quantile(Counter({bucket: 100}), 0.5)
        assert found is not None and 2 ** (bucket - 1) < found <= 2**bucket
    assert charts.quantile(Counter({3: 96, 20: 4}), 0.95) == pytest.approx(8, rel=0.02)
    late = charts.quantile(Counter({3: 94, 20: 6}), 0.95)
    assert late is not None and late > 2**19


def test_bars_are_stacked_and_fill_the_height_that_they_are_due() -> None:
    drawn = charts.draw([row(0, "succeeded", 4, 6), row(0, "failed", 4, 2), row(30, "canceled", 9, 8)], NOW)
    assert (drawn.runs, drawn.failed, drawn.runs_axis) == (16, 2, [8, 4, 0])
    good, bad = (bar for bar in drawn.bars if bar.x > charts.WIDTH * 0.9)
    assert (good.tone, good.y, good.height) == ("good", 25.0, 75.0)
    assert (bad.tone, bad.y, bad.height) == ("bad", 0.0, 25.0)
    assert drawn.times[0] == "11:31" and drawn.times[-1] == "12:30"


def test_lines_are_broken_where_nothing_ended_and_stay_inside() -> None:
    rows = [row(minute, "succeeded", minute % 12, 5) for minute in range(60) if minute not in (20, 21)]
    drawn = charts.draw(rows, NOW)
    assert len(drawn.half) == 2
    points = [float(point.split(",")[1]) for line in drawn.most + drawn.half for point in line.split()]
    assert min(points) >= 0 and max(points) <= charts.HEIGHT
    assert drawn.time_axis[0] == "10 s" and drawn.time_axis[-1] == "1 ms"


def test_runs_of_another_hour_are_not_drawn() -> None:
    drawn = charts.draw([row(60, "succeeded", 3, 9), row(-1, "succeeded", 3, 9)], NOW)
    assert drawn.runs == 0 and drawn.bars == []


# ---------------------------------------------------------------- the page


async def test_use_is_shown_against_caps(rig: Rig, sign_in: SignIn) -> None:
    rig.clock.freeze()  # all within one minute
    small = await rig.tenant("small", max_concurrency=4, max_runs_per_min=2, max_writes_per_run=9)
    await rig.apply("name: capped\ncaps: {max_concurrency: 3}\nsteps: [{id: a, tool: t.a}]", small)
    for _ in range(3):
        await rig.start("capped", who=small)
    who = await sign_in("viewer", tenant_id=small.tenant_id)
    text = text_of(await who.get("/usage"))
    assert "Runs in flight 0 of 4" in text and "Runs started this minute 2 of 2" in text
    assert "1 wait for a later minute" in text and "Writes of one run 9" in text
    assert "capped 0 of 3" in text
    assert "No run ended in the last hour" in text


async def test_the_last_hour_is_drawn_with_its_numbers(rig: Rig, viewer: Browser) -> None:
    await ended(rig, 3)
    await rig.prove()
    page = await viewer.get("/usage")
    assert page.count('class="ended-quiet" x=') >= 1 and 'class="took-half" points=' in page
    assert "<title" in page and "<desc" in page and '<details id="numbers">' in page
    assert "3 in all" in text_of(page)


async def test_a_key_of_a_workspace_sees_charts_of_its_own_runs(rig: Rig, sign_in: SignIn) -> None:
    await ended(rig, 3)
    [own] = [await rig.start("ask")]
    await rig.sql("UPDATE interlock.run SET workspace_id = 'east' WHERE id = $1", own)
    await rig.cancel(own)
    await rig.prove()
    assert "1 in all" in text_of(await (await sign_in("viewer", workspace_id="east")).get("/usage"))
    assert "4 in all" in text_of(await (await sign_in("viewer")).get("/usage"))


async def test_only_who_runs_the_installation_sees_all_tenants(rig: Rig, admin: Browser, sign_in: SignIn) -> None:
    other = await rig.tenant("zebra")
    await ended(rig, 3)
    await rig.prove()
    assert "zebra" in await admin.get("/usage")
    for less in (await sign_in("viewer"), await sign_in("admin", workspace_id="east")):
        assert "zebra" not in await less.get("/usage")
    stranger = text_of(await (await sign_in("admin", tenant_id=other.tenant_id)).get("/usage"))
    assert "default" not in stranger and "in all" not in stranger


async def test_the_page_stays_small(rig: Rig, admin: Browser) -> None:
    await rig.sql(
        "INSERT INTO interlock.run_stats_minute"
        " SELECT $1, date_trunc('minute', now()) - make_interval(mins => m), w, s, b, 7"
        " FROM generate_series(0, 70) AS m, generate_series(0, 20) AS b,"
        " unnest(ARRAY['succeeded', 'failed', 'canceled']) AS s, unnest(ARRAY['', 'east']) AS w",
        rig.admin.tenant_id,
    )
    for number in range(60):
        await rig.tenant(f"tenant-{number}", max_concurrency=5)
    page = await admin.get("/usage")
    assert 'rel="next"' in page
