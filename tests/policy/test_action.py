"""A proposed action has one digest, for any content and for every reader."""

import hashlib
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.audit.canonical import normal
from interlock.errors import Invalid
from interlock.lifecycle import Tier
from interlock.policy.action import ProposedAction, ToolFacts, canonical, propose

REFUND = ToolFacts("shop.refund", True, Tier.HIGH, False, {"type": "object"}, "shop.undo_refund")

SAFE = st.integers(-(2**53) + 1, 2**53 - 1)
# Values that RFC 8785 accepts unchanged, and values that we have to encode differently.
PLAIN = st.recursive(
    st.none() | st.booleans() | SAFE | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ANY_TEXT = st.text(st.characters(exclude_categories=[]))  # lone surrogates too
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(max_size=8) | st.datetimes(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def action(fields: dict[str, Any], target: str | None = None) -> ProposedAction:
    return propose(REFUND, fields, target)


def test_a_tool_is_a_connector_and_an_operation() -> None:
    assert (REFUND.connector, REFUND.operation) == ("shop", "refund")
    ping = ToolFacts("ping", False, Tier.LOW, True, {})
    assert (ping.connector, ping.operation) == ("ping", "ping")


def test_the_digest_is_that_of_the_canonical_form_and_stays() -> None:
    proposed = action({"charge": "ch_1", "amount": 50}, "charge/ch_1")
    written = (
        b'{"connector":"shop","fields":{"amount":50,"charge":"ch_1"},'
        b'"operation":"refund","target":"charge/ch_1","tool":"shop.refund"}'
    )
    assert proposed.digest == hashlib.sha256(written).hexdigest()


def test_what_goes_over_the_wire_has_the_same_digest() -> None:
    proposed = action({"id": 2**60, "rate": float("nan"), "note": None, "at": datetime(2026, 11, 16, tzinfo=UTC)})
    shown = json.loads(json.dumps(proposed.as_dict()))
    digest = shown.pop("digest")
    assert list(shown) == ["tool", "connector", "operation", "target", "fields"]
    assert digest == proposed.digest == hashlib.sha256(canonical(shown)).hexdigest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": None}, {}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": 2**53}, {"a": 2**53 + 1}),
        ({"a": float("inf")}, {"a": float("-inf")}),
    ],
)
def test_other_fields_have_another_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert action(one).digest != action(other).digest


def test_another_target_has_another_digest() -> None:
    assert len({action({}).digest, action({}, "a").digest, action({}, "b").digest}) == 3


def test_the_order_of_fields_and_the_writing_of_a_number_do_not_matter() -> None:
    assert action({"a": 50, "b": 1}).digest == action({"b": 1, "a": 50.0}).digest


def test_risk_is_not_part_of_the_digest() -> None:
    calmer = ToolFacts("shop.refund", True, Tier.LOW, False, {})
    assert propose(calmer, {"a": 1}).digest == action({"a": 1}).digest


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2**53 - 1, b"9007199254740991"),
        (2**53, b'"$int:9007199254740992"'),
        (-(2**53), b'"$int:-9007199254740992"'),
        (float(2**60), b'"$int:1152921504606846976"'),
        (50.0, b"50"),
        (-0.0, b"0"),
        (1e21, b"1e+21"),
        (1e-7, b"1e-7"),
        (0.00001, b"0.00001"),
        (float("nan"), b'"$float:nan"'),
        (float("-inf"), b'"$float:-inf"'),
        ("\ud800", b'"$utf16:d800"'),
        (b"hello", b'"$bytes:aGVsbG8="'),
        (Decimal("1.10"), b'"1.10"'),
        ({1: "a", "\U0001f600": "c", "\uffee": "d"}, '{"$key:1":"a","\U0001f600":"c","\uffee":"d"}'.encode()),
        ({3, 1, 2}, b"[1,2,3]"),
        (Tier.HIGH, b'"high"'),
    ],
)
def test_what_json_cannot_hold_is_written_with_a_tag(value: Any, written: bytes) -> None:
    assert canonical(value) == written


def test_a_number_too_long_for_digits_is_still_written() -> None:
    assert canonical(10**10_000).startswith(b'"$int:0x')


def test_too_deep_is_said_and_not_a_crash() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(Invalid, match="nested deeper than 240"):
        canonical(nested)


@settings(deadline=None)
@given(PLAIN)
def test_the_fast_way_writes_what_rfc_8785_says(value: Any) -> None:
    plain = normal(value)
    assert canonical(value) == rfc8785.dumps(plain)


@settings(deadline=None)
@given(ANYTHING)
def test_canonical_never_raises_and_survives_being_read_back(value: Any) -> None:
    once = canonical(value)
    assert canonical(json.loads(once)) == once
    assert normal(normal(value)) == normal(value)


@settings(deadline=None)
@given(st.dictionaries(ANY_TEXT, ANYTHING, max_size=5), st.none() | ANY_TEXT)
def test_every_action_has_a_digest(fields: dict[str, Any], target: str | None) -> None:
    assert len(action(fields, target).digest) == 64
