"""An approver in Slack reads exactly what runs, or gets no Approve button."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.integrations.cards import SlackCard, card
from interlock.visible import is_visible

ID = UUID("01890000-0000-7000-8000-000000000000")
NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
CONSOLE = f"https://interlock.example/approvals/{ID}"


def asked(fields: dict[str, Any], proposed: dict[str, Any] | None = None, **columns: Any) -> Any:
    """The row of an approval, as `card_of` reads it."""
    action = {"tool": "shop.refund", "target": "ch_1", "fields": fields}
    row = {
        "id": ID, "status": "requested", "kind": "action", "tier": "med", "two_person": False, "approvers": [],
        "escalated_at": None, "escalate_to": [], "reason_required": False, "rule_ids": ["r1"], "reason": "ask",
        "summary": "shop.refund on ch_1", "digest": "d" * 64, "receipt_id": None, "edited_by": [],
        "requested_by": f"admin:{ID}", "asked_by": [], "session_id": None,
        "workflow": "refund", "step": "pay", "expires_at": NOW + timedelta(hours=8),
        "resolved_at": None, "workspace_id": None, "action": json.dumps(action),
        "proposed": json.dumps({**action, "fields": proposed}) if proposed is not None else None,
    }  # fmt: skip
    return row | columns


def action_ids(shown: SlackCard) -> list[str]:
    return [e["action_id"] for b in shown.blocks if b["type"] == "actions" for e in b["elements"]]


def can_approve(shown: SlackCard) -> bool:
    return "interlock_approve" in action_ids(shown)


def read_back(shown: SlackCard) -> dict[str, list[Any]]:
    """Parse every line of the card, and return the action's fields as a reader would understand them."""
    text = "\n".join(b["text"]["text"] for b in shown.blocks if b["type"] == "section" and "text" in b)
    found: dict[str, list[Any]] = {}
    for fence in re.findall(r"```(.*?)```", text, re.DOTALL):
        for line in fence.split("\n"):
            plain = line.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
            if plain[:2] not in ("+ ", "  "):
                continue
            name, end = _name(plain[2:])
            found.setdefault(name, []).append(_value(plain[2 + end :].removeprefix(": ")))
    return found


def _name(text: str) -> tuple[str, int]:
    if text.startswith('"'):
        name, end = json.JSONDecoder().raw_decode(text)
        return name, end
    found = re.match(r"[A-Za-z_][\w.-]*", text, re.ASCII)
    assert found is not None, text
    return found.group(), found.end()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ("cut", text)


def test_a_value_cannot_forge_a_field_or_push_the_real_one_off_the_card() -> None:
    """security H1: the card showed `+ amount: 12.50`, and 1000000 was nowhere on it."""
    forged = {
        "tag": "&" * 299, "to": "Alice & Bob" + "&" * 20, "amount": 1000000,
        "memo": "Team lunch\n+ amount: 12.50\n" + "&" * 272,
    }  # fmt: skip
    shown = card(asked(forged), [])
    assert read_back(shown)["amount"] == [1000000]
    assert can_approve(shown) == (read_back(shown) == {name: [value] for name, value in forged.items()})
    for block in shown.blocks:
        text = block.get("text", {}).get("text", "")
        assert text.count("```") % 2 == 0 and len(text) <= 3000
    assert can_approve(shown), "the whole action fits on the card"


TEXT = st.text() | st.text(alphabet='&<>`\n\u202e\u200b"\\+-: a1', max_size=400) | st.just("&" * 3000)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, VALUES, max_size=40), st.none() | st.dictionaries(TEXT, VALUES, max_size=5))
def test_every_field_is_shown_exactly_or_there_is_no_approve_button(
    fields: dict[str, Any], proposed: dict[str, Any] | None
) -> None:
    shown = card(asked(fields, proposed), [])
    if can_approve(shown):
        read = read_back(shown)
        assert {name: values[0] for name, values in read.items()} == fields
        assert all(len(values) == 1 for values in read.values())
    for block in shown.blocks:
        texts = [block["text"]] if "text" in block else block.get("fields", block.get("elements", []))
        for text in texts:
            if "type" in text and text["type"] in ("mrkdwn", "plain_text"):
                assert 1 <= len(text["text"]) <= 3000
                assert is_visible(text["text"].replace("\n", ""))
    assert len(shown.blocks) <= 50


