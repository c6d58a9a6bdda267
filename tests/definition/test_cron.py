"""Slots: at the local times that people expect, over both daylight-saving changes."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from zoneinfo import ZoneInfo

import pytest

from interlock.definition.cron import Cron, Missed

YEAR = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
ZONES = pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"])


def slots(cron: Cron, start: datetime, end: datetime) -> list[datetime]:
    return list(takewhile(lambda slot: slot < end, cron.slots_after(start - timedelta(microseconds=1))))


@ZONES
def test_an_hourly_job_runs_every_hour_of_the_year(zone: str) -> None:
    found = slots(Cron.parse("0 * * * *", zone), *YEAR)
    if zone != "Australia/Lord_Howe":  # its clocks change by half an hour
        assert found == [YEAR[0] + timedelta(hours=n) for n in range(365 * 24)]
    assert len(set(found)) == len(found)


@ZONES
def test_a_daily_job_runs_once_on_every_day(zone: str) -> None:
    local = ZoneInfo(zone)
    found = slots(Cron.parse("30 2 * * *", zone), *YEAR)
    days = Counter(slot.astimezone(local).date() for slot in found)
    assert (set(days.values()), len(days)) == ({1}, 365)
    # Slots are at half past two. On the day without that time, the slot is at the end of the gap.
    odd = [slot.astimezone(local).strftime("%m-%d %H:%M") for slot in found if slot.astimezone(local).minute != 30]
    gaps = {"Europe/Berlin": ["03-29 03:00"], "America/New_York": ["03-08 03:00"]}
    assert odd == gaps.get(zone, [])


@ZONES
@pytest.mark.parametrize("expression", ["0 * * * *", "30 2 * * *", "*/20 * * * *", "15 1-3 * * *", "0 2 * * sun"])
def test_going_from_slot_to_slot_and_all_at_once_give_the_same(zone: str, expression: str) -> None:
    """A schedule stores only its next slot; a restart must not change the later slots."""
    cron = Cron.parse(expression, zone)
    for month, day in ((3, 6), (3, 28), (4, 3), (10, 2), (10, 24), (10, 31)):
        around = datetime(2026, month, day, tzinfo=UTC)
        at_once = slots(cron, around, around + timedelta(days=4))
        one_by_one, slot = [], cron.after(around - timedelta(microseconds=1))
        while slot is not None and slot < around + timedelta(days=4):
            one_by_one.append(slot)
            slot = cron.after(slot)
        assert one_by_one == at_once


def test_in_the_hour_that_comes_twice_the_next_slot_is_never_over_already() -> None:
    cron = Cron.parse("50 2 * * *", "Europe/Berlin")
    second = datetime(2026, 10, 25, 1, 45, tzinfo=UTC)  # 02:45, for the second time
    assert cron.after(second) == datetime(2026, 10, 26, 1, 50, tzinfo=UTC)


FIRST = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("missed", "late", "expected"),
    [
        (Missed.SKIP, 0, [0]),
        (Missed.SKIP, 0.9, [0]),
        (Missed.SKIP, 35, []),
        (Missed.SKIP, 150.5, [150]),
        (Missed.LAST, 0, [0]),
        (Missed.LAST, 155, [150]),
        (Missed.LAST, 60 * 24 * 400, [60 * 24 * 400]),
        (Missed.ALL, 0, [0]),
        (Missed.ALL, 35, [0, 10, 20, 30]),
        (Missed.ALL, 60 * 24, list(range(0, 1000, 10))),
    ],
)
def test_what_becomes_of_missed_slots(missed: Missed, late: float, expected: list[int]) -> None:
    """Slots every ten minutes: the lateness in minutes, and the minutes of the slots that start."""
    cron = Cron.parse("*/10 * * * *", "Europe/Berlin")
    due = cron.due(FIRST, FIRST + timedelta(minutes=late), missed, most=100)
    assert due == [FIRST + timedelta(minutes=minutes) for minutes in expected]


def test_the_last_slot_is_found_in_the_hour_that_comes_twice() -> None:
    cron = Cron.parse("50 2 * * *", "Europe/Berlin")
    first, now = datetime(2026, 10, 20, 0, 50, tzinfo=UTC), datetime(2026, 10, 25, 1, 10, tzinfo=UTC)
    assert cron.due(first, now, Missed.LAST, 100) == [datetime(2026, 10, 25, 0, 50, tzinfo=UTC)]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize("expression", ["30 2 * * *", "0 * * * *", "15,45 1-3 * * *", "*/20 2 * * *"])
def test_the_last_slot_is_that_of_all_of_them(zone: str, expression: str) -> None:
    """At any moment around a clock change, with a search that starts days before."""
    cron = Cron.parse(expression, zone)
    for month, day in ((3, 8), (3, 29), (10, 25), (11, 1)):
        start = datetime(2026, month, day, tzinfo=UTC)
        every = slots(cron, start - timedelta(days=3), start + timedelta(days=1))
        for minutes in range(0, 24 * 60, 25):
            now = start + timedelta(minutes=minutes)
            assert cron.due(every[0], now, Missed.LAST, 1) == [slot for slot in every if slot <= now][-1:]


@pytest.mark.parametrize(
    ("expression", "zone", "says"),
    [
        ("61 * * * *", "UTC", "the minute is wrong"),
        ("* * *", "UTC", "it has five fields"),
        ("0 0 0 * * *", "UTC", "it has five fields"),
        ("0 0 30 2 *", "UTC", "the day of month is wrong"),
        ("0 0 * * *", "Europe/Berln", "did you mean Europe/Berlin?"),
        ("0 0 * * *", "../../etc/passwd", "no time zone"),
    ],
)
def test_a_mistake_is_named(expression: str, zone: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        Cron.parse(expression, zone)


def test_names_stand_for_expressions() -> None:
    assert Cron.parse(" @Daily ", "UTC").expression == "0 0 * * *"
