"""Redaction: shapes without values, and no trace of a secret."""

import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.audit.canonical import canonical
from interlock.audit.redact import MARK, Scrubber, metadata, scrub, tenant_salt

SALT = b"s" * 32
SECRET = 'pa/ss+wörd"&\\ x\n9f27'


# ---------------------------------------------------------------- metadata


def test_metadata_keeps_the_shape_and_no_value() -> None:
    value = {"charge": "ch_1", "amount": 250, "rate": 1.5, "urgent": True, "note": None, "to": {"name": "Zoë"}}
    described = metadata(value, salt=SALT)
    assert {name: one.get("type") for name, one in described.items()} == {
        "charge": "string", "amount": "number", "rate": "number", "urgent": "boolean", "note": "null", "to": None,
    }  # fmt: skip
    assert described["charge"]["size"] == 4
    assert described["to"]["name"]["size"] == 4  # bytes, not characters
    assert len(described["amount"]["hash"]) == 16
    text = json.dumps(described)
    assert "ch_1" not in text and "250" not in text and "Zo" not in text


def test_equal_values_have_equal_hashes_for_one_tenant_only() -> None:
    mine, theirs = tenant_salt(b"master", "a"), tenant_salt(b"master", "b")
    assert metadata(250, salt=mine) == metadata(250.0, salt=mine) != metadata(251, salt=mine)
    assert metadata(250, salt=mine) != metadata(250, salt=theirs)


def test_without_a_salt_there_is_no_hash_that_could_be_guessed() -> None:
    assert metadata({"pin": 1234}) == {"pin": {"type": "number"}}
    assert metadata("postcode") == {"type": "string", "size": 8}


def test_allowed_fields_stay_as_they_are_also_inside_lists() -> None:
    value = {
        "id": 7,
        "to": {"country": "NL", "name": "x"},
        "lines": [{"sku": "a", "price": 1}, {"sku": "b", "price": 2}],
    }
    described = metadata(value, allow={"id", "to.country", "lines.sku"})
    assert described["id"] == 7
    assert described["to"] == {"country": "NL", "name": {"type": "string", "size": 1}}
    assert [line["sku"] for line in described["lines"]["items"]] == ["a", "b"]
    assert described["lines"]["items"][0]["price"] == {"type": "number"}


def test_an_allowed_object_stays_whole_but_not_however_large() -> None:
    assert metadata({"to": {"a": [1]}}, allow=["to"]) == {"to": {"a": [1]}}
    assert metadata({"to": "x" * 5000}, allow=["to"]) == {"to": {"type": "string", "size": 5000}}


def test_an_allow_list_cannot_show_a_secret() -> None:
    described = metadata({"url": f"https://x/?key={quote(SECRET)}"}, allow=["url"], secrets=[SECRET])
    assert described == {"url": f"https://x/?key={MARK}"}


def test_a_secret_has_neither_size_nor_hash() -> None:
    assert metadata({"token": SECRET}, secrets=[SECRET], salt=SALT) == {"token": {"type": "secret"}}
    assert metadata(123456, secrets=["123456"], salt=SALT) == {"type": "secret"}
    assert metadata(float("nan"), secrets=[SECRET]) == {"type": "number"}
    many = metadata([1, 2, 3, 4, 5, SECRET], secrets=[SECRET], salt=SALT)
    assert "hash" not in many


def test_lists_are_summarised() -> None:
    described = metadata(list(range(1000)), salt=SALT)
    assert described["type"] == "array" and described["length"] == 1000 and len(described["items"]) == 5
    assert described["hash"] != metadata(list(range(1, 1001)), salt=SALT)["hash"]


@pytest.mark.parametrize("levels", [5, 100])
def test_depth_width_and_number_are_limited(levels: int) -> None:
    deep: Any = "x"
    for _ in range(levels):
        deep = {"a": deep}
    wide = {f"f{n}": {f"g{m}": 1 for m in range(100)} for n in range(100)}
    for value in (deep, wide, [[[[[[1] * 9] * 9] * 9] * 9] * 9] * 9):
        assert len(canonical(metadata(value, salt=SALT))) < 200_000
    assert metadata(wide)["…"] == {"more": 36}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_metadata_of_anything_can_be_written_down(value: Any) -> None:
    canonical(metadata(value, salt=SALT, secrets=["planted"]))


