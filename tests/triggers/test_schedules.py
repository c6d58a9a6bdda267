"""Schedules: one run for every slot, for any scheduler and however late."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import httpx2
import orjson
import pytest

from interlock.engine.access import tenants
from interlock.engine.ingress import schedules
from interlock.engine.workflows import Plans
from interlock.errors import Unavailable
from interlock.store.pool import Database
from tests.rig import Rig

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    rig.clock.fixed = NOON
    await rig.apply("{name: work, steps: [{id: a, tool: t.echo}]}")
    await rig.apply("{name: gate, steps: [{id: ask, approval: {}}]}")
    return rig.http()


async def add(http: httpx2.AsyncClient, status: int = 201, **more: Any) -> Any:
    body = {"name": "clean-up", "cron": "0 * * * *", "workflow": "work"} | more
    answer = await http.post("/api/schedules", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def slots(rig: Rig, name: str = "clean-up") -> list[str]:
    rows = await rig.sql("SELECT trigger FROM interlock.run WHERE trigger->>'ref' = $1 ORDER BY id", name)
    return [orjson.loads(row["trigger"])["metadata"].get("slot", "now") for row in rows]


async def test_a_slot_starts_a_run_with_the_schedules_input(rig: Rig, http: httpx2.AsyncClient) -> None:
    made = await add(http, input={"keep": 3}, timezone="Europe/Berlin", cron="30 14 * * *")
    assert (made["next_at"], made["paused_at"], made["acts_as"]) == ("2026-05-01T12:30:00+00:00", None, "admin")
    assert await schedules.start_due(rig.database, rig.plans) == 0
    rig.clock.advance(1800)
    assert await schedules.start_due(rig.database, rig.plans) == 1
    assert await schedules.start_due(rig.database, rig.plans) == 0
    [run] = (await http.get("/api/runs")).json()["items"]
    assert run["input"] == {"keep": 3}
    assert run["trigger"] == {
        "source": "schedule", "ref": "clean-up", "initiator": "system", "user": None, "external_event": None,
        "metadata": {"schedule": "clean-up", "slot": "2026-05-01T12:30:00Z"},
        "idempotency_key": "scheduler:clean-up:2026-05-01T12:30:00Z",
    }  # fmt: skip
    shown = (await http.get("/api/schedules/clean-up")).json()
    assert (shown["last_run_id"], shown["last_slot"]) == (run["id"], "2026-05-01T12:30:00+00:00")
    assert shown["next_at"] == "2026-05-02T12:30:00+00:00"
    [record] = await rig.sql("SELECT * FROM interlock.idempotency_record WHERE source = 'scheduler'")
    assert (record["key"], str(record["run_id"])) == ("scheduler:clean-up:2026-05-01T12:30:00Z", run["id"])


async def test_a_schedule_of_a_workflow_that_begins_with_a_gate(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(http, workflow="gate")
    rig.clock.advance(3600)
    await schedules.start_due(rig.database, rig.plans)
    assert [run["status"] for run in await rig.sql("SELECT status FROM interlock.run")] == ["waiting_approval"]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("skip", ["15:30"]),
        ("last", ["15:30"]),
        ("all", ["12:30", "13:00", "13:30", "14:00", "14:30", "15:00", "15:30"]),
    ],
)
async def test_slots_missed_while_nothing_ran(
    rig: Rig, http: httpx2.AsyncClient, missed: str, expected: list[str]
) -> None:
    await add(http, missed=missed, cron="*/30 * * * *")
    rig.clock.advance(3.5 * 3600 + 10)
    await schedules.start_due(rig.database, rig.plans)
    assert [slot[11:16] for slot in await slots(rig)] == expected
    assert (await http.get("/api/schedules/clean-up")).json()["next_at"] == "2026-05-01T16:00:00+00:00"


async def test_what_is_skipped_stays_skipped(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(http, missed="skip")
    rig.clock.advance(3600 + 120)
    assert await schedules.start_due(rig.database, rig.plans) == 0
    assert (await http.get("/api/schedules/clean-up")).json()["next_at"] == "2026-05-01T14:00:00+00:00"
    rig.clock.advance(3600 - 120)
    assert await schedules.start_due(rig.database, rig.plans) == 1


async def test_a_long_list_of_missed_slots_is_started_in_parts(
    rig: Rig, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_MOST_SLOTS", 10)
    await add(http, missed="all", cron="* * * * *")
    rig.clock.advance(25 * 60)
    assert [await schedules.start_due(rig.database, rig.plans) for _ in range(4)] == [10, 10, 5, 0]
    assert len(set(await slots(rig))) == 25


async def test_a_pause_starts_nothing_and_nothing_is_made_up_for(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(http, missed="all")
    other = rig.http(await rig.key("ada", "operator"))
    paused = (await other.post("/api/schedules/clean-up/pause")).json()
    assert (paused["next_at"], paused["paused_at"]) == (None, "2026-05-01T12:00:00+00:00")
    rig.clock.advance(5 * 3600 + 60)
    assert await schedules.start_due(rig.database, rig.plans) == 0
    resumed = (await http.post("/api/schedules/clean-up/resume")).json()
    assert (resumed["next_at"], resumed["paused_at"]) == ("2026-05-01T18:00:00+00:00", None)
    again = (await other.post("/api/schedules/clean-up/resume")).json()
    assert (again, again["acts_as"]) == (resumed, "admin")
    rig.clock.advance(3600)
    await schedules.start_due(rig.database, rig.plans)
    assert await slots(rig) == ["2026-05-01T18:00:00Z"]


async def test_a_run_can_be_asked_for_besides_the_slots(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(http, input={"x": 1})
    await http.post("/api/schedules/clean-up/pause")
    first, second = [
        await http.post("/api/schedules/clean-up/run", headers={"Idempotency-Key": "k"}) for _ in range(2)
    ]  # fmt: skip
    assert (first.status_code, first.content == second.content) == (201, True)
    run = first.json()
    assert (run["input"], run["trigger"]["initiator"], run["trigger"]["user"]) == ({"x": 1}, "user", "admin")
    assert await slots(rig) == ["now"]


async def test_a_run_at_once_is_in_the_workspace_of_its_schedule(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(rig.http(await rig.key("blue", "operator", workspace_id="blue")))
    run = (await http.post("/api/schedules/clean-up/run")).json()
    assert (run["workspace_id"], run["trigger"]["user"]) == ("blue", "admin")


async def test_a_deleted_schedule_starts_nothing_and_its_slots_stay_used(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(http)
    await add(http, 409)
    rig.clock.advance(3600)
    await schedules.start_due(rig.database, rig.plans)
    assert (await http.delete("/api/schedules/clean-up")).status_code == 200
    assert (await http.get("/api/schedules/clean-up")).json()["code"] == "SCHEDULE_NOT_FOUND"
    rig.clock.fixed = NOON  # a clock that was set back
    await add(http)
    rig.clock.advance(3600)
    assert await schedules.start_due(rig.database, rig.plans) == 0
    assert await slots(rig) == ["2026-05-01T13:00:00Z"]


async def test_a_schedule_whose_key_was_revoked_pauses_and_says_why(rig: Rig, http: httpx2.AsyncClient) -> None:
    key = await rig.key("grace", "operator")
    await add(rig.http(key))
    [row] = await rig.sql("SELECT id FROM interlock.api_key WHERE name = 'grace'")
    await rig.database.run_in_transaction(lambda tx: tenants.revoke_key(tx, rig.admin, row["id"]))
    rig.clock.advance(3600)
    assert await schedules.start_due(rig.database, rig.plans) == 0
    shown = (await http.get("/api/schedules/clean-up")).json()
    assert "revoked" in shown["paused_why"] and shown["next_at"] is None
    resumed = (await http.post("/api/schedules/clean-up/resume")).json()
    assert (resumed["acts_as"], resumed["paused_why"]) == ("admin", None)
    rig.clock.advance(3600)
    assert await schedules.start_due(rig.database, rig.plans) == 1


async def test_a_lost_database_pauses_nothing(
    rig: Rig, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(http)
    rig.clock.advance(3600)

    async def away(*_: Any) -> Any:
        raise Unavailable("the database did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(rig.plans, "find", away)
        assert await schedules.start_due(rig.database, rig.plans) == 0
    assert await schedules.start_due(rig.database, rig.plans) == 1


async def test_one_bad_schedule_stops_no_other(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(http, name="bad")
    await add(http)
    await rig.sql("UPDATE interlock.schedule SET timezone = 'Mars/Base' WHERE name = 'bad'")
    rig.clock.advance(3600)
    assert await schedules.start_due(rig.database, rig.plans) == 1


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ({"cron": "0 25 * * *"}, "INVALID_REQUEST", "the hour is wrong"),
        ({"timezone": "Berlin"}, "INVALID_REQUEST", "did you mean Europe/Berlin"),
        ({"workflow": "nowhere"}, "WORKFLOW_NOT_FOUND", "apply it first"),
        ({"missed": "some"}, "INVALID_REQUEST", "'skip', 'last' or 'all'"),
        ({"name": "Clean up"}, "INVALID_REQUEST", "expected a name of lower-case letters"),
    ],
)
async def test_a_mistake_is_named(http: httpx2.AsyncClient, more: dict[str, Any], code: str, says: str) -> None:
    answer = await http.post("/api/schedules", json={"name": "s", "cron": "@daily", "workflow": "work"} | more)
    assert answer.json()["code"] == code and says in answer.json()["detail"], answer.text


async def test_schedules_are_the_tenants_own_and_viewers_only_look(rig: Rig, http: httpx2.AsyncClient) -> None:
    await add(http)
    viewer = rig.http(await rig.key("v", "viewer"))
    assert [s["name"] for s in (await viewer.get("/api/schedules")).json()["items"]] == ["clean-up"]
    assert (await viewer.post("/api/schedules/clean-up/pause")).status_code == 403
    other = await rig.tenant("other")
    stranger = rig.http(await rig.key("s", "admin", other.tenant_id))
    assert (await stranger.get("/api/schedules")).json()["items"] == []
    for call in ("pause", "resume", "run"):
        assert (await stranger.post(f"/api/schedules/clean-up/{call}")).status_code == 404


async def test_looking_for_what_is_due_walks_the_index(rig: Rig, http: httpx2.AsyncClient) -> None:
    await rig.sql(
        "INSERT INTO interlock.schedule"
        " (tenant_id, name, key_id, cron, timezone, workflow, input, missed, next_at, created_at)"
        " SELECT $1, 's' || n, $2, '0 0 1 1 *', 'UTC', 'work', '{}', 'last', now() + interval '1 year', now()"
        " FROM generate_series(1, 5000) AS n",
        rig.admin.tenant_id, rig.admin.key_id,
    )  # fmt: skip
    await rig.sql("ANALYZE interlock.schedule")
    plan = await rig.sql(
        "EXPLAIN SELECT name FROM interlock.schedule WHERE next_at <= '2026-05-01' ORDER BY next_at LIMIT 100"
    )  # fmt: skip
    assert "schedule_due" in plan[0][0] + plan[1][0]


# ---------------------------------------------------------------- two schedulers, a year

CRONS = {"hourly": "0 * * * *", "daily": "30 2 * * *"}
ZONES = ("Europe/Berlin", "America/New_York")


async def a_year(rig: Rig, step: timedelta) -> None:
    """Two schedulers with separate pools repeatedly check the same clock at the same moment."""
    start, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
    rig.clock.fixed = start - timedelta(seconds=1)
    await rig.apply("{name: work, steps: [{id: a, tool: t.echo}]}")
    for zone in ZONES:
        for name, cron in CRONS.items():
            label = f"{name}-{zone.partition('/')[2].lower()}"
            await add(rig.http(), name=label, cron=cron, timezone=zone, missed="all")
    other = await Database(rig.database.url, rig.settings, clock=rig.clock, size=4).open()
    schedulers = [(rig.database, rig.plans), (other, Plans(other))]
    now = start
    while now < end:
        # Advance slot by slot in the nights of a clock change.
        change = any(abs(day - now) < timedelta(hours=8) for day in _CHANGES)
        rig.clock.fixed = now
        while sum(await asyncio.gather(*(schedules.start_due(*each) for each in schedulers))):
            pass
        # A large step must not pass over such a night.
        following = next((day - timedelta(hours=8) for day in _CHANGES if now < day - timedelta(hours=8)), end)
        now += min(step, timedelta(minutes=30)) if change else min(step, following - now + timedelta(seconds=1))
    rig.clock.fixed = end - timedelta(seconds=1)
    while sum(await asyncio.gather(*(schedules.start_due(*each) for each in schedulers))):
        pass
    await other.close()
    for zone in ZONES:
        city = zone.partition("/")[2].lower()
        hourly = [datetime.fromisoformat(slot) for slot in await slots(rig, f"hourly-{city}")]
        assert Counter(hourly) == Counter(start + timedelta(hours=n) for n in range(365 * 24))
        daily = [datetime.fromisoformat(slot).astimezone(ZoneInfo(zone)) for slot in await slots(rig, f"daily-{city}")]
        nights = Counter(slot.date() for slot in daily)
        assert (set(nights.values()), len(nights)) == ({1}, 365)
        assert Counter(slot.strftime("%H:%M") for slot in daily) == {"02:30": 364, "03:00": 1}


_CHANGES = [
    datetime(2026, 3, 8, 7, tzinfo=UTC),
    datetime(2026, 3, 29, 1, tzinfo=UTC),
    datetime(2026, 10, 25, 1, tzinfo=UTC),
    datetime(2026, 11, 1, 6, tzinfo=UTC),
]


async def test_two_schedulers_start_every_slot_of_a_year_once(rig: Rig) -> None:
    await a_year(rig, timedelta(days=5))


@pytest.mark.chaos
async def test_two_schedulers_that_look_every_half_hour_start_every_slot_of_a_year_once(rig: Rig) -> None:
    await a_year(rig, timedelta(minutes=30))
