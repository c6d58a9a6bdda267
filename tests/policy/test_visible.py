"""Text for approvers contains no invisible character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.visible import is_visible, visible_json, visible_text

HIDDEN = {
    "escape": "\x1b", "delete": "\x7f", "bidi override": "\u202e", "bidi isolate": "\u2067",
    "zero-width space": "\u200b", "zero-width joiner": "\u200d", "byte order mark": "\ufeff", "soft hyphen": "\xad",
    "no-break space": "\xa0", "line separator": "\u2028", "tag": "\U000e0041", "variation selector": "\ufe0f",
    "Hangul filler": "\u3164",
    "Braille blank": "\u2800", "private use": "\ue000",
}  # fmt: skip


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_a_hidden_character_is_shown_as_its_escape(hidden: str) -> None:
    """security H1: bidi and zero-width characters reached Slack and the console unescaped."""
    assert visible_text(f"pay{hidden}12") == f"pay{hidden.encode('unicode_escape').decode()}12"
    assert hidden not in visible_json(f"pay{hidden}12")


def test_text_that_people_write_stays_as_it_is() -> None:
    for text in ("Zoë Müller", "Ελλάδα", "東京 1,000円", "naïve – “quoted” €12.50", "e\u0301", "שלום"):
        assert visible_text(text) == text and is_visible(text)


def test_newlines_stay_only_where_the_caller_keeps_them() -> None:
    assert visible_text("a\nb\r") == "a\\nb\\r"
    assert visible_text("a\nb\r", keep_newlines=True) == "a\nb\\r"


def test_marks_cannot_change_what_stands_before_the_text_or_cover_other_lines() -> None:
    assert visible_text("\u0338=1") == "\\u0338=1"
    assert visible_text("a" + "\u0300" * 9) == "a\u0300\u0300" + "\\u0300" * 7


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_json_is_one_visible_line_that_gives_the_value_back(value: object) -> None:
    shown = visible_json(value)
    assert "\n" not in shown and is_visible(shown) and json.loads(shown) == value
