"""The command line's contract for the audit log and for evidence."""

import json
from pathlib import Path

import pytest
from starlette.responses import Response
from tests.cli.stub import NOW, Stub, problem, refused, run

from interlock import clock
from interlock.audit.chain import next_checkpoint
from interlock.audit.evidence import bundle, seal_envelope
from interlock.audit.keys import Keyring, SigningKey

KEY = SigningKey.generate()
RUN, TENANT = "01976a2e-1111-7000-8000-000000000000", "01976a2e-0000-7000-8000-000000000001"
OK = {"ok": True, "events": 1200, "checkpoints": 7, "unsealed": 3, "broken_at": None}
BROKEN_AT = {"position": 5, "run_id": RUN, "seq": 3, "why": "the entry is missing: it was deleted"}
BROKEN = {"ok": False, "events": 5, "checkpoints": 1, "unsealed": 0, "broken_at": BROKEN_AT}


def an_envelope(key: SigningKey = KEY) -> bytes:
    leaf = {
        "tenant_id": TENANT, "run_id": RUN, "seq": 1, "at": NOW, "type": "run_completed", "step": None,
        "from_state": "running", "event": "succeed", "to_state": "succeeded", "attempt": None, "token": 1,
        "actor": "w", "data_sha256": None, "output_sha256": None, "position": 1,
    }  # fmt: skip
    checkpoint = next_checkpoint(key, None, tenant_id=TENANT, position=1, head=bytes(32), at=clock.now())
    told = {"id": RUN, "tenant_id": TENANT, "workflow": "refund", "status": "succeeded", "input": {"charge": "ch_1"}}
    approval = {"step_key": "pay", "status": "approved", "votes": [{"by": "ann\x1b[31m", "decision": "approved"}]}
    statement = bundle(
        run=told, entries=[leaf], made_at=NOW, version="0", approvals=[approval], checkpoints=[checkpoint]
    )
    return seal_envelope(statement, key)


@pytest.fixture
def file(url: str) -> str:
    Path("run.json").write_bytes(an_envelope())
    Path("keys.pem").write_text(SigningKey.generate().verify_key.to_pem() + KEY.verify_key.to_pem())
    return "run.json"


# ---------------------------------------------------------------- the chain


def test_verify_says_how_much_was_checked(stub: Stub) -> None:
    stub.on("GET /api/audit/verify", OK)
    result = run("audit", "verify")
    assert result.stdout == "nothing was changed: 1,200 entries, 7 checkpoints; 3 more are not sealed yet\n"
    assert result.exit_code == 0
    assert json.loads(run("audit", "verify", "--json").stdout) == OK


def test_verify_names_the_place_and_fails(stub: Stub) -> None:
    stub.on("GET /api/audit/verify", BROKEN)
    line = refused(run("audit", "verify"))
    assert f"broken at position 5 (entry 3 of run {RUN}): the entry is missing" in line
    result = run("audit", "verify", "--json")
    assert (result.exit_code, json.loads(result.stdout)["broken_at"]) == (1, BROKEN_AT)


def test_verify_with_evidence_sends_the_checkpoints_it_holds(stub: Stub, file: str) -> None:
    stub.on("POST /api/audit/verify", OK)
    assert run("audit", "verify", "--with", file).exit_code == 0
    [checkpoint] = stub.body("POST /api/audit/verify")["checkpoints"]
    assert (checkpoint["position"], checkpoint["key_id"]) == (1, KEY.key_id)


def test_list_shows_positions(stub: Stub) -> None:
    data = {"actor": "ann", "step_key": "pay", "to_state": "running"}
    entry = {"position": 9, "link": "ab", "seq": 2, "type": "step_transition", "at": NOW.isoformat(), "run_id": RUN}
    stub.on("GET /api/audit", {"items": [{**entry, "data": data}], "next_cursor": "Mg"})
    out = run("audit", "list", "--after", "8", "--run", RUN).stdout
    assert "step transition pay → running" in out and "more: --cursor Mg" in out
    assert stub.query("GET /api/audit") == {"after": "8", "run_id": RUN, "limit": "50"}


