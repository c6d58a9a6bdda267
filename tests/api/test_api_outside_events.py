"""/api/events: external events over HTTP."""

import asyncio
from typing import Any

import httpx2
import pytest
from tests.rig import Rig

from interlock.wire import Page, ReceivedEvent, Role, SentEvent

WAIT = '{name: w, steps: [{id: paid, wait: {event: bank.settled, correlation: "${input.charge}", timeout: 1h}}]}'


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    await rig.apply(WAIT)
    return rig.http()


async def start(http: httpx2.AsyncClient, charge: str = "ch_1") -> Any:
    answer = await http.post("/api/runs", json={"workflow": "w", "input": {"charge": charge}})
    assert answer.status_code == 201
    return answer.json()


def event(**more: Any) -> dict[str, Any]:
    return {"type": "bank.settled", "correlation": "ch_1", "payload": {"amount": 5}, **more}


async def test_an_event_is_accepted_and_says_whether_it_was_waited_for(http: httpx2.AsyncClient) -> None:
    run = await start(http)
    assert run["steps"][0]["waits_for"] | {"timeout_at": None} == {
        "event": "bank.settled", "correlation": "ch_1", "timeout_at": None,
    }  # fmt: skip
    answer = await http.post("/api/events", json=event())
    sent = SentEvent.model_validate(answer.json())
    assert (answer.status_code, sent.matched, sent.run_id, sent.step_key) == (202, True, run["id"], "paid")
    again = SentEvent.model_validate((await http.post("/api/events", json=event())).json())
    assert (again.matched, again.run_id, again.payload) == (False, None, {"amount": 5})
    assert again.expires_at > again.received_at and again.id != sent.id
    seen = (await http.get(f"/api/runs/{run['id']}")).json()
    assert seen["steps"][0]["output"] == {"amount": 5}


async def test_the_runs_events_say_what_was_waited_for_and_what_came(http: httpx2.AsyncClient) -> None:
    run = await start(http)
    await http.post("/api/events", json=event(id="evt_9"))
    told = (await http.get(f"/api/runs/{run['id']}/events")).json()["items"]
    parked, arrived = [e["data"] for e in told if e["type"] == "step_transition"]
    assert (parked["event"], parked["context"]["external_event"]["event_type"]) == ("park", "bank.settled")
    assert parked["context"]["external_event"]["expected_at"] == run["steps"][0]["waits_for"]["timeout_at"]
    assert (arrived["event"], arrived["context"]["external_event"] | {"received_at": None}) == (
        "arrive",
        {
            "event_type": "bank.settled", "source": "admin", "event_id": "evt_9", "correlation": "ch_1",
            "received_at": None, "expected_at": run["steps"][0]["waits_for"]["timeout_at"],
        },
    )  # fmt: skip


async def test_the_same_id_is_the_same_event_whoever_sends_it(rig: Rig, http: httpx2.AsyncClient) -> None:
    other = rig.http(await rig.key("hook", Role.OPERATOR))
    answers = await asyncio.gather(*(who.post("/api/events", json=event(id="evt_1")) for who in (http, other) * 5))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.content for answer in answers}) == 1
    assert len(await rig.sql("SELECT FROM interlock.external_event")) == 1
    changed = await http.post("/api/events", json=event(id="evt_1", payload={"amount": 6}))
    assert (changed.status_code, changed.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


async def test_the_same_id_is_the_same_event_for_as_long_as_it_is_kept(rig: Rig, http: httpx2.AsyncClient) -> None:
    rig.clock.freeze()
    await http.post("/api/events", json=event(id="evt_1"))
    run = await start(http)
    rig.clock.advance(2 * 86400)  # the idempotency record has expired by then
    again = SentEvent.model_validate((await http.post("/api/events", json=event(id="evt_1"))).json())
    assert (again.matched, again.run_id) == (True, run["id"])


async def test_a_key_of_the_caller_counts_too(rig: Rig, http: httpx2.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    first, second = [await http.post("/api/events", json=event(), headers=headers) for _ in range(2)]
    assert first.content == second.content and second.headers["idempotency-replayed"] == "true"
    assert len(await rig.sql("SELECT FROM interlock.external_event")) == 1


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"correlation": "c"}, "body.type"),
        ({"type": "e"}, "body.correlation"),
        ({"type": "two words", "correlation": "c"}, "body.type"),
        ({"type": "e", "correlation": ""}, "body.correlation"),
        ({"type": "e", "correlation": "c" * 501}, "body.correlation"),
        ({"type": "e", "correlation": 5}, "body.correlation"),
        ({"type": "e", "correlation": "c", "paylod": {}}, "body.paylod"),
        ({"type": "e", "correlation": "c", "id": ""}, "body.id"),
    ],
)
async def test_a_wrong_event_says_where(http: httpx2.AsyncClient, body: Any, path: str) -> None:
    answer = await http.post("/api/events", json=body)
    assert (answer.status_code, [fault["path"] for fault in answer.json()["errors"]]) == (422, [path])


async def test_what_cannot_be_stored_is_refused_and_keeps_nothing(rig: Rig, http: httpx2.AsyncClient) -> None:
    await start(http)
    answer = await http.post("/api/events", json=event(payload="\0"))
    assert answer.status_code == 422
    assert await rig.sql("SELECT FROM interlock.external_event") == []
    assert len(await rig.sql("SELECT FROM interlock.event_subscription")) == 1


@pytest.mark.parametrize(("role", "status"), [("viewer", 403), ("approver", 403), ("agent", 403), ("operator", 202)])
async def test_not_everybody_may_say_what_happened(rig: Rig, http: httpx2.AsyncClient, role: str, status: int) -> None:
    client = rig.http(await rig.key("k", role))
    assert (await client.post("/api/events", json=event())).status_code == status
    assert (await client.get("/api/events")).status_code == 200


async def test_events_are_listed_newest_first_and_by_page_for_their_tenant_alone(
    rig: Rig, http: httpx2.AsyncClient
) -> None:
    run = await start(http, "ch_0")
    for n in range(3):
        await http.post("/api/events", json=event(correlation=f"ch_{n}", id=f"e{n}"))
    first = Page[ReceivedEvent].model_validate((await http.get("/api/events", params={"limit": 2})).json())
    assert [e.id for e in first.items] == ["e2", "e1"] and first.next_cursor
    rest = await http.get("/api/events", params={"limit": 2, "cursor": first.next_cursor})
    assert [(e["id"], e["run_id"], e["step_key"]) for e in rest.json()["items"]] == [("e0", run["id"], "paid")]
    waiting = (await http.get("/api/events", params={"matched": False, "correlation": "ch_1"})).json()["items"]
    assert [e["id"] for e in waiting] == ["e1"]
    other = rig.http(await rig.key("k", "admin", tenant_id=(await rig.tenant("other")).tenant_id))
    assert (await other.get("/api/events")).json()["items"] == []
