"""Evidence and audit, from a run to the auditor's file."""

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.rig import Rig

from interlock.audit.evidence import EvidenceInvalid, Trust, open_envelope
from interlock.audit.keys import Keyring
from interlock.engine.access.key_store import Salts, Signing
from interlock.engine.proof import audit, evidence
from interlock.engine.queueing import sweeps
from interlock.settings import Settings
from interlock.tools import Context

FLOW = """
name: refund
steps:
  - {id: look, tool: shop.look, input: {charge: "${input.charge}"}}
  - {id: note, tool: shop.note, input: {charge: "${input.charge}", text: "for ${steps.look.output.name}"}}
  - {id: pay, tool: shop.refund, input: {charge: "${input.charge}", amount: "${input.amount}"}}
"""


@pytest.fixture
async def shop(rig: Rig) -> Rig:
    @rig.tool("shop.look")
    async def look(ctx: Context, charge: str) -> dict[str, str]:
        ctx.cost(0.25, provider="acme", model="small", input_tokens=100, output_tokens=7)
        ctx.cost(0.5, provider="acme", model="small")
        return {"name": "Ada Lovelace"}

    @rig.tool("shop.note", writes=True, risk="low", idempotent=True)
    async def note(ctx: Context, charge: str, text: str) -> dict[str, bool]:
        ctx.cost(0.125, provider="acme", model="large")
        return {"noted": True}

    @rig.tool("shop.refund", writes=True, risk="high", target="{charge}")
    async def refund(charge: str, amount: int) -> dict[str, Any]:
        return {"refunded": amount, "to": "Ada Lovelace"}

    rig.notary.signing.make()
    rig.notary.salts.make()
    await rig.apply(FLOW)
    return rig


async def refunded(rig: Rig) -> UUID:
    """A read, a low write, and a high write that two people approved."""
    run_id = await rig.start("refund", {"charge": "ch_77001", "amount": 48125})
    await rig.work_until(run_id, "waiting_approval")
    for name in ("one", "two"):
        await rig.decide(run_id, approves=True, who=await rig.person(name, "approver"), reason="seen the ticket")
    run = await rig.work_until(run_id)
    assert run["status"] == "succeeded", run
    return run_id


async def envelope_of(rig: Rig, run_id: UUID) -> bytes:
    answer = await rig.http().get(f"/api/runs/{run_id}/evidence")
    assert answer.status_code == 200, answer.text
    return answer.content


# ---------------------------------------------------------------- evidence


async def test_a_governed_run_is_proven_offline(shop: Rig) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    opened = open_envelope(await envelope_of(shop, run_id), shop.notary.signing.trusted())
    assert opened.trust is Trust.GIVEN
    told = opened.statement["predicate"]
    assert (told["run"]["id"], told["run"]["status"]) == (str(run_id), "succeeded")
    answers = [(one["step"], one["tool"], one["answer"]) for one in told["decisions"]]
    assert answers == [
        ("note", "shop.note", "allow"),
        ("pay", "shop.refund", "needs_approval"),
        ("pay", "shop.refund", "needs_approval"),
    ]
    assert told["decisions"][1]["request"]["asker"]["role"] == "admin"
    assert told["decisions"][1]["request"]["action"]["fields"]["amount"]["type"] == "number"
    [approval] = told["approvals"]
    assert (approval["step_key"], approval["status"], approval["two_person"]) == ("pay", "approved", True)
    assert [vote["by"].partition(":")[0] for vote in approval["votes"]] == ["one", "two"]
    assert {vote["digest"] for vote in approval["votes"]} == {approval["action"]["digest"]}
    receipts = [(one["step_key"], one["tool"], one["status"]) for one in told["receipts"]]
    assert receipts == [("note", "shop.note", "succeeded"), ("pay", "shop.refund", "succeeded")]
    assert told["receipts"][1]["request_metadata"]["amount"]["hash"]
    assert told["costs"]["total_usd"] == "0.875"
    assert [(row["model"], row["calls"], row["input_tokens"]) for row in told["costs"]["by_model"]] == [
        ("large", 1, 0), ("small", 2, 100),
    ]  # fmt: skip
    assert told["journal"]["sealed"] and told["journal"]["entries"] == len(await shop.journal(run_id))
    assert told["checkpoints"]