def test_keys_prints_what_evidence_verify_takes(stub: Stub, file: str) -> None:
    key = {"key_id": KEY.key_id, "current": True, "pem": KEY.verify_key.to_pem()}
    stub.on("GET /api/audit/keys", {"items": [key], "next_cursor": None})
    Path("printed.pem").write_text(run("audit", "keys").stdout)
    assert "with a key that you gave" in run("evidence", "verify", file, "--key", "printed.pem").stdout


def test_rotate_key_keeps_the_old_public_key(url: str) -> None:
    first = json.loads(run("audit", "rotate-key", "--json").stdout)
    second = json.loads(run("audit", "rotate-key", "--json").stdout)
    assert first["previous"] is None and second["previous"] == first["key_id"]
    assert {k.key_id for k in Keyring.from_pem(Path(".interlock/signing.keys").read_text())} == {
        first["key_id"], second["key_id"],
    }  # fmt: skip
    assert "stays trusted" in run("audit", "rotate-key").stdout


# ---------------------------------------------------------------- evidence


def test_get_writes_the_file_byte_for_byte(stub: Stub) -> None:
    envelope = an_envelope()
    stub.on(f"GET /api/runs/{RUN}/evidence", Response(envelope, media_type="application/json"))
    assert run("evidence", "get", RUN, "-o", "out.json").exit_code == 0
    assert Path("out.json").read_bytes() == envelope
    assert run("evidence", "get", RUN).stdout_bytes == envelope


def test_get_waits_for_a_run_that_has_just_ended(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.cli.evidence._PAUSE_SECONDS", 0.01)
    early = problem(404, "EVIDENCE_NOT_READY", "Not found", "not yet", retry_after=1)
    stub.on(f"GET /api/runs/{RUN}/evidence", early, early, Response(an_envelope()))
    assert run("evidence", "get", RUN, "-o", "out.json").exit_code == 0
    stub.on(f"GET /api/runs/{RUN}/evidence", early)
    assert "not yet" in refused(run("evidence", "get", RUN, "--wait", "0"))
    stub.on(f"GET /api/runs/{RUN}/evidence", problem(409, "RUN_NOT_ENDED", "No", "the run is running"))
    assert "the run is running" in refused(run("evidence", "get", RUN))


def test_verify_needs_no_server(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_URL", "http://127.0.0.1:1")
    out = run("evidence", "verify", file, "--key", "keys.pem").stdout
    assert RUN in out and "with a key that you gave" in out
    assert "the key inside it" in run("evidence", "verify", file).stdout
    found = json.loads(run("evidence", "verify", file, "--key", "keys.pem", "--json").stdout)
    assert (found["ok"], found["trust"], found["key_id"]) == (True, "given", KEY.key_id)


def test_a_changed_byte_is_refused(file: str) -> None:
    whole = Path(file).read_bytes()
    for place in range(0, 2400, 97):
        data = bytearray(whole)
        data[place % len(data)] ^= 1
        Path(file).write_bytes(data)
        for more in ([], ["--key", "keys.pem"]):
            assert "cannot be relied on" in refused(run("evidence", "verify", file, *more))
        result = run("evidence", "verify", file, "--json")
        assert (result.exit_code, json.loads(result.stdout)["ok"]) == (1, False)
        assert run("evidence", "show", file).exit_code == 1


def test_another_key_is_refused(file: str) -> None:
    Path("other.pem").write_text(SigningKey.generate().verify_key.to_pem())
    assert "not one of yours" in refused(run("evidence", "verify", file, "--key", "other.pem"))
    assert "no key in PEM form" in refused(run("evidence", "verify", file, "--key", file))


def test_show_tells_it_without_powers_over_the_terminal(file: str) -> None:
    out = run("evidence", "show", file).stdout
    assert "Votes" in out and "ann\\x1b[31m" in out and "\x1b" not in out
    assert json.loads(run("evidence", "show", file, "--json").stdout)["predicate"]["run"]["id"] == RUN
