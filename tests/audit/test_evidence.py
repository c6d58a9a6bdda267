"""Evidence: one signed file that auditors check offline; every changed byte is detected, and it contains no value."""

import base64
import hashlib
import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
import pytest

from interlock.audit.canonical import canonical
from interlock.audit.chain import Checkpoint, journal_digest, next_checkpoint, text_digest
from interlock.audit.evidence import (
    PAYLOAD_TYPE,
    EvidenceInvalid,
    Trust,
    bundle,
    describe,
    open_envelope,
    rollup,
    seal_envelope,
)
from interlock.audit.keys import Keyring, SigningKey

KEY = SigningKey.generate()
RING = Keyring([KEY.verify_key])
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
TENANT, RUN = "01976a2e-0000-7000-8000-000000000001", "01976a2e-1111-7000-8000-000000000000"
SECRET = "sk_live_planted_0123"


def entry(seq: int) -> dict[str, Any]:
    return {
        "tenant_id": TENANT, "run_id": RUN, "seq": seq, "at": NOON, "type": "step_transition", "step": "refund",
        "from_state": "running", "event": "succeed", "to_state": "succeeded", "attempt": 1, "token": 3,
        "actor": "worker:a", "data_sha256": None, "output_sha256": text_digest('{"id": 1}'), "position": 40 + seq,
    }  # fmt: skip


CHECKPOINT = next_checkpoint(KEY, None, tenant_id=TENANT, position=44, head=bytes(32), at=NOON)


def statement(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "run": {
            "id": UUID(RUN), "tenant_id": TENANT, "workflow": "refund", "workflow_version": 3, "status": "succeeded",
            "reason": "completed", "requested_by": "anna", "created_at": NOON, "cost_usd": 0.3, "unknown_column": "x-1",
            "trigger": {"source": "api", "ref": "req-9", "body": "Jane Doe"},
            "input": {"charge": "ch_99812", "amount": 48125, "customer": {"name": "Jane Doe"}, "key": SECRET},
            "result": {"id": "re_5512", "note": f"Bearer {SECRET}"}, "error": None,
        },
        "entries": [entry(seq) for seq in range(1, 4)],
        "decisions": [{
            "step": "refund", "answer": "needs_approval", "tier": "high", "two_person": True, "rule_ids": ["large"],
            "reason": "refunds over 100 need two people", "policy_digest": "ab" * 32, "at": NOON,
            "request": {"input": {"amount": 48125}},
        }],
        "approvals": [{
            "id": "a-1", "step_key": "refund", "status": "approved", "tier": "high", "two_person": True,
            "action": {"tool": "shop.refund", "connector": "shop", "operation": "refund", "target": "ch_99812",
                       "fields": {"amount": 48125}, "digest": "cd" * 32},
            "summary": "Refund 48125 to Jane Doe",
            "votes": [{"by": "ben", "decision": "approved", "reason": "seen", "at": NOON},
                      {"by": "cleo", "decision": "approved", "reason": f"key is {SECRET}", "at": NOON}],
        }],
        "receipts": [{
            "id": "r-1", "step_key": "refund", "status": "succeeded", "idempotency_key": "k-1",
            "request_metadata": {"amount": {"type": "number"}}, "output": {"id": "re_5512"},
        }],
        "costs": [
            {"provider": "openai", "model": "m", "cost_usd": 0.1, "input_tokens": 10, "output_tokens": 1},
            {"provider": "openai", "model": "m", "cost_usd": 0.2, "input_tokens": 20, "output_tokens": 2},
            {"provider": "anthropic", "model": "n", "cost_usd": "1.50"},
        ],
        "checkpoints": [CHECKPOINT],
        "made_at": NOON, "version": "0.1.0", "secrets": [SECRET], "salt": b"salt", "allow": ["charge"],
    }  # fmt: skip
    return bundle(**facts | changes)


@pytest.fixture
def sealed() -> bytes:
    return seal_envelope(statement(), KEY)


def refused(data: bytes, keyring: Keyring | None = RING, **options: Any) -> str:
    with pytest.raises(EvidenceInvalid) as raised:
        open_envelope(data, keyring, **options)
    return raised.value.code


# ---------------------------------------------------------------- what is in it


def test_it_is_an_in_toto_statement_about_the_run() -> None:
    made = statement()
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://interlock.dev/evidence/v1"
    digest = journal_digest([entry(seq) for seq in range(1, 4)])
    assert made["subject"] == [{"name": f"run/{RUN}", "digest": {"sha256": digest}}]
    journal = made["predicate"]["journal"]
    assert journal == {"entries": 3, "sha256": digest, "positions": {"first": 41, "last": 43}, "sealed": True}
    assert Checkpoint.from_dict(made["predicate"]["checkpoints"][0]) == CHECKPOINT