async def test_no_value_of_the_run_is_in_its_evidence(shop: Rig) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    payload = base64.b64decode(json.loads(await envelope_of(shop, run_id))["payload"])
    for value in (b"ch_77001", b"48125", b"Ada", b"Lovelace"):
        assert value not in payload


async def test_any_changed_byte_is_refused(shop: Rig) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    envelope, keyring = await envelope_of(shop, run_id), shop.notary.signing.trusted()
    dice = random.Random(7)
    places = [
        *range(60),
        *(dice.randrange(len(envelope)) for _ in range(300)),
        *range(len(envelope) - 200, len(envelope)),
    ]
    for place in places:
        changed = bytearray(envelope)
        changed[place] ^= 1 << dice.randrange(8)
        for trusted in (keyring, None):
            with pytest.raises(EvidenceInvalid):
                open_envelope(bytes(changed), trusted)


async def test_evidence_waits_for_the_seal_and_says_so(shop: Rig) -> None:
    run_id = await refunded(shop)
    early = await shop.http().get(f"/api/runs/{run_id}/evidence")
    assert (early.status_code, early.json()["code"], early.headers["retry-after"]) == (404, "EVIDENCE_NOT_READY", "1")
    await audit.seal_all(shop.database, shop.notary.signing)
    await envelope_of(shop, run_id)  # created on the first request
    assert await evidence.make_all_due(shop.database, shop.notary) == 0


async def test_a_run_that_has_not_ended_has_none(shop: Rig) -> None:
    run_id = await shop.start("refund", {"charge": "ch_1", "amount": 5})
    await shop.work_until(run_id, "waiting_approval")
    await shop.prove()
    answer = await shop.http().get(f"/api/runs/{run_id}/evidence")
    assert (answer.status_code, answer.json()["code"]) == (409, "RUN_NOT_ENDED")


async def test_a_run_that_was_canceled_or_failed_has_its_evidence_too(shop: Rig) -> None:
    run_id = await shop.start("refund", {"charge": "ch_1", "amount": 5})
    await shop.work_until(run_id, "waiting_approval")
    await shop.cancel(run_id)
    await shop.prove()
    told = open_envelope(await envelope_of(shop, run_id)).statement["predicate"]
    assert (told["run"]["status"], told["approvals"][0]["status"]) == ("canceled", "canceled")


async def test_another_tenant_does_not_get_it(shop: Rig) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    other = await shop.database.run_in_transaction(lambda tx: _tenant(shop, tx))
    key = await shop.key("eve", "admin", tenant_id=other)
    assert (await shop.http(key).get(f"/api/runs/{run_id}/evidence")).status_code == 404
    assert (await shop.http(key).get("/api/audit")).json()["items"] == []
    assert (await shop.http(key).get("/api/audit", params={"run_id": str(run_id)})).status_code == 404


async def _tenant(rig: Rig, tx: Any) -> UUID:
    from interlock.engine.access import tenants

    row = await tenants.create_tenant(tx, "other")
    found: UUID = row["id"]
    return found


async def test_many_makers_make_one_file(shop: Rig) -> None:
    run_id = await refunded(shop)
    await audit.seal_all(shop.database, shop.notary.signing)
    answers = await asyncio.gather(*(envelope_of(shop, run_id) for _ in range(5)))
    assert len(set(answers)) == 1
    assert await shop.sql("SELECT count(*) AS n FROM interlock.evidence") == [(1,)]


async def test_a_maker_that_died_after_storing_is_followed_by_one_that_takes_its_file(shop: Rig) -> None:
    run_id = await refunded(shop)
    await audit.seal_all(shop.database, shop.notary.signing)
    await shop.sql("CREATE TABLE copy AS SELECT * FROM interlock.evidence_due")
    first = await envelope_of(shop, run_id)
    async with tampering(shop, "evidence") as connection:
        await connection.execute(
            "DELETE FROM interlock.evidence; INSERT INTO interlock.evidence_due SELECT * FROM copy"
        )
    assert await evidence.make_all_due(shop.database, shop.notary) == 1
    assert await envelope_of(shop, run_id) == first