def test_a_card_that_was_cut_links_to_the_console_instead_of_approving() -> None:
    shown = card(asked({"memo": "x" * 30_000, "amount": 7}), [], CONSOLE)
    assert action_ids(shown) == ["interlock_open", "interlock_reject"]
    [opens] = [e for b in shown.blocks if b["type"] == "actions" for e in b["elements"] if e.get("url")]
    assert opens["url"] == CONSOLE
    assert "does not show the whole" in orjson.dumps(shown.blocks).decode()


def test_without_a_public_address_a_cut_card_names_the_command() -> None:
    shown = card(asked({"memo": "x" * 30_000}), [])
    assert not can_approve(shown)
    assert f"interlock approval show {ID}" in orjson.dumps(shown.blocks).decode()


def test_every_card_links_to_the_approval_when_the_address_is_known() -> None:
    for status in ("requested", "approved"):
        columns = {"status": status, "resolved_at": NOW if status == "approved" else None}
        assert f"<{CONSOLE}|" in orjson.dumps(card(asked({}, **columns), [], CONSOLE).blocks).decode()


@pytest.mark.parametrize("column", ["summary", "reason", "workflow"])
def test_cutting_anything_else_takes_the_approve_button_too(column: str) -> None:
    assert can_approve(card(asked({}, **{column: "&" * 60}), []))
    assert not can_approve(card(asked({}, **{column: "&" * 4000}), []))


def test_a_gate_shows_its_whole_sentence() -> None:
    """The header has room for 150 characters, but the approver must see the whole sentence."""
    sentence = "Pay " + "Alice and " * 20 + "1000000"
    shown = card(asked({}, kind="gate", summary=sentence, action='{"summary": "s"}'), [])
    plain = [
        b["text"]["text"]
        for b in shown.blocks
        if b["type"] == "section" and b.get("text", {}).get("type") == "plain_text"
    ]
    assert sentence in plain and can_approve(shown)


def test_markup_in_foreign_text_is_not_rendered() -> None:
    """Readers would see `~1000000~ 12` as 12."""
    shown = card(asked({"to": "~1000000~ 12"}, summary="pay ~1000000~ 12", reason="*May decide*\nanyone"), [])
    for block in shown.blocks:
        for text in [block.get("text", {}), *block.get("fields", []), *block.get("elements", [])]:
            if text.get("type") == "mrkdwn":
                outside = re.sub(r"```.*?```|`[^`]*`", "", text["text"], flags=re.DOTALL)
                assert "~" not in outside and "anyone" not in outside


def deciders(**columns: Any) -> str:
    facts = next(block["fields"] for block in card(asked({"to": "ann"}, **columns), []).blocks if "fields" in block)
    return next(fact["text"] for fact in facts if fact["text"].startswith("*May decide*")).partition("\n")[2]


def test_a_card_names_who_cannot_approve_as_the_vote_decides_it() -> None:
    """A gate of tier high said "every approver", and an agent's action "not who asked"; both were untrue."""
    assert deciders() == deciders(kind="gate", tier="high") == "any approver except `admin`"
    assert deciders(kind="gate") == deciders(session_id=ID) == "any approver"
    assert deciders(session_id=ID, edited_by=[f"ann:{ID}"]) == "any approver except `ann`"
    escalated = {"approvers": ["finance"], "escalate_to": ["directors"], "escalated_at": NOW}
    assert deciders(**escalated) == "`directors` or `finance` except `admin`"