def test_it_tells_what_happened_and_who_allowed_it_without_a_value() -> None:
    told = statement()["predicate"]
    assert told["run"]["status"] == "succeeded"
    assert told["run"]["trigger"]["source"] == "api"
    assert told["decisions"][0]["rule_ids"] == ["large"]
    assert [vote["by"] for vote in told["approvals"][0]["votes"]] == ["ben", "cleo"]
    assert told["approvals"][0]["action"]["digest"] == "cd" * 32
    assert told["receipts"][0]["status"] == "succeeded"
    assert told["input"]["charge"] == "ch_99812"  # declared harmless
    text = canonical(told).decode()
    for value in ("48125", "Jane", "re_5512", "x-1"):
        assert value not in text


def test_no_secret_is_in_it() -> None:
    assert SECRET not in canonical(statement()).decode()
    assert SECRET.encode() not in base64.b64decode(orjson.loads(seal_envelope(statement(), KEY))["payload"])


def test_costs_add_up_exactly() -> None:
    costs = statement()["predicate"]["costs"]
    assert costs["total_usd"] == "1.8"
    assert [(c["provider"], c["calls"], c["input_tokens"], c["cost_usd"]) for c in costs["by_model"]] == [
        ("anthropic", 1, 0, "1.5"),
        ("openai", 2, 30, "0.3"),
    ]
    assert rollup([]) == {"total_usd": "0", "by_model": []}
    assert rollup([{"cost_usd": 1e-7}])["total_usd"] == "0.0000001"


def test_a_journal_that_is_not_sealed_yet_says_so() -> None:
    made = statement(entries=[entry(1), entry(2) | {"position": None}], checkpoints=[])
    assert not made["predicate"]["journal"]["sealed"]


# ---------------------------------------------------------------- the envelope


def test_a_sealed_statement_opens_again(sealed: bytes) -> None:
    opened = open_envelope(sealed, RING, sha256=hashlib.sha256(sealed).hexdigest())
    assert opened.statement == statement()
    assert (opened.trust, opened.key) == (Trust.GIVEN, KEY.verify_key)
    assert "a key that you gave" in str(opened)


def test_without_a_key_at_hand_the_one_inside_is_taken_and_the_answer_says_so(sealed: bytes) -> None:
    opened = open_envelope(sealed)
    assert opened.trust == Trust.FIRST_USE
    assert KEY.key_id in str(opened) and "the key inside it" in str(opened)


def test_it_is_a_dsse_envelope_that_others_can_check(sealed: bytes) -> None:
    envelope = json.loads(sealed)
    payload = base64.b64decode(envelope["payload"])
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    assert envelope["payloadType"] == PAYLOAD_TYPE
    assert KEY.verify_key.verifies(signed, base64.b64decode(envelope["signatures"][0]["sig"]))


@pytest.mark.parametrize("keyring", [RING, None], ids=["given", "first use"])
def test_no_byte_can_be_changed(sealed: bytes, keyring: Keyring | None) -> None:
    rng = random.Random(3)
    for place in range(len(sealed)):
        for other in {sealed[place] ^ 1, sealed[place] ^ 0x20, rng.randrange(256)} - {sealed[place]}:
            refused(sealed[:place] + bytes([other]) + sealed[place + 1 :], keyring)


@pytest.mark.parametrize("keyring", [RING, None], ids=["given", "first use"])
def test_no_byte_can_be_added_or_taken_away(sealed: bytes, keyring: Keyring | None) -> None:
    for place in range(0, len(sealed) + 1, 7):
        for extra in (b" ", b"\n", b"A", b"="):
            refused(sealed[:place] + extra + sealed[place:], keyring)
        if place < len(sealed):
            refused(sealed[:place] + sealed[place + 1 :], keyring)
            refused(sealed[:place], keyring)


def altered(sealed: bytes, **changes: Any) -> bytes:
    return canonical(orjson.loads(sealed) | changes)


def resigned(told: Any) -> bytes:
    return seal_envelope(told, KEY)


def test_the_reason_for_a_refusal_is_precise(sealed: bytes) -> None:
    envelope = orjson.loads(sealed)
    [signature] = envelope["signatures"]
    other = SigningKey.generate()
    assert refused(sealed, sha256="00" * 32) == "HASH_DIFFERS"
    assert refused(b"hello") == "NOT_JSON"
    assert refused(json.dumps(envelope).encode()) == "NOT_CANONICAL"
    assert refused(b"[]") == "NOT_AN_ENVELOPE"
    assert refused(b'{"some": "other file"}') == "NOT_AN_ENVELOPE"
    assert refused(altered(sealed, more=1)) == "NOT_AN_ENVELOPE"
    assert refused(altered(sealed, signatures=[])) == "NOT_AN_ENVELOPE"
    assert refused(altered(sealed, signatures=[signature, signature])) == "NOT_AN_ENVELOPE"
    assert refused(altered(sealed, signatures=[signature | {"more": 1}])) == "NOT_AN_ENVELOPE"
    assert refused(altered(sealed, payloadType="text/plain")) == "WRONG_TYPE"
    assert refused(altered(sealed, payload="!")) == "NOT_BASE64"
    assert refused(altered(sealed, payload="QR==")) == "NOT_CANONICAL"
    assert refused(altered(sealed, signatures=[signature | {"keyid": "0" * 16}])) == "BAD_KEY"
    assert refused(altered(sealed, signatures=[signature | {"public_key": "QQ=="}])) == "BAD_KEY"
    changed = statement()
    changed["predicate"]["run"]["requested_by"] = "somebody else"
    assert refused(altered(sealed, payload=base64.b64encode(canonical(changed)).decode())) == "BAD_SIGNATURE"
    assert refused(seal_envelope(statement(), other)) == "UNKNOWN_KEY"
    assert refused(sealed, Keyring()) == "UNKNOWN_KEY"