async def test_a_run_that_ends_again_after_a_restore_gets_evidence_again(shop: Rig) -> None:
    """A bundle of that name exists already, from the time that the restore undid (reliability V9)."""
    await refunded(shop)
    await shop.prove()
    [row] = await shop.sql("SELECT name FROM interlock.evidence")
    artifacts = shop.settings.data_dir / "artifacts"
    first = artifacts / row["name"]
    other = await refunded(shop)
    await shop.prove()
    [its] = await shop.sql("SELECT name FROM interlock.evidence WHERE run_id = $1", other)
    # As if the second run had ended differently before the restore: our own true bundle already has its name.
    (artifacts / its["name"]).chmod(0o600)
    (artifacts / its["name"]).write_bytes(first.read_bytes())
    async with tampering(shop, "evidence") as connection:
        await connection.execute(
            "INSERT INTO interlock.evidence_due SELECT run_id, tenant_id, made_at FROM interlock.evidence"
            " WHERE run_id = $1",
            other,
        )
        await connection.execute("DELETE FROM interlock.evidence WHERE run_id = $1", other)
    for _ in range(2):  # the second signer finds the first one's file
        assert await evidence.make_all_due(shop.database, shop.notary) <= 1
    assert open_envelope(await envelope_of(shop, other)).statement["predicate"]["run"]["id"] == str(other)
    assert (artifacts / its["name"]).read_bytes() == first.read_bytes(), "the bundle of the first end stays"
    assert not await shop.sql("SELECT FROM interlock.evidence_due"), "retention waits for nothing"


async def test_a_forged_file_in_its_place_is_not_taken(shop: Rig) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    [row] = await shop.sql("SELECT name FROM interlock.evidence")
    path = shop.settings.data_dir / "artifacts" / row["name"]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    answer = await shop.http().get(f"/api/runs/{run_id}/evidence")
    assert (answer.status_code, answer.json()["code"]) == (409, "EVIDENCE_CHANGED")
    async with tampering(shop, "evidence") as connection:
        await connection.execute(
            "INSERT INTO interlock.evidence_due SELECT run_id, tenant_id, made_at FROM interlock.evidence;"
            " DELETE FROM interlock.evidence"
        )
    assert await evidence.make_due(shop.database, shop.notary) == 1
    assert await shop.sql("SELECT * FROM interlock.evidence") == []
    assert await evidence.make_due(shop.database, shop.notary) == 0  # retried later


async def test_without_the_signing_key_nothing_is_sealed_or_made(shop: Rig) -> None:
    await refunded(shop)
    (shop.settings.data_dir / "signing.key").unlink()
    assert await audit.seal_all(shop.database, shop.notary.signing) == 0
    assert await evidence.make_all_due(shop.database, shop.notary) == 0


# ---------------------------------------------------------------- keys


async def test_after_a_rotation_old_evidence_and_the_chain_still_verify(shop: Rig) -> None:
    first = await refunded(shop)
    await shop.prove()
    old_file, old_key = await envelope_of(shop, first), shop.notary.signing.key()
    assert old_key is not None
    new_key = shop.notary.signing.rotate()
    await shop.sql("DELETE FROM interlock.receipt")
    second = await refunded(shop)
    await shop.prove()
    new_file, keyring = await envelope_of(shop, second), shop.notary.signing.trusted()
    assert open_envelope(old_file, keyring).key.key_id == old_key.key_id
    assert open_envelope(new_file, keyring).key.key_id == new_key.key_id
    with pytest.raises(EvidenceInvalid, match="not one of yours"):
        open_envelope(new_file, Keyring([old_key.verify_key]))
    assert (await verdict(shop))["ok"]
    keys = (await shop.http().get("/api/audit/keys")).json()["items"]
    assert [(key["key_id"], key["current"]) for key in keys] == [(new_key.key_id, True), (old_key.key_id, False)]
    assert all("PUBLIC KEY" in key["pem"] and "PRIVATE" not in key["pem"] for key in keys)