# ---------------------------------------------------------------- secrets

WAYS: dict[str, Callable[[str], str]] = {
    "plain": lambda s: s,
    "in a sentence": lambda s: f"could not sign in with {s}!",
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "base64url": lambda s: base64.urlsafe_b64encode(s.encode()).decode().rstrip("="),
    "basic auth, 1": lambda s: "Basic " + base64.b64encode(f"u:{s}".encode()).decode(),
    "basic auth, 2": lambda s: "Basic " + base64.b64encode(f"us:{s}".encode()).decode(),
    "basic auth, 3": lambda s: "Basic " + base64.b64encode(f"use:{s}:more".encode()).decode(),
    "inside base64url": lambda s: base64.urlsafe_b64encode(f"user:{s}".encode()).decode(),
    "url": lambda s: f"https://host/{quote(s)}",
    "url, slashes too": lambda s: f"https://host/{quote(s, safe='')}",
    "url, lower case": lambda s: quote(s, safe="").replace("%2F", "%2f").replace("%C3%B6", "%c3%b6"),
    "form": lambda s: urlencode({"key": s}),
    "plus": quote_plus,
    "json": lambda s: json.dumps({"k": s}),
    "json, utf-8": lambda s: json.dumps({"k": s}, ensure_ascii=False),
    "json in json": lambda s: json.dumps({"body": json.dumps({"k": s})}),
    "repr": lambda s: repr(ValueError(s)),
    "hex": lambda s: s.encode().hex(),
    "HEX": lambda s: s.encode().hex().upper(),
}
SECRETS = [SECRET, "correct-horse", "ghp_16C7e42F292c6912E7710c838347Ae178B4a", "hunter2!"]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("way", sorted(set(WAYS) - {"url, lower case"}))
def test_a_secret_is_found_however_it_is_written(secret: str, way: str) -> None:
    shown = WAYS[way](secret)
    scrubbed = scrub(shown, [secret])
    assert MARK in scrubbed
    for form in (secret, base64.b64encode(secret.encode()).decode()[:-4], quote(secret, safe="")):
        assert form not in scrubbed


def test_percent_codes_may_be_lower_case() -> None:
    secret = "a/b+c=d"
    assert scrub("x?k=a%2fb%2bc%3dd", [secret]) == f"x?k={MARK}"


def test_everything_nested_is_scrubbed_and_the_rest_is_as_it_was() -> None:
    value = {
        "a": [SECRET, 1, None, True, ("x", SECRET)],
        SECRET: {"b": f"<{SECRET}>"},
        "n": 2.5,
        "raw": SECRET.encode(),
    }
    assert scrub(value, [SECRET]) == {
        "a": [MARK, 1, None, True, ("x", MARK)], MARK: {"b": f"<{MARK}>"}, "n": 2.5, "raw": MARK.encode(),
    }  # fmt: skip


def test_an_exception_becomes_its_text_without_the_secret() -> None:
    assert str(scrub(ValueError(f"bad key {SECRET}"), [SECRET])) == f"bad key {MARK}"


def test_a_number_that_is_a_secret_is_one() -> None:
    assert scrub({"pin": 987654, "n": 98}, ["987654"]) == {"pin": MARK, "n": 98}


def test_the_longer_of_two_secrets_is_taken_out_whole() -> None:
    assert scrub("token-abcdef token-abc", ["token-abc", "token-abcdef"]) == f"{MARK} {MARK}"


def test_lines_of_a_key_file_are_secrets_too() -> None:
    pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIBase64Base64\n-----END PRIVATE KEY-----\n"
    assert "MC4CAQ" not in scrub("line 2: MC4CAQAwBQYDK2VwBCIEIBase64Base64", [pem])


def test_no_secrets_and_too_short_ones_change_nothing() -> None:
    value = {"a": ["b"]}
    assert scrub(value, []) is value
    assert scrub("abc abc", ["abc", ""]) == "abc abc"


@given(st.text(min_size=6), st.text(), st.text())
def test_no_planted_secret_is_left(secret: str, before: str, after: str) -> None:
    scrubber = Scrubber([secret])
    for shown in (before + secret + after, json.dumps({before: secret})):
        left = scrubber.scrub(shown)
        assert secret not in left.replace(MARK, "") or secret in MARK or secret in (before + after).replace(secret, "")
