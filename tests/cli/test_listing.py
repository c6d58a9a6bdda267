"""A listing is readable at every terminal width, and its ids can be copied."""

import io
import time
from datetime import UTC, datetime

import pytest
from rich.console import Console
from tests.cli.stub import NOW

from interlock.cli import formatting, run_view
from interlock.cli.listing import Listing
from interlock.wire import Event

IDS = ["01a1ed40-9e75-7000-9e28-33af66aeed6a", "01a1ed37-83f4-7000-b3f8-f5a8e4a33465"]
LONG = "Correct 18234 records of customers in the warehouse, the CRM and the mailing list?"
ROWS = [
    [IDS[0], "refund@12", "succeeded", "", "2026-11-18 06:03:17", "shop.refund on ch_1"],
    [IDS[1], "correction-of-all-records@1", "waiting_approval", "", "2026-11-18 05:53:20", LONG],
]
HEADINGS = ["ID", "WORKFLOW", "STATUS", "COST", "CREATED", "ASKS"]


def at(width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(Listing(HEADINGS, ROWS))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_with_room_each_row_is_a_line() -> None:
    assert at(250)[1:] == [
        f"{IDS[0]}  refund@12                    succeeded               2026-11-18 06:03:17  shop.refund on ch_1",
        f"{IDS[1]}  correction-of-all-records@1  waiting_approval        2026-11-18 05:53:20  {LONG}",
    ]


def test_with_less_room_what_is_empty_is_left_out_and_text_is_broken() -> None:
    lines = at(128)
    assert "COST" not in lines[0] and all(id_ in "\n".join(lines) for id_ in IDS)
    assert lines[2].endswith("2026-11-18 05:53:20  Correct 18234 records") and len(lines) == 6


def test_in_a_common_terminal_the_rest_stands_below_the_id() -> None:
    lines = at(100)
    assert lines[:4] == [
        "ID",
        "  WORKFLOW                     STATUS            CREATED              ASKS",
        IDS[0],
        "  refund@12                    succeeded         2026-11-18 06:03:17  shop.refund on ch_1",
    ]


@pytest.mark.parametrize("width", [46, 60, 80])
def test_in_a_narrow_one_each_value_has_its_name(width: int) -> None:
    lines = at(width)
    assert lines[:2] == [f"ID        {IDS[0]}", "WORKFLOW  refund@12"] and max(map(len, lines)) <= width


def test_into_a_pipe_nothing_is_broken_cut_or_padded(capsys: pytest.CaptureFixture[str]) -> None:
    word = "x" * 5_000
    formatting.console().print(Listing(["ID", "NOTE", "MORE"], [["1", word, "a b"], ["2", "short", ""]]))
    run_view.print_event(formatting.console(), Event(seq=1, type="t", at=NOW, run_id="r", data={"note": word}))
    first, second, third, event = capsys.readouterr().out.splitlines()
    assert first.startswith("ID  NOTE") and second.split() == ["1", word, "a", "b"] and third == "2   short"
    assert event.endswith(f"note={word}")


def test_a_moment_says_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    at = datetime(2026, 11, 16, 12, tzinfo=UTC)
    for zone, shown in (("UTC", "2026-11-16 12:00:00 UTC"), ("Europe/Berlin", "2026-11-16 13:00:00 CET")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        try:
            assert formatting.moment(at) == shown
        finally:
            monkeypatch.undo()
            time.tzset()
    assert formatting.moment(None) == ""