def test_of_many_that_make_the_key_at_once_one_does(settings: Settings) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        made = {key.key_id for key in pool.map(lambda _: Signing(settings).make(), range(64))}
    assert len(made) == 1
    assert (settings.data_dir / "signing.key").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in settings.data_dir.iterdir()} == {"signing.key", "signing.keys", "signing.lock"}


def test_the_key_may_come_from_the_environment_with_those_before_it(settings: Settings) -> None:
    new, old = Signing(settings).make(), Signing(settings).rotate()
    given = settings.model_copy(update={"data_dir": settings.data_dir / "elsewhere"})
    text = new.to_pem() + old.verify_key.to_pem()
    signing = Signing(Settings(data_dir=given.data_dir, signing_key=text.replace("\n", "\\n")))
    assert signing.key() is not None and signing.make().key_id == new.key_id
    assert {key.key_id for key in signing.trusted()} == {new.key_id, old.key_id}
    by_path = Signing(Settings(data_dir=given.data_dir, signing_key=str(settings.data_dir / "signing.key")))
    assert by_path.make().key_id == old.key_id


def test_salts_are_of_one_tenant_and_need_the_secret(settings: Settings) -> None:
    salts, tenant = Salts(settings), UUID(int=1)
    assert salts(tenant) is None
    salts.make()
    assert salts(tenant) == Salts(settings)(tenant) != salts(UUID(int=2))


# ---------------------------------------------------------------- the chain over HTTP


@asynccontextmanager
async def tampering(rig: Rig, *tables: str) -> AsyncIterator[Any]:
    """Disable the triggers, as the owner of the tables can."""
    async with rig.database.pool.acquire() as connection, connection.transaction():
        for table in tables:
            await connection.execute(f"ALTER TABLE interlock.{table} DISABLE TRIGGER USER")
        yield connection
        for table in tables:
            await connection.execute(f"ALTER TABLE interlock.{table} ENABLE TRIGGER USER")


async def verdict(rig: Rig, **body: Any) -> dict[str, Any]:
    http = rig.http(await rig.key("auditor", "viewer"))
    answer = await (http.post("/api/audit/verify", json=body) if body else http.get("/api/audit/verify"))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_chain_lists_every_entry_and_verifies(shop: Rig) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    checked = await verdict(shop)
    entries = len(await shop.journal(run_id))
    assert checked == {"ok": True, "events": entries, "checkpoints": 1, "unsealed": 0, "broken_at": None}
    page = (await shop.http().get("/api/audit", params={"limit": 4})).json()
    rest = (await shop.http().get("/api/audit", params={"cursor": page["next_cursor"]})).json()
    both = page["items"] + rest["items"]
    assert [item["position"] for item in both] == list(range(1, entries + 1))
    assert both[0]["type"] == "run_created" and both[-1]["type"] == "run_completed"
    after = (await shop.http().get("/api/audit", params={"after": 4, "run_id": str(run_id)})).json()
    assert after["items"] == rest["items"]


async def test_a_key_of_one_workspace_sees_the_chain_of_its_runs_only(shop: Rig) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    http = shop.http(await shop.key("w", "viewer", workspace_id="w"))
    assert (await http.get("/api/audit")).status_code == 403
    assert (await http.get("/api/audit", params={"run_id": str(run_id)})).status_code == 404


TAMPERED = {
    "a changed byte": (
        "UPDATE interlock.journal_entry SET actor = actor || 'x' WHERE run_id = $1 AND seq = 4",
        4,
        "changed",
    ),
    "a deleted entry": ("DELETE FROM interlock.journal_entry WHERE run_id = $1 AND seq = 5", 5, "deleted"),
    "two swapped": (
        "UPDATE interlock.journal_entry SET data = other.data, type = other.type, step = other.step,"
        " from_state = other.from_state, event = other.event, to_state = other.to_state, attempt = other.attempt,"
        " output = other.output"
        " FROM interlock.journal_entry AS other WHERE journal_entry.run_id = $1 AND other.run_id = $1"
        " AND (journal_entry.seq, other.seq) IN ((3, 6), (6, 3))",
        3,
        "changed",
    ),
    "a cut tail": ("DELETE FROM interlock.journal_entry WHERE run_id = $1 AND seq > 8", 9, "deleted"),
}


