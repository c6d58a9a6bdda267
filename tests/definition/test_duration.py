import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.definition.duration import format_duration, parse_duration
from interlock.wire.common import LONGEST_SECONDS


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("2m", 120),
        ("4h", 14400),
        ("1h30m", 5400),
        ("7d", 604800),
        ("1d2h3m4s5ms", 93784.005),
        ("1.5h", 5400),
        (" 5s ", 5),
        ("0s", 0),
        (30, 30),
        (0.25, 0.25),
        (0, 0),
    ],
)
def test_a_duration_is_read_as_people_write_it(written, seconds):
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "junk",
    ["", "  ", "5", "5 parsecs", "-5s", "5x", "m", "30m1h", "5 m", "1h 30m", "٣s", -1, -0.5, math.nan, True, None, []],
)
def test_junk_is_refused_with_what_would_be_right(junk):
    with pytest.raises(ValueError, match=r"is not a duration; .*5m"):
        parse_duration(junk)


def test_the_refusal_quotes_what_was_written():
    with pytest.raises(ValueError, match=r"^'5 parsecs' is not a duration; write 30s, 5m, 4h, 7d or 1h30m$"):
        parse_duration("5 parsecs")


@pytest.mark.parametrize("endless", ["99999999d", "9" * 400 + "d", math.inf, 10**30])
def test_a_duration_that_no_date_can_hold_is_refused(endless):
    with pytest.raises(ValueError, match="longest duration, 3650d"):
        parse_duration(endless)


@pytest.mark.parametrize(
    ("seconds", "written"), [(0, "0s"), (0.5, "500ms"), (90, "1m30s"), (5400, "1h30m"), (604800, "7d"), (60, "1m")]
)
def test_a_duration_is_written_briefly(seconds, written):
    assert format_duration(seconds) == written


@given(st.floats(0, LONGEST_SECONDS))
def test_what_is_written_reads_back_to_the_millisecond(seconds):
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=0.001)


@given(st.text())
def test_any_text_is_a_duration_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert parse_duration(text) >= 0