def test_a_thief_cannot_pass_their_key_off_as_ours(sealed: bytes) -> None:
    envelope = orjson.loads(seal_envelope(statement(), SigningKey.generate()))
    [ours] = orjson.loads(sealed)["signatures"]
    forged = ours | {"sig": envelope["signatures"][0]["sig"]}
    assert refused(canonical(envelope | {"signatures": [forged]})) == "BAD_SIGNATURE"


def test_what_is_signed_must_be_evidence_of_the_run_it_names() -> None:
    assert refused(resigned({"hello": 1})) == "WRONG_TYPE"
    assert refused(resigned(statement() | {"predicateType": "https://slsa.dev/provenance/v1"})) == "WRONG_TYPE"
    subject = [{"name": "run/another", "digest": statement()["subject"][0]["digest"]}]
    assert refused(resigned(statement() | {"subject": subject})) == "WRONG_SUBJECT"
    subject = [{"name": f"run/{RUN}", "digest": {"sha256": "00" * 32}}]
    assert refused(resigned(statement() | {"subject": subject})) == "WRONG_SUBJECT"
    assert refused(resigned(statement(checkpoints=[replace(CHECKPOINT, position=45)]))) == "BAD_CHECKPOINT"
    for broken in ({}, "x", CHECKPOINT.as_dict() | {"signature": "!"}, CHECKPOINT.as_dict() | {"signature": 1}):
        told = statement()
        told["predicate"]["checkpoints"] = [broken]
        assert refused(resigned(told)) == "BAD_CHECKPOINT"


def test_a_bundle_outlives_the_rotation_of_its_key(sealed: bytes) -> None:
    new = SigningKey.generate()
    ring = Keyring([new.verify_key]) | RING
    assert open_envelope(sealed, ring).key == KEY.verify_key
    # … and a new one may contain checkpoints of the old key, which a reader need not have.
    assert open_envelope(seal_envelope(statement(), new), Keyring([new.verify_key])).trust == Trust.GIVEN


# ---------------------------------------------------------------- for people


def test_it_can_be_shown_to_people(sealed: bytes) -> None:
    sections = {section.title: section for section in describe(open_envelope(sealed, RING).statement)}
    assert ("workflow", "refund") in sections["Run"].rows
    assert ("charge", "ch_99812") in sections["Input"].rows
    assert any(name == "customer.name" and "string, size 8" in text for name, text in sections["Input"].rows)
    assert sections["Votes"].columns == ("approval", "by", "decision", "reason", "at")
    assert [row[1] for row in sections["Votes"].rows] == ["ben", "cleo"]
    assert ("in the chain", "41 to 43") in sections["Journal"].rows
    assert sections["Cost"].rows[1][-1] == "0.3"
    assert "Error" not in sections
    assert all(isinstance(cell, str) for s in sections.values() for row in s.rows for cell in row)


def test_a_reader_sees_what_was_done_and_which_decision_was_the_second() -> None:
    """new-user 21: the receipts had a tool and a status, and an approved action had the same decision twice."""
    judged = {"step": "refund", "answer": "needs_approval", "action_digest": "cd" * 32, "rule_ids": ["large"]}
    receipt = {
        "step_key": "refund", "tool": "shop.refund", "status": "succeeded", "idempotency_key": "k-1",
        "request_metadata": {"charge": "ch_1", "amount": {"type": "number"},
                             "to": {"name": "Ada", "id": {"type": "null"}}},
        "response_metadata": {"id": {"type": "string", "size": 4}},
    }  # fmt: skip
    sections = {s.title: s for s in describe(statement(decisions=[judged, judged], receipts=[receipt]))}
    receipts, decisions = sections["Receipts"], sections["Policy decisions"]
    assert dict(zip(receipts.columns, receipts.rows[0], strict=True))["sent"] == "charge=ch_1 to.name=Ada"
    assert "answered" not in receipts.columns
    assert [row[decisions.columns.index("judged")] for row in decisions.rows] == ["first", "again, before it began"]
    once = next(s for s in describe(statement()) if s.title == "Policy decisions")
    assert "judged" not in once.columns


def test_the_bare_least_can_be_shown_too() -> None:
    bare = bundle(
        run={"id": RUN, "error": {"type": "Terminal", "message": "no"}}, entries=[], made_at=NOON, version="1"
    )
    sections = {section.title: section.rows for section in describe(bare)}
    assert ("type", "Terminal") in sections["Error"] and ("message", "string, size 2") in sections["Error"]
    assert ("in the chain", "not sealed yet") in sections["Journal"]