@pytest.mark.parametrize("how", TAMPERED)
async def test_tampering_is_named_over_http(shop: Rig, how: str) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    statement, seq, word = TAMPERED[how]
    async with tampering(shop, "journal_entry") as connection:
        await connection.execute(statement, run_id)
    found = await verdict(shop)
    assert not found["ok"]
    assert (found["broken_at"]["run_id"], found["broken_at"]["seq"]) == (str(run_id), seq)
    assert word in found["broken_at"]["why"]


async def test_a_chain_cut_back_whole_is_found_with_the_checkpoints_of_evidence(shop: Rig) -> None:
    await shop.start("refund", {"charge": "ch_0", "amount": 5})
    await shop.prove()
    run_id = await refunded(shop)
    await shop.prove()
    kept = open_envelope(await envelope_of(shop, run_id)).statement["predicate"]["checkpoints"]
    async with tampering(shop, "journal_entry", "audit_link", "checkpoint", "run") as connection:
        await connection.execute(
            "DELETE FROM interlock.journal_entry USING interlock.audit_link AS link"
            " WHERE (journal_entry.run_id, journal_entry.seq) = (link.run_id, link.seq) AND link.position > 1"
        )
        await connection.execute("DELETE FROM interlock.audit_link WHERE position > 1")
        await connection.execute("DELETE FROM interlock.checkpoint WHERE number > 1")
        await connection.execute("DELETE FROM interlock.run")
    assert (await verdict(shop))["ok"], "by itself the database cannot know"
    assert "the tail was cut" in (await verdict(shop, checkpoints=kept))["broken_at"]["why"]
    forged = [{**kept[-1], "position": 1}]
    answer = await shop.http().post("/api/audit/verify", json={"checkpoints": forged})
    assert (answer.status_code, answer.json()["code"]) == (422, "BAD_CHECKPOINT")


# ---------------------------------------------------------------- retention


async def test_a_month_goes_only_when_its_going_is_signed(shop: Rig) -> None:
    object.__setattr__(shop.settings, "retention_days", 30)
    async with shop.long_ago():
        run_id = await refunded(shop)
    key = shop.notary.signing.key()

    async def left() -> int:
        found: int = (await shop.sql("SELECT count(*) FROM interlock.journal_entry WHERE run_id = $1", run_id))[0][
            "count"
        ]
        return found

    await sweeps.tend(shop.database, key)
    assert await left(), "not sealed yet"
    await audit.seal_all(shop.database, shop.notary.signing)
    await sweeps.tend(shop.database, key)
    assert await left(), "no evidence yet"
    await shop.prove()
    await sweeps.tend(shop.database, None)
    assert await left(), "nobody could sign it"
    await sweeps.tend(shop.database, key)
    assert not await left()
    assert (await verdict(shop))["ok"]
    assert open_envelope(await envelope_of(shop, run_id)).statement["predicate"]["run"]["id"] == str(run_id)


# ---------------------------------------------------------------- an auditor's machine


async def test_an_auditor_with_the_file_and_the_public_key_needs_nothing_else(shop: Rig, tmp_path: Path) -> None:
    run_id = await refunded(shop)
    await shop.prove()
    file, pem = tmp_path / "run.json", tmp_path / "keys.pem"
    file.write_bytes(await envelope_of(shop, run_id))
    pem.write_text("".join(key["pem"] for key in (await shop.http().get("/api/audit/keys")).json()["items"]))
    # Another process, with no database, no server and none of our settings.
    command = [sys.executable, "-m", "interlock", "evidence", "verify", str(file), "--key", str(pem), "--json"]
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}

    def verify() -> tuple[int, Any]:
        done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, check=False)
        return done.returncode, json.loads(done.stdout)

    code, found = await asyncio.to_thread(verify)
    assert (code, found["ok"], found["run_id"], found["trust"]) == (0, True, str(run_id), "given")
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    code, found = await asyncio.to_thread(verify)
    assert (code, found["ok"]) == (1, False)
