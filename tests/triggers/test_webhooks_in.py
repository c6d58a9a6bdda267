"""Generic webhooks: signed by Standard Webhooks, or with an HMAC in a header; and the stored data of triggers."""

import hashlib
import hmac
from base64 import b64encode
from typing import Any

import orjson

from tests.rig import Rig
from tests.triggers.conftest import Apply
from tests.triggers.senders import SECRET, STANDARD_SECRET, standard

ALERT = {"type": "alert.fired", "data": {"service": "shop", "level": 3}}
STANDARD: dict[str, Any] = {"webhook": {"secret": "std"}}
PLAIN: dict[str, Any] = {"webhook": {"secret": "gh", "header": "X-Acme-Signature", "id": "payload.id"}}


async def count(rig: Rig) -> int:
    return len(await rig.sql("SELECT id FROM interlock.run"))


async def test_a_message_by_standard_webhooks_is_one_run(rig: Rig, apply: Apply) -> None:
    await apply(**STANDARD, when='event.type == "alert.fired"', input={"service": "${payload.data.service}"})
    first, second = [await standard(rig, ALERT, id="msg_1") for _ in range(2)]
    assert (first.status_code, first.content == second.content, await count(rig)) == (202, True, 1)
    run = await rig.run(first.json()["run_id"])
    assert run["input"] == {"service": "shop"}
    assert run["trigger"]["external_event"] == {
        "event_type": "alert.fired", "source": "webhook", "event_id": "msg_1",
    }  # fmt: skip
    again = await standard(rig, ALERT | {"data": {"service": "other"}}, id="msg_1")
    assert (again.status_code, again.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


async def test_what_is_not_signed_as_it_should_be_is_refused(rig: Rig, apply: Apply) -> None:
    await apply(**STANDARD)
    now = rig.clock.freeze().timestamp()
    for answer in (
        await standard(rig, ALERT, body=b'{"type": "evil"}'),
        await standard(rig, ALERT, secret="whsec_" + b64encode(b"another").decode()),
        await standard(rig, ALERT, at=now - 301),
        await standard(rig, ALERT, at=now + 301),
        await rig.http("").post("/api/hooks/hook", json=ALERT),
        await rig.http("").post("/api/hooks/hook", json=ALERT, headers={"webhook-id": "m", "webhook-timestamp": "x"}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (401, "SIGNATURE_INVALID")
    assert (await standard(rig, ALERT, at=now - 299)).status_code == 202
    assert await count(rig) == 1


async def test_an_hmac_in_a_header_will_do(rig: Rig, apply: Apply) -> None:
    await apply(**PLAIN)
    body = orjson.dumps({"id": 12, "x": 1})
    mac = hmac.new(SECRET.encode(), body, hashlib.sha256)
    spellings = (mac.hexdigest(), "sha256=" + mac.hexdigest().upper(), b64encode(mac.digest()).decode())
    ids = set()
    for spelling in spellings:
        answer = await rig.http("").post("/api/hooks/hook", content=body, headers={"x-acme-signature": spelling})
        ids.add(answer.json()["run_id"])
    assert (len(ids), await count(rig)) == (1, 1)
    assert (await rig.http("").post("/api/hooks/hook", content=body)).status_code == 401
    body = orjson.dumps({"x": 1})
    signature = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    answer = await rig.http("").post("/api/hooks/hook", content=body, headers={"x-acme-signature": signature})
    assert (answer.status_code, answer.json()["detail"]) == (422, "id: `payload.id`: no such key: id")


async def test_expressions_never_see_what_proves_something(rig: Rig, apply: Apply) -> None:
    await apply(**STANDARD, input={"headers": "${headers}"})
    run = await rig.run((await standard(rig, ALERT)).json()["run_id"])
    assert "webhook-signature" not in run["input"]["headers"] and "webhook-id" in run["input"]["headers"]


async def test_a_webhook_is_not_found_at_githubs_address(rig: Rig, apply: Apply) -> None:
    await apply(**STANDARD)
    assert (await rig.http("").post("/api/hooks/github/hook", content=b"{}")).status_code == 401


async def test_no_secret_is_in_a_row_or_an_answer(rig: Rig, apply: Apply) -> None:
    await apply(**STANDARD)
    await standard(rig, ALERT)
    shown = (await rig.http().get("/api/triggers/hook")).json()
    assert shown["source"]["webhook"] == {"secret": "std"}
    for table in ("trigger", "secret", "idempotency_record", "run", "journal_entry"):
        assert STANDARD_SECRET[6:] not in str(
            [dict(row) for row in await rig.sql(f"SELECT * FROM interlock.{table}")]
        ), table


async def test_a_trigger_is_replaced_listed_and_deleted(rig: Rig, apply: Apply) -> None:
    first = await apply(**STANDARD)
    assert (first["path"], first["acts_as"], first["kind"]) == ("/api/hooks/hook", "admin", "webhook")
    same, other = await apply(**STANDARD), await apply(**STANDARD, workflow="gate")
    assert (same, other["workflow"]) == (first, "gate")
    assert [t["name"] for t in (await rig.http().get("/api/triggers")).json()["items"]] == ["hook"]
    assert (await rig.http().delete("/api/triggers/hook")).status_code == 200
    assert (await rig.http().get("/api/triggers/hook")).json()["code"] == "TRIGGER_NOT_FOUND"
    assert (await standard(rig, ALERT)).status_code == 401


async def test_a_trigger_can_be_tried_without_starting_anything(rig: Rig, apply: Apply) -> None:
    await apply(
        github={"secret": "gh", "events": ["push"]}, when='payload.ref == "main"', input={"r": "${payload.ref}"}
    )
    http = rig.http()
    tried = (await http.post("/api/triggers/hook/test", json={"event": "push", "payload": {"ref": "main"}})).json()
    assert tried == {"outcome": "starts", "starts": True, "workflow": "work", "input": {"r": "main"}, "reason": None}
    tried = (await http.post("/api/triggers/hook/test", json={"event": "push", "payload": {}})).json()
    assert (tried["starts"], tried["reason"]) == (False, 'when: `payload.ref == "main"`: no such key: ref')
    tried = (
        await http.post("/api/triggers/hook/test", json={"event": "issues", "payload": {"action": "opened"}})
    ).json()
    assert tried["reason"] == "it is about push, not issues.opened"
    assert await count(rig) == 0


async def test_who_may_do_what(rig: Rig, apply: Apply) -> None:
    await apply(**STANDARD)
    for role, may in (("viewer", False), ("agent", False), ("approver", False), ("operator", True)):
        http = rig.http(await rig.key(role, role))
        answer = await http.post("/api/triggers", json={"name": "hook", "workflow": "work"} | STANDARD)
        assert (answer.status_code == 201) == may, role
        assert (await http.get("/api/triggers")).status_code == 200
    other = await rig.tenant("other")
    stranger = rig.http(await rig.key("s", "admin", other.tenant_id))
    assert (await stranger.get("/api/triggers/hook")).status_code == 404
    assert (await stranger.delete("/api/triggers/hook")).status_code == 404
    fenced = rig.http(await rig.key("w", "operator", workspace_id="team-a"))
    answer = await fenced.post("/api/triggers", json={"name": "hook", "workflow": "work"} | STANDARD)
    assert (answer.status_code, answer.json()["code"]) == (409, "TRIGGER_EXISTS")


async def test_what_cannot_work_is_refused_when_it_is_applied(rig: Rig, apply: Apply) -> None:
    refused = await apply(422, webhook={"secret": "nobodys"})
    assert (refused["code"], "interlock secret set nobodys" in refused["detail"]) == ("TRIGGER_SECRET_MISSING", True)
    assert "base64" in (await apply(422, webhook={"secret": "gh"}))["detail"]
    assert (await apply(404, **STANDARD, workflow="nowhere"))["code"] == "WORKFLOW_NOT_FOUND"


async def test_a_stranger_cannot_tell_which_triggers_exist(rig: Rig, apply: Apply) -> None:
    """Security L1 and L4: one answer for a wrong signature, and for a trigger, tenant or kind that does not exist."""
    await apply(**STANDARD)
    await apply(**PLAIN, name="plain")
    places = (
        "hook", "plain", "nowhere", "hook?tenant=nobody", "github/hook", "github/nowhere", "UPPER", "hook%00",
        "hook?tenant=%00", "x" * 200,
    )  # fmt: skip
    signed = {"webhook-id": "m", "webhook-timestamp": f"{rig.clock.freeze().timestamp():.0f}"}
    for headers in ({}, signed, {"x-acme-signature": "00"}, {"x-hub-signature-256": "sha256=" + "0" * 64}):
        answers = [await rig.http("").post(f"/api/hooks/{p}", content=b"{}", headers=headers) for p in places]
        assert {(a.status_code, a.content) for a in answers} == {(401, answers[0].content)}
        assert answers[0].json()["code"] == "SIGNATURE_INVALID"
