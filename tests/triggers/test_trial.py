"""`trigger test` agrees with deliveries (new-user 5): both use the same code to derive the event from the payload."""

import hashlib
import hmac
from typing import Any

import orjson
import pytest

from tests.rig import Rig
from tests.triggers.conftest import Apply
from tests.triggers.senders import SECRET, from_github, sample, standard

ALERT = {"type": "alert.fired", "data": {"service": "shop"}}
STANDARD: dict[str, Any] = {"webhook": {"secret": "std"}}
PLAIN: dict[str, Any] = {"webhook": {"secret": "gh", "header": "X-Acme-Signature", "id": "payload.id"}}


async def tried(rig: Rig, payload: Any, **more: Any) -> Any:
    answer = await rig.http().post("/api/triggers/hook/test", json={"payload": payload, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def plain(rig: Rig, payload: Any) -> Any:
    body = orjson.dumps(payload)
    signature = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    return await rig.http("").post("/api/hooks/hook", content=body, headers={"x-acme-signature": signature})


@pytest.mark.parametrize("payload", [ALERT, {"type": "alert.closed"}, {"type": 7}, {}, [1], "text"])
@pytest.mark.parametrize(
    "when", ['event.type == "alert.fired"', 'payload.type == "alert.fired"', "event.action == null"]
)
async def test_a_webhook_trial_answers_as_the_delivery_does(rig: Rig, apply: Apply, when: str, payload: Any) -> None:
    await apply(**STANDARD, when=when, input={"type": "${event.type}"})
    said, delivered = await tried(rig, payload), await standard(rig, payload)
    outcome = {202: delivered.json().get("outcome"), 422: "refused"}[delivered.status_code]
    assert said["outcome"] == {"started": "starts"}.get(outcome, outcome)
    assert said["starts"] == (outcome == "started")
    if outcome == "started":
        assert (await rig.run(delivered.json()["run_id"]))["input"] == said["input"]
    else:
        assert said["reason"] == (delivered.json().get("reason") or delivered.json()["detail"])


@pytest.mark.parametrize("payload", [{"id": 12}, {"id": ""}, {}])
async def test_a_trial_needs_the_id_that_a_delivery_needs(rig: Rig, apply: Apply, payload: Any) -> None:
    await apply(**PLAIN, input={"id": "${event.id}"})
    said, delivered = await tried(rig, payload), await plain(rig, payload)
    assert (said["outcome"] == "starts") == (delivered.status_code == 202)
    if delivered.status_code == 422:
        assert (said["outcome"], said["reason"]) == ("refused", delivered.json()["detail"])


@pytest.mark.parametrize("name", ["push", "pull_request.opened", "pull_request.labeled"])
async def test_a_github_trial_answers_as_the_delivery_does(rig: Rig, apply: Apply, name: str) -> None:
    await apply(github={"secret": "gh", "events": ["pull_request.opened", "push"]}, input={"is": "${event}"})
    for said in (
        await tried(rig, sample(name), event=name),
        await tried(rig, sample(name), event=name.partition(".")[0]),
        await tried(rig, sample(name), headers={"X-GitHub-Event": name.partition(".")[0]}),
    ):
        delivered = (await from_github(rig, name, delivery="test")).json()
        assert (said["outcome"], said["reason"]) == (
            ("starts", None) if delivered["outcome"] == "started" else ("ignored", delivered["reason"])
        )
        if delivered["run_id"]:
            assert said["input"] == (await rig.run(delivered["run_id"]))["input"]


async def test_a_trial_refuses_an_event_that_no_delivery_could_have(rig: Rig, apply: Apply) -> None:
    """A webhook's type and GitHub's action are in the payload: a different one beside it would be wrong."""
    http = rig.http()
    await apply(**STANDARD)
    answer = await http.post("/api/triggers/hook/test", json={"payload": ALERT, "event": "push"})
    assert answer.status_code == 422 and "alert.fired" in answer.json()["detail"]
    assert (await tried(rig, ALERT, event="alert.fired"))["outcome"] == "starts"
    await apply(github={"secret": "gh"})
    answer = await http.post("/api/triggers/hook/test", json={"payload": {}, "event": "pull_request.opened"})
    assert answer.status_code == 422 and "`action`" in answer.json()["detail"]
    answer = await http.post("/api/triggers/hook/test", json={"payload": {}})
    assert answer.status_code == 422 and "X-GitHub-Event" in answer.json()["detail"]


async def test_a_trial_sees_the_headers_that_a_delivery_sees(rig: Rig, apply: Apply) -> None:
    await apply(**STANDARD, input={"h": "${headers}"})
    given = {"X-Level": "3", "Authorization": "secret", "Webhook-Signature": "v1,x"}
    assert (await tried(rig, ALERT, headers=given))["input"] == {"h": {"x-level": "3"}}


async def test_a_trial_says_that_a_delivery_would_be_refused(rig: Rig, apply: Apply) -> None:
    """A delivery is answered 409 after the trigger's key was revoked, so the trial must not say `starts`."""
    key = await rig.key("maker", "operator")
    answer = await rig.http(key).post("/api/triggers", json={"name": "hook", "workflow": "work", **STANDARD})
    assert answer.status_code == 201
    assert (await tried(rig, ALERT))["outcome"] == "starts"
    await rig.sql("UPDATE interlock.api_key SET revoked_at = now() WHERE name = 'maker'")
    said, delivered = await tried(rig, ALERT), await standard(rig, ALERT)
    assert delivered.status_code == 409
    assert (said["outcome"], said["reason"]) == ("refused", delivered.json()["detail"])
